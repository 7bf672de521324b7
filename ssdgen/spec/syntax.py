"""What a statement says before any name in it means something: the parser's output."""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.diagnostics import Span
from ssdgen.ir.layer import Interval


@dataclass(frozen=True, slots=True)
class Word:
    """A name where it stands."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Number:
    """A number where it stands: an int as written, a float, or inf."""

    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A use of a name; `axis` and `lag` are those of `[t-1]`, absent for a bare name."""

    name: Word
    axis: Word | None
    lag: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    """`function(args)`, or an operator: a call of `add`, `sub`, `mul`, `div`, `neg`, `pow` or `dot`."""

    function: Word
    args: tuple[Term, ...]
    span: Span
    operator: bool = False


Term = Number | Name | Call


@dataclass(frozen=True, slots=True)
class Form:
    """`x[b t h p]`: a name with its axes."""

    name: Word
    axes: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Range:
    """`< 0` or `in (0, 1]`."""

    interval: Interval
    span: Span


@dataclass(frozen=True, slots=True)
class Type:
    """`bf16 | f16`, or `like x`, then a range, a default, and `optional`."""

    dtypes: tuple[Word, ...]
    like: Word | None
    range: Range | None
    default: Number | None
    optional: Word | None
    span: Span


@dataclass(frozen=True, slots=True)
class Language:
    """`language 1`."""

    version: Number


@dataclass(frozen=True, slots=True)
class Title:
    """`layer NAME "title"`."""

    name: Word
    title: str


@dataclass(frozen=True, slots=True)
class AxisNames:
    """`axes b t h p n`."""

    names: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """`groups g shares h`, one or several."""

    pairs: tuple[tuple[Word, Word], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """`sizes p = 64, n = 128`."""

    pairs: tuple[tuple[Word, Number], ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """`B[b t g n], C[b t g n] : like x`; each tensor has one or several forms."""

    tensors: tuple[tuple[Form, ...], ...]
    type: Type


@dataclass(frozen=True, slots=True)
class ParamItem:
    """`k : f32 > 0 = 1` of a `param` statement."""

    name: Word
    dtype: Word | None
    range: Range | None
    default: Number


@dataclass(frozen=True, slots=True)
class Params:
    """`param dt_min = 0, dt_max = inf`."""

    items: tuple[ParamItem, ...]


@dataclass(frozen=True, slots=True)
class Declare:
    """`S[b h p n] : f32` of a state, `y[b t h p] : like x` of an output."""

    form: Form
    type: Type


@dataclass(frozen=True, slots=True)
class Assign:
    """`step = ...`, `S[t] = ...` (with `axes`), `y = ...`, or `when z: y = ...`."""

    name: Word
    axes: tuple[Word, ...]
    value: Term
    when: Word | None
    span: Span


@dataclass(frozen=True, slots=True)
class Knob:
    """A statement of the schedule: its alternatives by subject, `latency x = 3 | 5` being ((x, (3, 5)),).

    `words` are those of a knob whose alternatives are words (plan, swap, weighted, persistent, the order of a layout).
    """

    name: Word
    subject: Word | None
    words: tuple[Word, ...]
    numbers: tuple[Number, ...]
    choices: tuple[tuple[Word, tuple[Number, ...]], ...]
    precisions: tuple[tuple[Word, tuple[Word, ...]], ...]


Parsed = Language | Title | AxisNames | Shares | Sizes | Inputs | Params | Declare | Assign | Knob
