"""What `ssdgen build` compiles: the launches of the emitted host code, each once, whichever call makes it."""

from __future__ import annotations

from ssdgen import pipeline
from ssdgen.ir.build import ArrayArg, ConstantArg, ScalarArg
from ssdgen.run.launches import compile_requests


def test_every_launch_is_a_request_once() -> None:
    form, _ = pipeline.derive("mamba2")
    planned = pipeline.plan(form, {})
    module = pipeline.load(pipeline.emit(planned))
    requests = compile_requests(planned, module, ["sm_80", "sm_90"], ["bf16", "f32"])
    gradients = [r for r in requests if r.module_path.endswith(("_gradients.py", "_sums.py"))]
    requests = [r for r in requests if r not in gradients]
    assert [(r.kernel, r.label) for r in requests if r.arch == "sm_90"] == [
        ("chunk_cumsum", "bf16 f32"),
        ("segment_reach", "bf16 f32"),
        ("segment_states", "bf16"),
        ("group_scores", "bf16"),
        ("walk_out", "bf16"),
        ("segment_reach", "bf16 f32"),  # of gradients: both ways
        ("walk_out", "bf16 with z"),
        ("token_step", "bf16"),
        ("token_step", "bf16 with z"),
        ("token_step", "bf16 steady"),
        ("token_step", "bf16 with bf16 slots"),
        ("token_step", "bf16 with 4 tokens"),
        ("segment_states", "f32"),
        ("group_scores", "f32"),
        ("walk_out", "f32"),
        ("walk_out", "f32 with z"),
        ("token_step", "f32"),
        ("token_step", "f32 with z"),
        ("token_step", "f32 steady"),
        ("token_step", "f32 with bf16 slots"),
        ("token_step", "f32 with 4 tokens"),
    ]
    assert len(requests) == len(set(requests)) == 42
    walks = ("segment_gradients", "state_gradients", "chunk_gradients")
    assert [(r.kernel, r.label) for r in gradients if r.arch == "sm_90" and "bf16" in r.label] == [
        *((kernel, "bf16") for kernel in ("segment_states", "entry_states", *walks)),
        ("token_gradients", "bf16 f32"),
        ("sums", "bf16"),  # of B and C
        ("several_sums", "bf16 f32"),  # of A and dt_bias
        ("sums", "bf16 f32"),  # of D
        ("entry_states", "bf16 started"),  # where the states that segments begin with are kept
        *((kernel, "bf16 with z") for kernel in walks),
    ]
    cumsum = {argument.name: argument for argument in requests[0].signature}
    assert isinstance(cumsum["dt"], ArrayArg)
    assert isinstance(cumsum["dt_min"], ScalarArg)
    assert cumsum["CHUNK"] == ConstantArg("CHUNK", 64)


def test_a_hint_of_the_configuration_is_compiled_with() -> None:
    form, _ = pipeline.derive("retnet")
    planned = pipeline.plan(form, {"occupancy_compute_out": "3", "warps_compute_out": "8"})
    module = pipeline.load(pipeline.emit(planned))
    hints = {r.kernel: dict(r.hints) for r in compile_requests(planned, module, ["sm_90"], ["bf16"])}
    assert hints["walk_out"] == {"occupancy": 3, "num_worker_warps": 8}
