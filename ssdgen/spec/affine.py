"""Splitting a state's update into `decay * S[t-1] + input`, on the tree, so that a refusal has a place to point at."""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.ir.expr import ZERO, Apply, Const, Contract, Expr, Ref, add, mul, walk


@dataclass(frozen=True, slots=True)
class Affine:
    """`decay * S[t-1] + input`; the state occurs in neither part."""

    decay: Expr
    input: Expr


class NotAffine(Exception):
    """`term` keeps an update from being affine in the state; `reason` completes "`term` ..."."""

    def __init__(self, term: Expr, reason: str) -> None:
        super().__init__(f"`{term}` {reason}")
        self.term = term
        self.reason = reason


def split(update: Expr, state: str) -> Affine:
    """`update` as decay and input of `state`; raises NotAffine at the term that prevents it.

    Distributes over sums, differences and negations, products with factors free of the state, and divisions by such.
    """
    if not _reads(update, state):
        return Affine(ZERO, update)
    match update:
        case Ref():
            return Affine(Const(1, update.span), ZERO)
        case Apply(op="add", args=(left, right)):
            a, b = split(left, state), split(right, state)
            return Affine(add(a.decay, b.decay), add(a.input, b.input))
        case Apply(op="sub", args=(left, right)):
            a, b = split(left, state), split(right, state)
            return Affine(_sub(a.decay, b.decay), _sub(a.input, b.input))
        case Apply(op="neg", args=(arg,)):
            a = split(arg, state)
            return Affine(_neg(a.decay), _neg(a.input))
        case Apply(op="mul", args=(left, right)):
            if _reads(left, state) and _reads(right, state):
                raise NotAffine(update, "multiplies the state by itself")
            if _reads(left, state):
                a = split(left, state)
                return Affine(mul(a.decay, right), mul(a.input, right))
            a = split(right, state)
            return Affine(mul(left, a.decay), mul(left, a.input))
        case Apply(op="div", args=(left, right)):
            if _reads(right, state):
                raise NotAffine(update, "divides by the state")
            a = split(left, state)
            return Affine(_div(a.decay, right), _div(a.input, right))
        case Contract(axis=axis):
            raise NotAffine(update, f"mixes the state's channels over `{axis}`: its transition is not diagonal")
        case _:
            raise NotAffine(update, "is not linear in the state")


def _reads(expr: Expr, state: str) -> bool:
    return any(isinstance(e, Ref) and e.name == state for e in walk(expr))


def _sub(a: Expr, b: Expr) -> Expr:
    if b == ZERO:
        return a
    return _neg(b) if a == ZERO else Apply("sub", (a, b), a.span.to(b.span))


def _neg(a: Expr) -> Expr:
    return ZERO if a == ZERO else Apply("neg", (a,), a.span)


def _div(a: Expr, b: Expr) -> Expr:
    return ZERO if a == ZERO else Apply("div", (a, b), a.span.to(b.span))
