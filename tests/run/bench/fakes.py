"""A GPU that is not there: time is told by a table, calls run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ssdgen.run.bench.measure import Replay
from ssdgen.run.gpu_peers import Call
from ssdgen.run.inputs import Inputs


@dataclass
class Clock:
    """Tells `now`, and goes on by `tick` each time it is asked."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class FakeMeter:
    """A replay takes what `us` says of its call; `order` is who was replayed when."""

    us: Callable[[Call], float] = lambda call: 10.0
    clock: Clock = field(default_factory=Clock)
    order: list[Call] = field(default_factory=list)
    captured: list[Call] = field(default_factory=list)

    def capture(self, call: Call, sets: Sequence[Inputs]) -> Replay:
        self.captured.append(call)

        def replay() -> float:
            self.order.append(call)
            return self.us(call)

        return replay

    def eager(self, call: Call, sets: Sequence[Inputs]) -> float:
        return 50.0

    def host(self, call: Call, sets: Sequence[Inputs]) -> float:
        return 40.0

    def extra_bytes(self, call: Call, inputs: Inputs) -> int:
        return 1000
