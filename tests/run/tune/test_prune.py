"""What falls out before it is measured, and that the reason is the right one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssdgen.build.worker import Compiled, Rejected
from ssdgen.emit.support._segments import segments
from ssdgen.ir.build import CompileRequest, ConstantArg, KernelResources
from ssdgen.plan.roofline import roofline
from ssdgen.run.recorded import Call
from ssdgen.run.tune import prune
from ssdgen.run.tune.device import H200, SHARED_LIMIT
from ssdgen.run.tune.prune import LAUNCH_SECONDS, Estimate, Removed, compiled_badly, estimated
from ssdgen.run.tune.space import Candidate, Space

REQUEST = CompileRequest("layer.py", "kernel", (), (), "sm_90")
USED = KernelResources(255, 200 << 10, 0, 0, 0, (), 0, 0, 0, 0)


def reason(found: Estimate | Removed) -> str:
    assert isinstance(found, Removed)
    return found.step


def test_the_launches_of_a_candidate_are_those_of_its_own_host_code(space: Space, call: Call) -> None:
    found = estimated(space, Candidate(fields=(("chunk", 128), ("occupancy_compute_out", 1))), call, H200)
    assert isinstance(found, Estimate)
    kernels = {launch.request.kernel: launch for launch in found.launches}
    scalars = kernels["chunk_cumsum"]
    assert scalars.blocks == 2 * 4096 // 128
    assert ConstantArg("CHUNK", 128) in scalars.request.signature
    assert kernels["group_scores"].blocks == 2 * 4096 // 128
    assert found.launches[-1].request.hints == (("occupancy", 1),)


def test_a_candidate_is_cut_as_on_the_gpu_it_is_for(space: Space, call: Call) -> None:
    """Few multiprocessors have few segments: what is compiled ahead and modelled is what that GPU will launch."""
    long = replace(call, sizes={**call.sizes, "b": 1, "t": 131072})
    found = [estimated(space, Candidate(), long, replace(H200, multiprocessors=n)) for n in (16, 132)]
    cuts = []
    for estimate, multiprocessors in zip(found, (16, 132), strict=True):
        assert isinstance(estimate, Estimate)
        walks = long.sizes["b"] * long.sizes["h"] * -(-long.sizes["p"] // 64)
        cuts.append(segments(0, long.sizes["t"] // 64, walks, long.sizes["n"], multiprocessors)[0])
        assert estimate.launches[-1].grid[1] == cuts[-1]
    assert cuts[0] < cuts[1]


def test_padding_is_no_use(space: Space, call: Call) -> None:
    assert reason(estimated(space, Candidate(fields=(("tile_p", 128),)), call, H200)) == "computes padding"
    short = replace(call, sizes={**call.sizes, "t": 40})
    assert reason(estimated(space, Candidate(fields=(("chunk", 128),)), short, H200)) == "computes padding"


def test_what_the_module_refuses_is_refused(space: Space, call: Call) -> None:
    assert reason(estimated(space, Candidate(fields=(("no_such", 1),)), call, H200)) == "refused by the module"
    wide = replace(call, sizes={**call.sizes, "n": 512})
    assert reason(estimated(space, Candidate((("plan", "single_walk"),)), wide, H200)) == "refused by the module"


def test_few_blocks_are_slow_by_the_model(space: Space, call: Call) -> None:
    """A walk by batch x heads alone leaves most of the GPU idle where those are few."""
    long = replace(call, sizes={**call.sizes, "b": 1, "t": 131072})
    walk, cut = (estimated(space, Candidate((("plan", p),)), long, H200) for p in ("single_walk", "segmented"))
    assert isinstance(walk, Estimate)
    assert isinstance(cut, Estimate)
    assert walk.seconds > 2 * cut.seconds


def test_the_model_is_the_roofline_and_a_launch_for_each_kernel(space: Space, call: Call) -> None:
    """Where blocks fill the GPU; whatever is launched has its bytes from the one definition."""
    full = replace(call, sizes={**call.sizes, "b": 64})
    found = estimated(space, Candidate(fields=(("chunk", 128),)), full, H200)
    assert isinstance(found, Estimate)
    floor = roofline(space.variant(Candidate()).plan, full.sizes, segments, knobs={"chunk": 128})
    assert [launch.request.kernel for launch in found.launches] == [work.kernel for work in floor.kernels]
    launching = LAUNCH_SECONDS * len(floor.kernels)
    assert found.seconds == pytest.approx(launching + floor.bytes / H200.bandwidth)
    plain = estimated(space, Candidate(), full, H200)
    assert isinstance(plain, Estimate)
    assert found.seconds > plain.seconds, "a group's scores are a row of a chunk's keys for each token"


def test_the_compiler_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(**used: int) -> str | None:
        monkeypatch.setattr(prune, "read_cubin", lambda cubin: replace(USED, **used))  # type: ignore[arg-type]
        bad = compiled_badly(Compiled(b"", 1.0), REQUEST, H200)
        return bad and bad[0]

    assert judged() is None
    assert judged(shared_bytes=228 << 10) is None, "1 KB of them is the system's"
    assert judged(shared_bytes=(228 << 10) + 1) == "too much shared memory"
    assert judged(spilled_bytes=prune.SPILL_LIMIT) is None
    assert judged(spilled_bytes=prune.SPILL_LIMIT + 8) == "spills"
    assert compiled_badly(Rejected("it is\n too big"), REQUEST, H200) == ("does not compile", "kernel: it is too big")


def test_a_cubin_that_cannot_be_read_does_not_compile() -> None:
    bad = compiled_badly(Compiled(b"\x7fELF", 1.0), REQUEST, H200)
    assert bad is not None
    assert bad[0] == "does not compile"


def test_every_architecture_has_a_limit() -> None:
    from ssdgen.ir.build import ARCHITECTURES

    assert set(SHARED_LIMIT) == set(ARCHITECTURES)
    assert replace(H200, arch="sm_80").shared_limit == 163 << 10
