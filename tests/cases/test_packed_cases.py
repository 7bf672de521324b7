"""The rows about packed and masked sequences of the list of what users of such kernels run into; a test a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssdgen.ir.report import Gate
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, Inputs, draw
from ssdgen.run.reference import reference
from tests.cases.subject import BOTH, EXACT, Subject, mamba2_sizes, subject

both = pytest.mark.parametrize("gate", BOTH)
LIMIT = 1e-5


@pytest.fixture
def mamba2() -> Subject:
    return subject("mamba2")


def call(mamba2: Subject, gate: Gate, inputs: Inputs, packing: dict[str, torch.Tensor], **config: Any) -> Any:
    """One call with a packing; skipped, with the reason, while there are no kernels for it."""
    tensors = Inputs(inputs.tensors | packing, inputs.params, inputs.states)
    exact = EXACT if gate == "emulation" else {}
    try:
        return mamba2.call(gate, tensors, **(exact | config))
    except NotImplementedError as error:
        pytest.skip(str(error))


def tokens_of(inputs: Inputs, row: int, keep: Any) -> dict[str, torch.Tensor]:
    per_token = {"x", "dt", "B", "C", "z"}
    return {k: v[row : row + 1, keep] if k in per_token else v for k, v in inputs.tensors.items()}


def check_packed(mamba2: Subject, gate: Gate, lengths: list[int], **config: int) -> None:
    """Every sequence equals the float64 loop over its own tokens, from its own initial state."""
    sizes = mamba2_sizes(b=1, t=sum(lengths), h=2, g=1, p=32, n=32)
    inputs = draw(mamba2.layer, Case(sizes, absent=frozenset({"S0"})))
    S0 = torch.randn(len(lengths), 2, 32, 32)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs.states["S"] = S0
    y, S = call(mamba2, gate, inputs, {"cu_seqlens": edges}, **config)
    assert S.shape == S0.shape
    for i, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        own = tokens_of(inputs, 0, slice(start, stop))
        outputs, finals = reference(mamba2.layer, own, {}, {"S": S0[i : i + 1]})
        assert relative_error(S[i : i + 1], finals["S"]) <= LIMIT, f"state of sequence {i}"
        assert relative_error(y[:, start:stop], outputs["y"]) <= LIMIT, f"sequence {i}"
        if start == stop:
            assert torch.equal(S[i], S0[i])


@both
def test_packed(mamba2: Subject, gate: Gate) -> None:
    """sglang 31833: lengths 500, 700, 900 at Q=128: states were 104 % off. Each sequence equals its own run."""
    check_packed(mamba2, gate, [500, 700, 900], chunk=128)


@both
@pytest.mark.parametrize("lengths", [[0, 5, 0], [0], [0, 0, 0], [1], [0, 0, 70]])
def test_empty(mamba2: Subject, gate: Gate, lengths: list[int]) -> None:
    """FlashKDA PR 32: empty sequences abort. Lengths 0, 5, 0 and a total of 0: final state = initial state."""
    check_packed(mamba2, gate, lengths)


@both
def test_initial_state(mamba2: Subject, gate: Gate) -> None:
    """vllm PR 22034: the initial state is dropped when the batch is 1. Here one packed sequence, with a state."""
    check_packed(mamba2, gate, [70])


@both
@pytest.mark.parametrize("where", ["left", "right", "inside", "all"])
def test_masked_tokens(mamba2: Subject, gate: Gate, where: str) -> None:
    """transformers PR 32677: padding leaks into the state. Masked tokens hold NaN, on the left, inside, everywhere."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=2, t=70, h=2, g=1, p=32, n=32)))
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, {"left": slice(0, 9), "right": slice(50, 70), "inside": slice(30, 35), "all": slice(0, 70)}[where]] = False
    for name in ("x", "dt", "B", "C", "z"):
        inputs.tensors[name][~mask] = torch.nan
    y, S = call(mamba2, gate, inputs, {"mask": mask})
    assert (y[~mask] == 0).all()
    for row in range(2):
        own = tokens_of(inputs, row, mask[row])
        outputs, finals = reference(mamba2.layer, own, {}, {"S": inputs.states["S"][row : row + 1]})
        assert relative_error(S[row : row + 1], finals["S"]) <= LIMIT
        assert relative_error(y[row : row + 1, mask[row]], outputs["y"]) <= LIMIT
    if where == "all":
        assert torch.equal(S[0], inputs.states["S"][0])


@both
def test_wrong_boundaries(mamba2: Subject, gate: Gate) -> None:
    """Wrong boundaries are refused before anything runs, by portable path and kernels alike."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=70, h=2, g=1, p=32, n=32), absent=frozenset({"S0"})))
    with pytest.raises(ValueError, match=r"`cu_seqlens` must begin at 0.*20 follows 30 at entry 2"):
        call(mamba2, gate, inputs, {"cu_seqlens": torch.tensor([0, 30, 20, 70])})


@pytest.mark.parametrize("packing", ["cu_seqlens", "seq_idx", "mask"])
def test_under_inference_mode(mamba2: Subject, packing: str) -> None:
    """A call that packs works where no gradients are kept, and leaves what it was given as it was."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=20, h=2, g=1, p=4, n=4)))
    given = {
        "cu_seqlens": torch.tensor([0, 20]),
        "seq_idx": torch.zeros(1, 20, dtype=torch.int32),
        "mask": torch.ones(1, 20, dtype=torch.bool),
    }[packing]
    before = given.clone()
    with torch.inference_mode():
        y, _ = mamba2.module.forward(**inputs.keywords(), **{packing: given})
    assert torch.equal(y, mamba2.module.forward(**inputs.keywords())[0])
    assert torch.equal(given, before)
