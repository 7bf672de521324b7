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
    assert [(r.kernel, r.label) for r in requests if r.arch == "sm_90"] == [
        ("chunk_cumsum", "bf16 f32"),
        ("fwd_pass_state", "bf16"),
        ("compute_out", "bf16"),
        ("compute_out_z", "bf16 with z"),
        ("fwd_pass_state", "f32"),
        ("compute_out", "f32"),
        ("compute_out_z", "f32 with z"),
    ]
    assert len(requests) == len(set(requests)) == 14
    cumsum = {argument.name: argument for argument in requests[0].signature}
    assert isinstance(cumsum["dt"], ArrayArg)
    assert isinstance(cumsum["dt_min"], ScalarArg)
    assert cumsum["CHUNK"] == ConstantArg("CHUNK", 64)


def test_a_hint_of_the_configuration_is_compiled_with() -> None:
    form, _ = pipeline.derive("retnet")
    planned = pipeline.plan(form, {"occupancy_compute_out": "3"})
    module = pipeline.load(pipeline.emit(planned))
    hints = {r.kernel: dict(r.hints) for r in compile_requests(planned, module, ["sm_90"], ["bf16"])}
    assert hints["compute_out"] == {"occupancy": 3}
