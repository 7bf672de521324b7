"""The tables by which kernels find packed sequences, and what of a call is refused: `_packed.py`, copied beside modules."""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgen.run.inputs import Case, Inputs, draw
from tests.cases.subject import Subject, mamba2_sizes, subject


def support() -> ModuleType:
    return importlib.import_module("._packed", subject("mamba2").module.__package__)


lengths = st.lists(st.integers(0, 70), min_size=1, max_size=9)
spans = st.sampled_from([16, 32])
planes = st.integers(1, 4).flatmap(lambda b: st.integers(1, 60).map(lambda t: (b, t)))


def from_lengths(lengths: list[int], dtype: torch.dtype = torch.int32) -> Any:
    edges = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    return support().from_cu_seqlens(edges, sum(lengths))


def check_tables(sequences: Any, chunk: int, per_segment: int) -> None:
    """Every token is in one chunk and one segment, pieces begin at the sequence's first token, places are where said."""
    chunks = support().chunk_table(sequences, chunk)
    segments = support().segment_table(sequences, chunk, per_segment)
    assert chunks.dtype == segments.dtype == torch.int32
    assert len(chunks) <= sequences.tokens // chunk + sequences.count
    assert len(segments) <= sequences.tokens // (chunk * per_segment) + sequences.count
    chunk_rows, segment_rows = chunks.tolist(), segments.tolist()
    used = []
    seen = []
    for i, (row, start, stop) in enumerate(
        zip(sequences.rows.tolist(), sequences.starts.tolist(), sequences.stops.tolist(), strict=True)
    ):
        mine = [(place, s) for place, s in enumerate(segment_rows) if s[0] == i]
        assert len(mine) == max(1, -(-(stop - start) // (chunk * per_segment))), "an empty sequence has a segment too"
        assert [s[5] for _, s in mine] == list(range(len(mine)))
        assert [place for place, _ in mine] == list(range(mine[0][0], mine[0][0] + len(mine)))
        assert [s[6] for _, s in mine] == [0] * (len(mine) - 1) + [1], "the last one is marked, and no other"
        assert {s[1] for _, s in mine} == {row}
        if start == stop:
            assert mine[0][1][2:4] == [0, 0]
        else:
            assert all(s[2:4] == [start, stop] for _, s in mine), (
                "the sequence's tokens: a segment is found by its index"
            )
        first = mine[0][1][4]
        cuts = [*range(start, stop, chunk), stop]
        for at in range(len(cuts) - 1):
            assert chunk_rows[first + at] == [row, cuts[at], cuts[at + 1], first]
            used.append(first + at)
            seen += [(row, t) for t in range(cuts[at], cuts[at + 1])]
    assert len(used) == len(set(used)), "no two chunks share a place"
    assert len(seen) == len(set(seen)), "no token is in two chunks"
    assert all(row == [0, 0, 0, 0] for place, row in enumerate(chunk_rows) if place not in used)
    assert all(row[2:4] == [0, 0] and row[6] == 0 for row in segment_rows if row[0] == -1)


@settings(max_examples=150, deadline=None)
@given(lengths, spans, st.integers(1, 3), st.sampled_from([torch.int32, torch.int64]))
def test_tables_of_packed_sequences(cut: list[int], chunk: int, per_segment: int, dtype: torch.dtype) -> None:
    sequences = from_lengths(cut, dtype)
    assert (sequences.stops - sequences.starts).tolist() == cut
    check_tables(sequences, chunk, per_segment)


@settings(max_examples=60, deadline=None)
@given(planes, spans, st.integers(1, 3), st.randoms(use_true_random=False))
def test_tables_of_an_index(plane: tuple[int, int], chunk: int, per_segment: int, random: Any) -> None:
    index = torch.tensor([[random.choice((0, 0, 0, 1)) for _ in range(plane[1])] for _ in range(plane[0])])
    sequences = support().from_seq_idx(index)
    check_tables(sequences, chunk, per_segment)
    covered = sum(b - a for a, b in zip(sequences.starts.tolist(), sequences.stops.tolist(), strict=True))
    assert covered == index.numel()
    for row, start, stop in zip(
        *(x.tolist() for x in (sequences.rows, sequences.starts, sequences.stops)), strict=True
    ):
        assert len(set(index[row, start:stop].tolist())) == 1


@settings(max_examples=60, deadline=None)
@given(planes, spans, st.integers(1, 3), st.randoms(use_true_random=False), st.booleans())
def test_tables_of_a_mask(plane: tuple[int, int], chunk: int, per_segment: int, random: Any, holes: bool) -> None:
    """A row's tokens are one sequence; what a mask with holes keeps can be gathered and put back."""
    b, t = plane
    if holes:
        mask = torch.tensor([[random.random() < 0.6 for _ in range(t)] for _ in range(b)])
    else:
        ends = [sorted((random.randint(0, t), random.randint(0, t))) for _ in range(b)]
        mask = torch.tensor([[low <= i < high for i in range(t)] for low, high in ends])
    sequences = support().from_mask(mask)
    check_tables(sequences, chunk, per_segment)
    assert (sequences.stops - sequences.starts).tolist() == mask.sum(1).tolist()
    assert sequences.whole == bool(mask.all())
    assert sequences.gaps != sequences.whole
    if not holes:
        assert sequences.kept is None, "what is contiguous needs no copy"
    layer = subject("mamba2").module.LAYER
    x = torch.randn(b, t, 2, 3)
    inputs = {"x": x, "dt": x[..., 0], "B": x, "C": x}
    gathered = support().gather(layer, sequences, [inputs.get(i.name) for i in layer.inputs])
    if sequences.kept is not None:
        for r in range(b):
            assert torch.equal(gathered[0][r, : sequences.stops[r]], x[r][mask[r]])
            assert torch.equal(gathered[1][r, : sequences.stops[r]], x[r, :, :, 0][mask[r]])
        assert torch.equal(
            support().scatter(layer, sequences, layer.outputs["y"], gathered[0], t), x * mask[:, :, None, None]
        )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-100, 200), min_size=2, max_size=8), spans)
def test_wrong_cu_seqlens_stay_inside(edges: list[int], chunk: int) -> None:
    """On a GPU values are not read back: whatever they are, no token outside, and none twice in two sequences."""
    sequences = support().from_cu_seqlens(torch.tensor(edges), 100)
    pairs = list(zip(sequences.starts.tolist(), sequences.stops.tolist(), strict=True))
    assert all(0 <= a <= b <= 100 for a, b in pairs)
    assert all(b <= c for (_, b), (c, _) in itertools.pairwise(pairs))
    for table, at in ((support().chunk_table(sequences, chunk), 1), (support().segment_table(sequences, chunk, 2), 2)):
        assert ((table[:, at] >= 0) & (table[:, at] <= table[:, at + 1]) & (table[:, at + 1] <= 100)).all()


def test_states_enter_a_rows_first_sequence_and_leave_its_last() -> None:
    layer = subject("mamba2").module.LAYER
    sequences = support().from_seq_idx(torch.tensor([[0, 0, 1, 2], [5, 5, 5, 5]]))
    S0 = torch.randn(2, 1, 2, 3)
    spread = support().spread_states(layer, sequences, "S", S0)
    assert spread.shape[0] == 4
    assert torch.equal(spread[[0, 3]], S0)
    assert not spread[1:3].any()
    final = torch.randn(4, 1, 2, 3)
    assert torch.equal(support().pick_states(layer, sequences, "S", final, 2), final[[2, 3]])
    arriving = support().spread_states(layer, sequences, "S", S0, last=True)
    assert torch.equal(arriving[[2, 3]], S0), "what arrives at final states arrives where they are"
    assert not arriving[:2].any()
    assert torch.equal(support().pick_states(layer, sequences, "S", final, 2, last=False), final[[0, 3]])
    own = from_lengths([3, 0, 2])
    assert support().spread_states(layer, own, "S", final) is final
    assert support().pick_states(layer, own, "S", final, 1) is final


def test_gradients_of_packed_sequences() -> None:
    """Each sequence's inputs and initial state get their own gradient; masked tokens, whatever they hold, get none."""
    mamba2 = subject("mamba2")
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=2, t=7, h=2, g=1, p=3, n=3), dtype="f64"))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    x, S0 = inputs.tensors["x"], inputs.states["S"]
    x[~mask] = torch.nan
    x.requires_grad_()
    S0.requires_grad_()
    y, S = mamba2.module.forward(**inputs.keywords(), mask=mask)
    got = torch.autograd.grad((y * y).sum() + (S * S).sum(), (x, S0))
    assert (got[0][~mask] == 0).all()
    for row in range(2):
        own = {k: v[row : row + 1, mask[row]] if v.dim() > 2 or k == "dt" else v for k, v in inputs.tensors.items()}
        own["D"] = inputs.tensors["D"]
        alone = Inputs(own, {}, {"S": S0[row : row + 1]})
        y, S = mamba2.module.forward(**alone.keywords())
        wanted = torch.autograd.grad((y * y).sum() + (S * S).sum(), (x, S0))
        torch.testing.assert_close(got[0][row, mask[row]], wanted[0][row, mask[row]])
        torch.testing.assert_close(got[1][row], wanted[1][row])


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "two": (
        {"cu_seqlens": torch.tensor([0, 5]), "mask": torch.ones(2, 5).bool()},
        TypeError,
        r"`cu_seqlens` and `mask`.*one of them",
    ),
    "no tensor": ({"mask": [[True]]}, TypeError, r"`mask` must be a torch\.Tensor, got list"),
    "mask dtype": ({"mask": torch.ones(2, 5)}, TypeError, r"`mask` must be bool, got float32"),
    "index dtype": ({"seq_idx": torch.ones(2, 5)}, TypeError, r"`seq_idx` must be int32 or int64, got float32"),
    "edges dtype": ({"cu_seqlens": torch.ones(2)}, TypeError, r"`cu_seqlens` must be int32 or int64, got float32"),
    "mask rank": ({"mask": torch.ones(5).bool()}, ValueError, r"`mask` must be \[b t\] \(rank 2\), got shape \[5\]"),
    "edges rank": ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"`cu_seqlens`.*sequences \+ 1.*\[1, 2\]"),
    "no edges": ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, ValueError, r"`cu_seqlens`.*got shape \[0\]"),
    "mask size": ({"mask": torch.ones(2, 6).bool()}, ValueError, r"`mask`\[b t\].*\[2, 6\].*b is 2.*t is 5"),
    "index size": ({"seq_idx": torch.ones(3, 5).int()}, ValueError, r"`seq_idx`\[b t\].*\[3, 5\].*b is 2.*t is 5"),
    "batch": ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"`cu_seqlens`.*batch of 1.*axis b is 2"),
    "device": ({"mask": torch.empty(2, 5, dtype=torch.bool, device="meta")}, ValueError, r"`mask` is on meta.*cpu"),
}


def call(mamba2: Subject, batch: int = 2, states: int | None = None, **packing: Any) -> None:
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=batch, t=5)))
    S0 = None if states is None else torch.randn(states, 4, 40, 24)
    mamba2.module.forward(**{**inputs.keywords(), "S0": S0, **packing})


@pytest.mark.parametrize("what", WRONG)
def test_wrong_packing(what: str) -> None:
    packing, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call(subject("mamba2"), **packing)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([1, 5], "begins at 1"),
        ([0, 4], "ends at 4"),
        ([0, 3, 2, 5], "2 follows 3 at entry 2"),
        ([0], "ends at 0"),
        ([0, 9], "ends at 9"),
    ],
)
def test_wrong_edges(edges: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=rf"`cu_seqlens` must begin at 0, never decrease, and end at 5.*{message}"):
        call(subject("mamba2"), batch=1, cu_seqlens=torch.tensor(edges))


def test_states_have_an_entry_a_sequence() -> None:
    """With `cu_seqlens` three sequences have three states, though the batch is 1; with the others the batch counts."""
    mamba2, edges = subject("mamba2"), torch.tensor([0, 2, 2, 5])
    call(mamba2, batch=1, states=3, cu_seqlens=edges)
    with pytest.raises(
        ValueError, match=r"`S0`\[<sequence> h p n\].*\[1, 4, 40, 24\].*<sequence> is 3 in `cu_seqlens`"
    ):
        call(mamba2, batch=1, states=1, cu_seqlens=edges)
    call(mamba2, states=2, seq_idx=torch.tensor([[0, 0, 1, 1, 2]] * 2))
    with pytest.raises(ValueError, match=r"`S0`\[b h p n\]"):
        call(mamba2, states=3, mask=torch.tensor([[True, False, True, True, True]] * 2))


def test_a_range_binds_only_tokens_that_are_not_masked() -> None:
    """A masked token's gate may be NaN or positive; that of one that counts may not."""
    simple_gla = subject("simple_gla")
    sizes = {"b": 1, "t": 5, "h": 2, "p": 8, "n": 8}
    inputs = draw(simple_gla.layer, Case(sizes))
    ranged = next(i for i in simple_gla.module.LAYER.inputs if i.high == 0.0)
    inputs.tensors[ranged.name][:, 2] = torch.nan
    mask = torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"`{ranged.name}`.*nan"):
        simple_gla.module.forward(**inputs.keywords(), mask=mask)
    mask[:, 2] = False
    assert simple_gla.module.forward(**inputs.keywords(), mask=mask)[0].isfinite().all()
