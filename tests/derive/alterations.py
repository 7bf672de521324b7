"""Every way to alter one field of a tree of dataclasses, found by walking it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ssdgen.ir.expr import OPS, Apply, Const, Contract, Expr, Index, Ref, Size

UNTOUCHED = {"layer", "span", "recurrence", "form"}
"""The premise of a proof, what has no meaning, and what is altered by itself."""

EXPRESSIONS = (Const, Ref, Size, Index, Apply, Contract)


def alterations(root: Any) -> Iterator[tuple[str, Any]]:
    """(what was altered, the altered tree): every field at every level, one at a time, several ways each."""
    seen: dict[str, set[Any]] = defaultdict(set)
    _collect(root, "", seen)
    yield from _altered(root, "", seen)


def _collect(value: Any, field: str, seen: dict[str, set[Any]]) -> None:
    if is_dataclass(value):
        for f in fields(value):
            if f.name not in UNTOUCHED:
                _collect(getattr(value, f.name), f.name, seen)
    if isinstance(value, tuple):
        for item in value:
            _collect(item, field, seen)
    else:
        seen[field].add(value)


def _altered(value: Any, field: str, seen: dict[str, set[Any]]) -> Iterator[tuple[str, Any]]:
    """Other values for `value`, those that stand elsewhere in a field of this name among them."""
    if isinstance(value, tuple):
        yield from _altered_tuple(value, field, seen)
        return
    if is_dataclass(value):
        for f in fields(value):
            if f.name not in UNTOUCHED:
                for where, other in _altered(getattr(value, f.name), f.name, seen):
                    yield f"{f.name}{where and '.'}{where}", replace(value, **{f.name: other})
    yield from ((f"= {other}", other) for other in _others(value, field, seen) if other != value)


def _altered_tuple(value: tuple[Any, ...], field: str, seen: dict[str, set[Any]]) -> Iterator[tuple[str, Any]]:
    for i, item in enumerate(value):
        yield f"[{i}] dropped", (*value[:i], *value[i + 1 :])
        yield f"[{i}] twice", (*value[: i + 1], item, *value[i + 1 :])
        for where, other in _altered(item, field, seen):
            yield f"[{i}]{where}", (*value[:i], other, *value[i + 1 :])
    if value and all(isinstance(v, str) for v in value) and value != value[::-1]:
        yield "reversed", value[::-1]
    if not value and seen[field]:
        yield "one more", (next(iter(sorted(seen[field], key=repr))),)


def _others(value: Any, field: str, seen: dict[str, set[Any]]) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value - 1 if field == "at" and value == 0 else value + 1
        case str() if field == "op":
            yield from (op for op in ("add", "sub", "mul", "neg", "abs", "exp", "max") if OPS[op] == OPS.get(value))
        case str():
            yield value + "_other"
            yield from sorted(v for v in seen[field] - {value} if isinstance(v, str))[:2]
        case None:
            yield from sorted((v for v in seen[field] if v is not None), key=repr)[:2]
        case _ if isinstance(value, EXPRESSIONS):
            yield Apply("neg", (value,))
            yield from _other_expressions(field, seen)


def _other_expressions(field: str, seen: dict[str, set[Any]]) -> Iterator[Expr | None]:
    others = sorted((v for v in seen[field] if isinstance(v, EXPRESSIONS)), key=str)
    yield from others[:2]
    if None in seen[field]:
        yield None
