"""The command line: the only room that speaks to a person, and the only one that ends the process."""

from __future__ import annotations

import signal
import sys
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


def main() -> None:
    """The console script `ssdgen`.

    The commands are imported within: Ctrl-C is a line and exit code 130 from the start, and SIGTERM an exit that removes
    temporary folders.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from ssdgen.cli.outcome import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = interrupted()
    sys.exit(code)


def interrupted() -> int:
    """Say that the user stopped us; the exit code."""
    if sys.stderr is not None:
        sys.stderr.write("ssdgen: interrupted\n")
    return 128 + signal.SIGINT


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(TERMINATED)
