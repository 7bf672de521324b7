"""Compiling, before the first call, what a whole model launches: for prompts of every class of length, pieces of longer ones,
and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ssdgen.diagnostics import UserError
from ssdgen.generated import mamba2
from ssdgen.ir.layer import Dtype
from ssdgen.models.config import read_config
from ssdgen.models.mamba2 import AT_ONCE, Mamba2
from ssdgen.run.inputs import DTYPES
from ssdgen.run.recorded import recording
from ssdgen.run.tune.device import Device, assumed
from ssdgen.run.warm import TOKENS, Also, Wanted, near

MOST_ROWS = 256
"""Rows whose states are in memory here."""

FEW_CHUNKS = 192
"""Tokens of more than one chunk, and of less than 16."""


def is_model(target: str) -> bool:
    """Whether a target of `ssdgen warm` is the folder of a checkpoint."""
    return (Path(target) / "config.json").is_file()


def model_work(
    folder: Path, shapes: Sequence[Mapping[str, int]], dtypes: Sequence[Dtype], also: Collection[Also] = ()
) -> Callable[[Device], Wanted]:
    """What `ssdgen.run.warm.filled` is to compile for the model of the checkpoint in `folder`: see `launched_by`. There is
    nothing `also`, which is a UserError."""
    if also:
        raise UserError(f"{folder} is a model, of which nothing else is compiled", "leave --also out")
    return partial(launched_by, folder, shapes, dtypes)


def launched_by(
    folder: Path,
    shapes: Sequence[Mapping[str, int]],
    dtypes: Sequence[Dtype],
    device: Device,
    at_once: int = AT_ONCE,
) -> Wanted:
    """The kernels of the model of the checkpoint in `folder`.

    For every shape (b rows, 1 if it does not say, of t tokens, TOKENS if not) these are those of prompts of the lengths that
    are `near` that and are computed at once, of pieces behind others, and of steps. Only the configuration is read: two layers
    of random weights are called, on the CPU, where what is launched is written down; the others, whose caches begin at
    multiples of the second's place, launch the same. Raises UserError for a folder without a model, for other axes, and too
    many rows.
    """
    config = read_config(folder)[0]
    config = replace(config, layers=min(2, config.layers))
    asked = [_rows(shape) for shape in shapes or ({},)]
    calls, requests = 0, []
    for dtype in dtypes:
        model = Mamba2.random(config, dtype=DTYPES[dtype])
        for rows, length in asked:
            lengths = _lengths(max(1, at_once // rows), length)
            with assumed(mamba2, device), recording(mamba2) as launches, torch.no_grad():
                for n in lengths:
                    prompts = torch.zeros((rows, 2 * n), dtype=torch.int64)
                    model.prefill(prompts, model.init_cache(rows), at_once=rows * n)
                model.step(torch.zeros(rows, dtype=torch.int64), model.init_cache(rows))
            calls += 2 * len(lengths) + 1
            requests += [launch.request for launch in launches]
    return Wanted(calls, list(dict.fromkeys(requests)))


def _lengths(piece: int, length: int) -> list[int]:
    """Lengths of every class up to a whole `piece` of a prompt, those of long ones about `length`."""
    some = (FEW_CHUNKS - less for less in (0, 8, 4, 2, 1))
    return [n for n in dict.fromkeys((piece, *near(min(length, piece // 2)), *some)) if 1 <= n <= piece]


def _rows(shape: Mapping[str, int]) -> tuple[int, int]:
    for axis, length in shape.items():
        if axis not in ("b", "t") or length < 1:
            raise UserError(f"a model has no axis `{axis}` of length {length}", "its shapes are of b rows and t tokens")
    rows = shape.get("b", 1)
    if rows > MOST_ROWS:
        alike = MOST_ROWS - 16 + rows % 16
        raise UserError(
            f"{rows} rows of a model are more than are called here, {MOST_ROWS} at most",
            f"--shape b={alike}: they are as many over a multiple of 16, and launch the same kernels",
        )
    return rows, shape.get("t", TOKENS)
