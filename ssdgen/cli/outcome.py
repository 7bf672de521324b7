"""Runs a command and turns whatever stops it into a message and an exit code.

0    done                                1    the user's mistake, or a check that failed
130  interrupted (Ctrl-C)                2    a bug of ours
141  whoever read the output stopped     143  terminated (SIGTERM)
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence

import typer
from typer.main import get_command

from ssdgen import __version__
from ssdgen.cli import bench, bench_model, commands, complete, hardware, interrupted, start, tuning  # noqa: F401  (they register commands)
from ssdgen.cli.app import app
from ssdgen.cli.chosen import Stopped
from ssdgen.cli.output import OutputClosed, OutputFailed, close_quietly, mistake_text, mistakes_data, say, show_json
from ssdgen.diagnostics import SpecError, UserError

DONE, MISTAKE, BUG, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`; the exit code."""
    json = "--json" in arguments
    try:
        code = get_command(app).main(args=list(arguments), prog_name="ssdgen", standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of KeyboardInterrupt
            return interrupted()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except (SpecError, UserError) as error:
        return _mistake(mistake_text(error), mistakes_data([error]), json)
    except Stopped as error:
        return _mistake("\n".join(map(mistake_text, error.mistakes)), mistakes_data(error.mistakes), json)
    except typer.TyperException as error:
        message, hint = _usage(error)
        return _mistake(f"ssdgen: {message}\n  hint: {hint}", [{"message": message, "hint": hint}], json)
    except (KeyboardInterrupt, typer.Abort):
        return interrupted()
    except (OutputClosed, BrokenPipeError):
        close_quietly()
        return CLOSED
    except OutputFailed as error:
        close_quietly()
        say(f"ssdgen: cannot write the output: {str(error).lower()}")
        return MISTAKE
    except (
        Exception
    ) as error:  # the last resort: whatever arrives here is ours, and nobody should have to read a traceback
        return _bug(error, arguments)


def _mistake(text: str, data: list[dict[str, object]], json: bool) -> int:
    if json:
        show_json({"errors": data})
    else:
        say(text)
    return MISTAKE


def _bug(error: Exception, arguments: Sequence[str]) -> int:
    trace = "".join(traceback.format_exception(error))
    if "--debug" in arguments:
        say(trace)
        return BUG
    about = f"ssdgen {__version__}, Python {platform.python_version()}, {platform.platform()}"
    with tempfile.NamedTemporaryFile(
        "w", prefix="ssdgen-bug-", suffix=".txt", encoding="utf-8", errors="backslashreplace", delete=False
    ) as file:
        file.write(f"{about}\nssdgen {shlex.join(arguments)}\n\n{trace}")
    say(
        f"ssdgen: this is a bug in ssdgen, not a mistake of yours: {type(error).__name__}: {error}\n"
        f"  please report it with your spec and {file.name}; --debug shows the details here"
    )
    return BUG


def _usage(error: typer.TyperException) -> tuple[str, str]:
    """typer's message as ours are: one line without a capital or a full stop, names in backquotes; and a hint."""
    line = re.sub(r"'([^']*)'", r"`\1`", " ".join(error.format_message().split()))
    message, _, guess = line.partition(" Did you mean ")
    context = getattr(error, "ctx", None)
    hint = f"did you mean {guess}" if guess else f"{context.command_path if context else 'ssdgen'} --help"
    return message[:1].lower() + message[1:].removesuffix("."), hint
