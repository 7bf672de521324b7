"""How far the ends of segments reach: `segment_reach` against a sum chunk by chunk, and that the others are not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _cut, _reach, _runtime, mamba2
from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.plan import plan as plan_of
from ssdgen.run.checks import one_thread, poisoned_memory, relative_error
from ssdgen.run.load import load
from ssdgen.run.verify import emulated
from ssdgen.spec import read_layer

CHUNK = 4


@pytest.fixture(autouse=True)
def in_the_emulator() -> Iterator[None]:
    with one_thread(), poisoned_memory(), emulated(mamba2):
        yield


def sums_of(ends: Tensor) -> Tensor:
    """Running sums [lane, head, token] whose last of each chunk are `ends`; the others are of no concern, NaN."""
    sums = torch.full((*ends.shape, CHUNK), float("nan"))
    sums[..., -1] = ends
    return sums.flatten(2)


def oldest_of(ends: list[float]) -> int:
    """The oldest chunk of which anything is left behind all of `ends`."""
    left, at = 0.0, len(ends) - 1
    while at > 0 and left + ends[at] > _reach.FORGOTTEN:
        left += ends[at]
        at -= 1
    return at


@pytest.mark.parametrize("scale", [0.01, 20.0, 100.0, 128.0])
def test_whole_batches(scale: float) -> None:
    """Of 150 chunks, more than one look takes in; a decay of 128 forgets in one token."""
    lanes, heads, chunks = 2, 3, 150
    ends = -scale * torch.rand(lanes, heads, chunks, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(lanes, chunks * CHUNK)
    cut = _cut.cut(lanes, chunks * CHUNK, CHUNK, 4, 1, 1, None, x)
    assert (cut.per_segment, cut.segments) == (38, 4)
    oldest, newest = _reach.reaches(None, sums_of(ends), cut, CHUNK, False)
    alone = _reach.oldest_chunks(None, sums_of(ends), cut, CHUNK, False)
    for lane in range(lanes):
        for head in range(heads):
            decays = ends[lane, head].tolist()
            for segment in range(cut.segments):
                begin, end = segment * cut.per_segment, min(chunks, (segment + 1) * cut.per_segment)
                first, last = oldest_of(decays[:end]), chunks - 1 - oldest_of(decays[begin:][::-1])
                window = _reach.WINDOW
                assert oldest[segment, lane, head] == (first if end - first < window else 0)
                assert newest[segment, lane, head] == (last if last - begin + 1 < window else chunks - 1)
    assert torch.equal(alone[: cut.inner], oldest[: cut.inner])


def test_a_decay_that_is_not_a_number_is_left() -> None:
    """What it did to the state may not vanish."""
    ends = torch.full((1, 1, 8), -100.0)
    ends[0, 0, 5] = float("nan")
    cut = _cut.cut(1, 8 * CHUNK, CHUNK, 2, 1, 1, None, torch.zeros(1))
    oldest, newest = _reach.reaches(None, sums_of(ends), cut, CHUNK, False)
    assert oldest[1, 0, 0] <= 5
    assert newest[1, 0, 0] >= 5


def inputs(tokens: int, rate: float) -> dict[str, Any]:
    """A call whose tokens decay by `rate` bits each."""
    random = torch.Generator().manual_seed(1)
    x, B, C = (torch.randn(1, tokens, 1, 32, generator=random) for _ in range(3))
    dt = torch.full((1, tokens, 1), 4.0)  # softplus(4) = 4.018
    return {"x": x, "dt": dt, "A": torch.tensor([-rate / 4.018 / 1.4427]), "B": B, "C": C}


CONFIG = replace(
    mamba2.CONFIGS[torch.float32], segments=4, **dict.fromkeys(("scores", "carried", "intra", "state"), "tf32x3")
)


@pytest.mark.parametrize(("rate", "read"), [(0.1, True), (2.2, False)])
def test_what_is_forgotten_is_not_read(rate: float, read: bool) -> None:
    """A number that is none, in the first chunk of four segments of two chunks of 64 tokens: at 2.2 bits a token nothing is
    left behind a chunk, and the other segments are what they are without."""
    call = inputs(512, rate)
    clean, _ = mamba2.forward(**call, config=CONFIG)
    call["x"][:, :3] = float("nan")
    got, state = mamba2.forward(**call, config=CONFIG)
    assert bool(got[:, 128:].isnan().any()) is read
    assert bool(state.isnan().any()) is read
    assert read or torch.equal(got[:, 128:], clean[:, 128:])


@pytest.mark.parametrize("rate", [0.05, 0.6, 2.2, 40.0])
@pytest.mark.parametrize("packed", [False, True])
def test_any_decay_gives_what_the_portable_form_gives(rate: float, packed: bool) -> None:
    """Outputs, states and gradients; with initial states, which no segment may lose or take for another's."""
    call = inputs(800, rate)
    call["S0"] = torch.randn(2 if packed else 1, 1, 32, 32, generator=torch.Generator().manual_seed(2))
    if packed:
        call["cu_seqlens"] = torch.tensor([0, 130, 800])
    leaves = {k: v.requires_grad_() for k, v in call.items() if v.is_floating_point()}
    wide = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    for initial in (True, False):
        names = [n for n in leaves if initial or n != "S0"]
        given = {k: v for k, v in call.items() if initial or k != "S0"}
        values = mamba2.forward(**given, config=CONFIG)
        found = torch.autograd.grad(sum(v.double().square().sum() for v in values), [leaves[n] for n in names])
        with _runtime.portable():
            wanted = mamba2.forward(**{**given, **{n: wide[n] for n in names}})
            exact = torch.autograd.grad(sum(v.square().sum() for v in wanted), [wide[n] for n in names])
        for got, want in zip(values, wanted, strict=True):
            assert relative_error(got.detach(), want.detach()) <= 1e-5
        for name, got, want in zip(names, found, exact, strict=True):
            if name != "A" or rate < 40:  # 1e-11 of the loss, a sum over tokens that cancels
                assert relative_error(got, want) <= 2e-3, name  # gradients multiply in TF32


TWO_DECAYS = """\
language 1
layer two "Two states, one of which remembers what the other has forgotten"

axes    b t h p n
sizes   p = 32, n = 32

inputs
  x[b t h p]             : bf16 | f32
  f[b t h], g[b t h]     : f32 <= 0
  K[b t h n], Q[b t h n] : like x

state   S[b h p n] : f32
        S[t] = exp(f) * S[t-1] + outer(x, K)
        M[b h p n] : f32
        M[t] = exp(g) * M[t-1] + outer(x, K)

output  y[b t h p] : like x
        y = S[t] . Q + M[t] . Q
"""


def test_of_two_decays_the_longer_memory_counts() -> None:
    """A walk with both states jumps over every segment that either remembers."""
    plan = plan_of(chunk_form(recurrence(read_layer(Source("two.ssd", TWO_DECAYS)))))
    module = load("two", package([emit(plan)]))
    random = torch.Generator().manual_seed(3)
    x, K, Q = (torch.randn(1, 512, 1, 32, generator=random) for _ in range(3))
    strong, weak = torch.full((1, 512, 1), -1.5), torch.full((1, 512, 1), -0.01)
    exact = dict.fromkeys(("scores", "carried", "intra", "state"), "tf32x3")
    config = replace(module.CONFIGS[torch.float32], segments=4, **exact)
    for f, g in ((strong, weak), (weak, strong)):
        with emulated(module):
            got = module.forward(x, f, g, K, Q, config=config)
        want = module.forward(*(v.double() for v in (x, f, g, K, Q)))
        for ours, true in zip(got, want, strict=True):
            assert relative_error(ours, true) <= 1e-5
