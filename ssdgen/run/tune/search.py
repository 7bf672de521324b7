"""The search: from the default, every knob moved alone; then the moves that helped, together; and again from there.

A product of all knobs has millions of points. Knobs of a kernel mostly help or hurt on their own, so a round measures the
neighbours of the best point (tens) in the order of the space, what matters most first, since there may be no time for all.
Then it joins those that were faster, and the next round starts from the result; a round that finds nothing is the last. The
first half of the time goes to the numeric knobs of the module as the spec's defaults emit it, since that is the one that is
shipped; then the structural knobs move too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol

from ssdgen.build.worker import Answer
from ssdgen.ir.build import CompileRequest
from ssdgen.run.recorded import Call
from ssdgen.run.tune.device import Device
from ssdgen.run.tune.measure import Measure
from ssdgen.run.tune.prune import HOPELESS, Estimate, Removed, compiled_badly, estimated
from ssdgen.run.tune.space import Candidate, Space, Value
from ssdgen.run.tune.worker import Timed

GAIN = 0.995
"""A candidate is faster than another if it takes less than this times as long: below lies the noise of medians."""

MOST_JOINED = 8

SECONDS_JOINING = 5.0
"""What a round leaves for joining its moves, at most half of what it has: about as long as some kernels compile at once."""

CONFIRMED = 5

Move = tuple[str, Value, bool]
"""A knob, its new value, and whether it is structural."""


class Compiles(Protocol):
    """What the search needs of `Compiler`."""

    def compiled(
        self, wanted: Sequence[tuple[CompileRequest, ...]], go_on: Callable[[], bool]
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """The place of each set of requests and its answers, as they come."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate with its time, and what the model had given it."""

    candidate: Candidate
    timed: Timed
    estimate: Estimate


@dataclass(slots=True)
class Found:
    """What a search has seen: the default Config and what the heuristic makes of it, all that was `measured`, what was
    `removed` with the step, how many that makes (`considered`), and whether its last round was complete and found nothing.
    """

    default: Measured | None = None
    heuristic: Measured | None = None
    measured: list[Measured] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    considered: int = 0
    finished: bool = False

    @property
    def best(self) -> Measured | None:
        """The fastest right candidate."""
        return min(self.measured, key=_time, default=None)

    def steps(self) -> dict[str, int]:
        """How many candidates fell out at each step."""
        return dict(Counter(r.step for r in self.removed))


def _always() -> bool:
    return True


def _time(measured: Measured) -> float:
    return measured.timed.microseconds


class Search:
    """A search of `space` for `call`. `time_left` says how many seconds remain; `heard` is told of each result."""

    def __init__(
        self,
        space: Space,
        call: Call,
        device: Device,
        compiler: Compiles,
        measure: Measure,
        time_left: Callable[[], float],
        heard: Callable[[Measured | Removed, int], None] = lambda result, waiting: None,
    ) -> None:
        self._space, self._call, self._device = space, call, device
        self._compiler, self._measure = compiler, measure
        self._time_left, self._heard = time_left, heard
        self._seen: set[Candidate] = set()
        self._launched: set[object] = set()
        self._reserve = 0.0
        self.found = Found()

    def run(self, structural: bool = True) -> Found:
        """Search until nothing is gained or the time is over. The default is measured first, and what the heuristic makes
        of it, whatever the time.

        Without `structural` the module stays the one that the spec's defaults emit.
        """
        whole, found = self._time_left(), self.found
        structural = structural and bool(self._space.structural)
        self._try([Candidate()], always=True)
        found.default = found.best
        if found.default is None:
            return found
        guessed = self._space.guessed(self._device.multiprocessors)
        self._try([guessed], always=True)
        found.heuristic = next((m for m in found.measured if m.candidate == guessed), None)
        found.finished = self._climb(structural=False, until=whole / 2 if structural else 0.0)
        if structural:
            self._vary((found.best or found.default).candidate)
            found.finished = self._climb(structural=True, until=0.0)
        self._confirm()
        return found

    def _confirm(self) -> None:
        """Measure the fastest, the default and the heuristic's choice once more, one after the other: of many medians the
        smallest is too small by chance.
        """
        found = self.found
        again = sorted(found.measured, key=_time)[:CONFIRMED]
        again += [m for m in (found.default, found.heuristic) if m is not None]
        for old in dict.fromkeys(again):
            timed = self._measure(old.estimate, math.inf)
            place, new = found.measured.index(old), None
            if isinstance(timed, Removed):
                self._note(timed, 0)
                del found.measured[place]
            else:
                new = Measured(old.candidate, replace(timed, first_call=old.timed.first_call), old.estimate)
                found.measured[place] = new
            found.default = new if found.default is old else found.default
            found.heuristic = new if found.heuristic is old else found.heuristic

    def _vary(self, best: Candidate) -> None:
        """Every other value of the structural knobs alone, and then every two of them, those first that were fast alone;
        the rest as in `best`.
        """
        before = len(self.found.measured)
        self._try(self._space.varied(best))
        for measured in sorted(self.found.measured[before:], key=_time):
            if self._go_on():
                self._try(self._space.varied(measured.candidate))

    def _climb(self, structural: bool, until: float) -> bool:
        """Rounds from the best candidate, until one finds nothing or less than `until` seconds are left; whether one found
        nothing. A round leaves time for joining its moves, and is taken up again if there was nothing to join.
        """
        while (left := self._time_left() - until) > 0 and (best := self.found.best) is not None:
            self._reserve = until + min(SECONDS_JOINING, left / 2)
            whole = self._try(self._space.neighbours(best.candidate, structural))
            self._reserve = until
            self._join(best)
            self._reserve = 0.0
            if whole and self.found.best is best:
                return True
        return False

    def estimates(self, candidates: Iterable[Candidate], always: bool = False) -> list[Estimate]:
        """Those candidates that are worth compiling, in the order given; notes why others are not."""
        estimates = []
        for candidate in candidates:
            if candidate in self._seen:
                continue
            self._seen.add(candidate)
            self.found.considered += 1
            estimate = estimated(self._space, candidate, self._call, self._device)
            if isinstance(estimate, Removed):
                self._note(estimate, 0)
            elif estimate.identity in self._launched:
                self._note(Removed(candidate, "launches as another", "the same kernels on the same grids"), 0)
            else:
                self._launched.add(estimate.identity)
                estimates.append(estimate)
        return estimates if always else self._hopeful(estimates)

    def _hopeful(self, estimates: list[Estimate]) -> list[Estimate]:
        known = [m.estimate.seconds for m in self.found.measured]
        limit = HOPELESS * min((*known, *(e.seconds for e in estimates)), default=math.inf)
        for estimate in estimates:
            if estimate.seconds > limit:
                why = f"{estimate.seconds * 1e6:.0f} us by the model, {limit * 1e6:.0f} allowed"
                self._note(Removed(estimate.candidate, "slow by the model", why), 0)
        return [e for e in estimates if e.seconds <= limit]

    def _try(self, candidates: Iterable[Candidate], always: bool = False) -> bool:
        """Compile and measure what is worth it, while there is time; whether there was time for all."""
        estimates = self.estimates(candidates, always)
        go_on = _always if always else self._go_on
        waiting = dict(enumerate(estimates))
        if waiting and go_on():
            for place, answers in self._compiler.compiled([e.requests for e in estimates], go_on):
                self._look_at(waiting.pop(place), answers, always, len(waiting))
                if not go_on():
                    break
        for estimate in waiting.values():  # to be tried again if time comes
            self._seen.discard(estimate.candidate)
            self._launched.discard(estimate.identity)
            self.found.considered -= 1
        return not waiting

    def _look_at(self, estimate: Estimate, answers: tuple[Answer, ...], always: bool, waiting: int) -> None:
        """Measure a compiled candidate, if the compiler's answers do not speak against it."""
        bad = next(filter(None, map(self._judged, answers, estimate.requests)), None)
        if bad and not always:  # what calls run with runs as it is
            self._note(Removed(estimate.candidate, *bad), waiting)
            return
        best = self.found.best
        timed = self._measure(estimate, _time(best) if best else math.inf)
        if isinstance(timed, Removed):
            self._note(timed, waiting)
        else:
            measured = Measured(estimate.candidate, timed, estimate)
            self.found.measured.append(measured)
            self._heard(measured, waiting)

    def _join(self, start: Measured) -> None:
        """Move the knobs together that were faster alone: the best with each other one, and the best two, three and so on.

        All at once, since the compilers work side by side; what another order would find is for the next round.
        """
        moves: dict[str, Move] = {}
        for measured in sorted((m for m in self.found.measured if _time(m) < GAIN * _time(start)), key=_time):
            move = _move(start.candidate, measured.candidate)
            if move is not None:
                moves.setdefault(move[0], move)
        best = list(moves.values())[:MOST_JOINED]
        sets = [best[:n] for n in range(2, len(best) + 1)] + [[best[0], move] for move in best[2:]]
        self._try([reduce(self._moved, several, start.candidate) for several in sets])

    def _moved(self, candidate: Candidate, move: Move) -> Candidate:
        return self._space.fitting(candidate.moved(*move))

    def _judged(self, answer: Answer, request: CompileRequest) -> tuple[str, str] | None:
        return compiled_badly(answer, request, self._device)

    def _note(self, removed: Removed, waiting: int) -> None:
        self.found.removed.append(removed)
        self._heard(removed, waiting)

    def _go_on(self) -> bool:
        return self._time_left() > self._reserve


def _move(start: Candidate, there: Candidate) -> Move | None:
    """The one knob in which `there` differs from `start`, as `Candidate.moved` takes it; None if that is not one."""
    structure, numbers = set(there.structure) ^ set(start.structure), set(there.fields) ^ set(start.fields)
    changed = {name for name, _ in structure} | {name for name, _ in numbers}
    values: dict[str, Value] = {**dict(there.structure), **dict(there.fields)}
    if len(changed) != 1 or not changed <= set(values):
        return None
    (name,) = changed
    return name, values[name], bool(structure)
