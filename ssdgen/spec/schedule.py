"""The schedule block: a space of choices, each checked against the layer it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from ssdgen.diagnostics import Span
from ssdgen.ir.expr import Axes
from ssdgen.ir.layer import Dtype
from ssdgen.ir.schedule import (
    ALLOWED,
    KERNELS,
    PERSISTENT,
    PLANS,
    PRECISIONS,
    PRODUCTS,
    SIDES,
    Choice,
    Layout,
    MmaChoice,
    PlanName,
    Precision,
    Product,
    Schedule,
    Side,
)
from ssdgen.spec.declare import dtypes_of
from ssdgen.spec.problems import closest, listing
from ssdgen.spec.scope import Scope
from ssdgen.spec.syntax import Knob, Number, Word

UNDECLARED = Schedule()
NUMBERS = {
    "chunk": "a chunk",
    "tile": "a tile",
    "latency": "a latency",
    "occupancy": "an occupancy",
    "warps": "a number of worker warps",
    "share_scores_from": "a number of heads",
    "segments": "a number of segments",
}
CHOICES = ("latency", "state_latency", "tile", "state_tile", "occupancy", "warps")
NO_PRODUCT = "none"
SCORES = "scores"
"""The product whose stored copy, made once a group, `latency` may name like a tensor."""


class ScheduleReader:
    """Collects the knobs of a schedule block one statement at a time."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._seen: dict[tuple[str, str], Span] = {}
        self._numbers_of: dict[str, tuple[int, ...]] = {}
        self._mma: dict[tuple[Dtype, Product], tuple[Precision, ...]] = {}
        self._layouts: list[Layout] = []
        self._internals: list[Layout] = []
        self._swap: tuple[Product, ...] = ()
        self._weighted = UNDECLARED.weighted
        self._choices: dict[str, list[Choice]] = {kind: [] for kind in CHOICES}
        self._persistent = UNDECLARED.persistent
        self._plan = UNDECLARED.plan

    def read(self, knob: Knob) -> None:
        """Add one statement, reporting what is wrong with it."""
        readers: dict[str, Callable[[Knob], None]] = {
            **dict.fromkeys(("chunk", "share_scores_from", "segments"), self._read_number),
            "mma": self._read_mma,
            "layout": self._read_layout,
            "internal": self._read_internal,
            "swap": self._read_swap,
            "weighted": self._read_weighted,
            **dict.fromkeys(CHOICES, self._read_choices),
            "persistent": self._read_persistent,
            "plan": self._read_plan,
        }
        readers[knob.name.text](knob)

    def schedule(self) -> Schedule:
        """The schedule, every product's precisions filled in for every dtype; reports defaults that exclude each other."""
        if self._persistent[0] and self._plan[0] != PERSISTENT:
            span = self._seen[("persistent", "persistent")]
            hint = f"the grids of other plans are one wave by construction; put `{PERSISTENT}` or `no` first"
            self._scope.problems.add("E075", span, f"the plan `{self._plan[0]}` has no persistent kernel", hint)
        return Schedule(
            mma=tuple(MmaChoice(d, p, self._precisions(d, p)) for d in ("bf16", "f16", "f32") for p in PRODUCTS),
            layouts=tuple(self._layouts),
            internals=tuple(self._internals),
            swap=self._swap,
            weighted=self._weighted,
            latency=tuple(self._choices["latency"]),
            state_latency=tuple(self._choices["state_latency"]),
            tile=tuple(self._choices["tile"]),
            state_tile=tuple(self._choices["state_tile"]),
            occupancy=tuple(self._choices["occupancy"]),
            warps=tuple(self._choices["warps"]),
            chunk=self._numbers_of.get("chunk", UNDECLARED.chunk),
            share_scores_from=self._numbers_of.get("share_scores_from", UNDECLARED.share_scores_from),
            segments=self._numbers_of.get("segments", UNDECLARED.segments),
            persistent=self._persistent,
            plan=self._plan,
        )

    def _precisions(self, dtype: Dtype, product: Product) -> tuple[Precision, ...]:
        for_bf16 = self._mma.get(("bf16", product), ("bf16",))
        if dtype == "bf16":
            return for_bf16
        tf32: Precision = "tf32"
        wider = tuple(dict.fromkeys(p if p not in ("bf16", "bf16x2") else tf32 for p in for_bf16))
        return self._mma.get((dtype, product), wider)

    def _once(self, knob: Word, subject: Word) -> bool:
        first = self._seen.get((knob.text, subject.text))
        if first is not None:
            what = knob.text if knob.text == subject.text else f"{knob.text} {subject.text}"
            hint = f"line {first.line} has its alternatives; separate more of them with `|`"
            self._scope.problems.add("E071", subject.span, f"`{what}` is declared twice", hint)
            return False
        self._seen[(knob.text, subject.text)] = subject.span
        return True

    def _numbers(self, numbers: Iterable[Number], knob: str) -> tuple[int, ...]:
        add, what = self._scope.problems.add, NUMBERS[knob]
        values, power = ALLOWED[knob], knob in ("chunk", "tile")
        few = isinstance(values, tuple) and not power
        kind = "a power of two" if power else "a whole number"
        allowed = f"{what} is {listing(map(str, values), 'or') if few else f'{kind} from {values[0]} to {values[-1]}'}"
        found: list[int] = []
        for number in numbers:
            value = number.value
            if not isinstance(value, int) or (power and (value < 1 or value & (value - 1))):
                add("E072", number.span, f"{what} of {value:g} is not {kind}", allowed)
            elif value not in values:
                add("E072", number.span, f"{what} of {value} is out of range", allowed)
            elif value in found:
                add("E071", number.span, f"{value} is listed twice")
            else:
                found.append(value)
        return tuple(found)

    def _words(self, words: tuple[Word, ...], known: tuple[str, ...], what: str) -> tuple[str, ...]:
        found: list[str] = []
        for word in words:
            if word.text not in known:
                hint = closest(word.text, known, f"there {'are' if len(known) > 1 else 'is'} {listing(known)}")
                self._scope.problems.add("E073", word.span, f"no {what} is called `{word.text}`", hint)
            elif word.text in found:
                self._scope.problems.add("E071", word.span, f"`{word.text}` is listed twice")
            else:
                found.append(word.text)
        return tuple(found)

    def _read_number(self, knob: Knob) -> None:
        if self._once(knob.name, knob.name):
            self._numbers_of[knob.name.text] = self._numbers(knob.numbers, knob.name.text)

    def _read_mma(self, knob: Knob) -> None:
        dtypes: tuple[Dtype, ...] | None = ("bf16",)
        if knob.subject is not None:
            dtypes = dtypes_of((knob.subject,), self._scope)
        for product, precisions in knob.precisions:
            names = self._words((product,), PRODUCTS, "product")
            values = self._words(precisions, PRECISIONS, "precision")
            if names and values and dtypes:
                where = Word(f"{dtypes[0]} {product.text}", product.span)
                if self._once(knob.name, where):
                    self._mma[(dtypes[0], cast(Product, names[0]))] = cast("tuple[Precision, ...]", values)

    def _read_layout(self, knob: Knob) -> None:
        scope = self._scope
        assert knob.subject is not None
        known = {**{t.name: t.axes for t in scope.inputs.values()}, **scope.output_axes}
        if self._known(knob.subject, known, "input or output"):
            self._read_order(knob, known[knob.subject.text], self._layouts)

    def _read_internal(self, knob: Knob) -> None:
        scope, subject = self._scope, knob.subject
        assert subject is not None
        if (
            not self._known(subject, [*scope.inputs, *scope.lets], "input or `let`")
            or not scope.batch
            or not scope.time
        ):
            return
        value = scope.ref(subject.text, 0, subject.span)
        if not value.per_token or set(value.axes) != {scope.batch, scope.head}:
            hint = f"such copies are of what varies over {listing((scope.batch, scope.time, scope.head))} alone"
            scope.problems.add("E074", subject.span, f"`{subject.text}` is no scalar of a token and head", hint)
        else:
            self._read_order(knob, (scope.batch, scope.time, scope.head), self._internals)

    def _read_order(self, knob: Knob, axes: Axes, into: list[Layout]) -> None:
        assert knob.subject is not None
        if not self._once(knob.name, knob.subject):
            return
        order = tuple(word.text for word in knob.words)
        if sorted(order) != sorted(axes):
            span = knob.words[0].span.to(knob.words[-1].span)
            message = f"`{' '.join(order)}` is no order of the axes of `{knob.subject.text}`"
            if knob.name.text == "internal":
                message = f"`{' '.join(order)}` is no order of batch, time and head"
            self._scope.problems.add("E074", span, message, f"its axes are `{' '.join(axes)}`, in any order, each once")
            return
        into.append(Layout(knob.subject.text, order, knob.subject.span))

    def _read_swap(self, knob: Knob) -> None:
        if not self._once(knob.name, knob.name):
            return
        none = [w for w in knob.words if w.text == NO_PRODUCT]
        if none and len(knob.words) > 1:
            self._scope.problems.add("E073", none[0].span, f"`{NO_PRODUCT}` stands alone, for no product")
        elif not none:
            self._swap = cast("tuple[Product, ...]", self._words(knob.words, PRODUCTS, "product"))

    def _read_weighted(self, knob: Knob) -> None:
        sides = self._words(knob.words, SIDES, "side of a product") if self._once(knob.name, knob.name) else ()
        if sides:
            self._weighted = cast("tuple[Side, ...]", sides)

    def _read_persistent(self, knob: Knob) -> None:
        answers = self._words(knob.words, ("no", "yes"), "answer") if self._once(knob.name, knob.name) else ()
        if answers:
            self._persistent = tuple(answer == "yes" for answer in answers)

    def _read_choices(self, knob: Knob) -> None:
        scope, kind = self._scope, knob.name.text
        for subject, numbers in knob.choices:
            if kind in ("latency", "state_latency"):
                known, what = [*scope.inputs, *scope.state_axes, *scope.output_axes], "input, state or output"
                known += [SCORES] if kind == "latency" and SCORES not in known else []
                values = self._numbers(numbers, "latency")
            elif kind in ("tile", "state_tile"):
                known = [a for a in scope.axes if a in scope.channels(tuple(scope.axes))]
                what = "channel axis"
                values = self._numbers(numbers, "tile")
            else:
                known, what = list(KERNELS), "kernel"
                values = self._numbers(numbers, kind)
            if self._known(subject, known, what) and self._once(knob.name, subject):
                self._choices[kind].append(Choice(subject.text, values, subject.span))

    def _read_plan(self, knob: Knob) -> None:
        if not self._once(knob.name, knob.name):
            return
        plans = self._words(knob.words, PLANS, "plan")
        if plans:
            self._plan = cast("tuple[PlanName, ...]", plans)

    def _known(self, word: Word, known: Iterable[str], what: str) -> bool:
        names = list(known)
        if word.text in names:
            return True
        if word.text not in self._scope.forgiven:
            hint = closest(word.text, names, f"there is {listing(names)}")
            self._scope.problems.add("E073", word.span, f"no {what} is called `{word.text}`", hint)
        return False
