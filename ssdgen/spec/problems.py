"""Collecting what is wrong with a spec, so that one run shows all of it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ssdgen.diagnostics import Diagnostic, Source, Span, SpecError

MOST_SHOWN = 40


class Problems:
    """The diagnostics found so far. Every code is explained in specs/README.md; a test compares the two."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: dict[tuple[str, Span, str], Diagnostic] = {}

    def add(self, code: str, span: Span, message: str, hint: str = "") -> None:
        """Record a diagnostic; the same message at the same place counts once."""
        self._found.setdefault((code, span, message), Diagnostic(code, message, span, hint))

    def __bool__(self) -> bool:
        return bool(self._found)

    def stop_if_any(self) -> None:
        """Raise SpecError with everything found, the first forty if there is more."""
        if self._found:
            raise self.error()

    def error(self) -> SpecError:
        """Everything found, as the exception to raise."""
        found = sorted(self._found.values(), key=lambda d: (d.span.line, d.span.column))
        if len(found) > MOST_SHOWN:
            last = found[MOST_SHOWN]
            rest = Diagnostic("E019", f"{len(found) - MOST_SHOWN} more errors from here on are not shown", last.span)
            found = [*found[:MOST_SHOWN], rest]
        return SpecError(self._source, found)


def closest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint that names the known word most like `word`, or `otherwise` if none is alike."""
    names = list(known)
    lower = {name.lower(): name for name in reversed(names)}
    near = get_close_matches(word, names, n=1, cutoff=0.6) or [
        lower[m] for m in get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    ]
    return f"did you mean `{near[0]}`?" if near else otherwise


def listing(words: Iterable[str], last: str = "and") -> str:
    """Words in backquotes as a sentence has them: `a`, `b` and `c`."""
    quoted = [f"`{word}`" for word in words]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"
