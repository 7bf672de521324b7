"""Laying out emitted Python: calls and long expressions broken as a formatter would, at most `WIDTH` columns."""

from __future__ import annotations

import re

WIDTH = 120
INDENT = "    "
SHORT = 48
"""Arguments of at most this length share lines when a call is broken."""


def assign(target: str, code: str, indent: str, comment: str = "") -> str:
    """`target = code`, broken into lines if it is too long, with a trailing comment."""
    return broken(f"{target} = ", code, indent, f"  # {comment}" if comment else "")


def broken(head: str, code: str, indent: str, tail: str = "", room: int = 0) -> str:
    """`head` and `code`, with `tail` on the first line: on one line if that fits and leaves `room`; else broken at the
    outermost call's arguments, else at its loosest operators inside parentheses."""
    if len(indent) + len(head) + len(code) + len(tail) + room <= WIDTH:
        return f"{indent}{head}{code}{tail}"
    inner = indent + INDENT
    keyword = re.match(r"\w+=(?!=)", code)
    if keyword:
        return broken(head + keyword[0], code[keyword.end() :], indent, tail, room)
    if code.startswith("(") and code.endswith(",)") and _closing(code, 0) == len(code) - 1:  # a tuple of one
        return f"{indent}{head}({tail}\n{broken('', code[1:-2], inner, room=1)},\n{indent})"
    call = _outer_call(code)
    if call is not None:
        function, args, suffix = call
        line = ", ".join(args)
        if len(inner) + len(line) <= WIDTH and "\n" not in line:
            return f"{indent}{head}{function}({tail}\n{inner}{line}\n{indent}){suffix}"
        if all(len(a) <= SHORT for a in args):
            body = "\n".join(filled(args, inner))
        else:
            body = "\n".join(broken("", a, inner, room=1) + "," for a in args)
        return f"{indent}{head}{function}({tail}\n{body}\n{indent}){suffix}"
    if len(inner) + len(code) <= WIDTH:
        return f"{indent}{head}({tail}\n{inner}{code}\n{indent})"
    sign = re.match(r"-?(?=\()", code)
    if sign and _closing(code, sign.end()) == len(code) - 1:
        head, code = head + sign[0], code[sign.end() + 1 : -1]
    parts = _operands(code)
    if len(parts) == 1:
        return f"{indent}{head}{code}{tail}"
    return f"{indent}{head}({tail}\n" + "\n".join(_operand(p, inner) for p in parts) + f"\n{indent})"


def _operand(code: str, indent: str) -> str:
    """An operand with its sign, on a line of its own or broken again."""
    if len(indent) + len(code) <= WIDTH:
        return f"{indent}{code}"
    sign = re.match(r"[-+*/] ", code)
    return broken(sign[0] if sign else "", code[sign.end() if sign else 0 :], indent)


def filled(items: list[str], indent: str) -> list[str]:
    """`items`, each with a comma, on as few lines as it takes."""
    lines = [""]
    for item in items:
        line = f"{lines[-1]} {item}," if lines[-1] else f"{indent}{item},"
        if len(line) > WIDTH and lines[-1]:
            lines.append(f"{indent}{item},")
        else:
            lines[-1] = line
    return lines


def _outer_call(code: str) -> tuple[str, list[str], str] | None:
    """(function, arguments, rest) if `code` is one call, or a tuple with no function, maybe followed by method calls."""
    if not code.endswith(")"):
        return None
    start = code.find("(")
    function = code[:start]
    if function and not function.replace(".", "").replace("_", "").isalnum():
        return None
    end = _closing(code, start)
    rest = code[end + 1 :]
    args = _split(code[start + 1 : end], ", ")
    if (rest and not rest.startswith(".")) or (not function and len(args) == 1):
        return None
    return function, args, rest


def _closing(code: str, start: int) -> int:
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0:
            return at
    raise ValueError(f"unbalanced brackets in {code!r}")


def _split(code: str, separator: str) -> list[str]:
    """The parts of `code` between separators outside brackets."""
    parts, depth, last, at = [], 0, 0, 0
    while at < len(code):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0 and code.startswith(separator, at):
            parts.append(code[last:at])
            at += len(separator)
            last = at
        else:
            at += 1
    return [*parts, code[last:]]


def _operands(code: str) -> list[str]:
    """`code` cut before its loosest operators."""
    for signs in ((" + ", " - "), (" * ", " / ")):
        parts = [code]
        for sign in signs:
            parts = [
                piece if i == 0 else sign.lstrip() + piece
                for part in parts
                for i, piece in enumerate(_split(part, sign))
            ]
        if len(parts) > 1:
            return parts
    return [code]
