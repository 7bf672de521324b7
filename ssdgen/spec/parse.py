"""A statement's text -> its syntax, by lark; a syntax error in the words a person would use."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken
from lark.lexer import PatternStr

from ssdgen.diagnostics import Span
from ssdgen.ir.layer import INFINITY, Interval
from ssdgen.spec import syntax as s
from ssdgen.spec.problems import Problems, closest
from ssdgen.spec.split import Statement

KNOBS = (
    *("chunk", "mma", "layout", "internal", "swap", "weighted", "latency", "state_latency", "tile", "state_tile"),
    *("occupancy", "warps", "share_scores_from", "segments", "persistent", "plan"),
)
_STARTS = ("language", "layer", "axes", "groups", "sizes", "inputs", "params", "let", "state", "output", "when", *KNOBS)
_DEEPEST = 100

_WORDS = {
    "NAME": "a name",
    "AXIS": "an axis",
    "DTYPE": "a dtype",
    "PRODUCT": "a product (scores, carried, intra, state)",
    "PRECISION": "a precision (bf16, bf16x2, tf32, tf32x3)",
    "PLAN": "a plan",
    "SIDE": "a side (row, column)",
    "ANSWER": "yes or no",
    "NUMBER": "a number",
    "TITLE": "a title in double quotes",
    "$END": "the end of the statement",
}
_OPERATORS = {"`+`", "`-`", "`*`", "`/`", "`.`", "`^`"}
_OPERAND = {"a name", "a number", "`(`", "`-`"}
_RANGE = {"`<`", "`<=`", "`>`", "`>=`", "`in`"}
_ORDER = (*_WORDS.values(), "a value", "an operator", "a range")


class Parser:
    """The grammar, compiled once a process."""

    @cached_property
    def lark(self) -> Lark:
        """The LALR parser with a start rule a statement."""
        grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
        return Lark(grammar, parser="lalr", start=list(_STARTS), propagate_positions=True, maybe_placeholders=True)

    def parse(self, statement: Statement, problems: Problems) -> s.Parsed | None:
        """The syntax of `statement`, or None after reporting what is wrong with it."""
        start = _start_rule(statement, problems)
        if start is None:
            return None
        build = _Build(statement)
        try:
            tree = self.lark.parse(statement.text, start=start)
        except UnexpectedInput as error:
            self._report(error, build, problems)
            return None
        deepest = _too_deep(tree)
        if deepest is not None:
            hint = f"at most {_DEEPEST} may nest or follow each other; name parts of it with `let`"
            problems.add("E019", build.span(deepest), "an expression of too many operations", hint)
            return None
        return build.statement(tree)

    def _report(self, error: UnexpectedInput, build: _Build, problems: Problems) -> None:
        assert isinstance(error, UnexpectedToken), error  # split.py has refused every other character
        token = error.token
        expected = _in_words(self._word(name) for name in error.accepts or error.expected)
        if token.type == "$END":
            span, found = build.end_span(), "the statement ends"
        else:
            span, found = build.token_span(token), f"found `{token}`"
        message = f"expected {expected}, but {found}" if token.type == "$END" else f"expected {expected}, {found}"
        problems.add("E018", span, message, _syntax_hint(build.text, token, expected))

    def _word(self, terminal: str) -> str:
        if terminal in _WORDS:
            return _WORDS[terminal]
        pattern = self.lark.get_terminal(terminal).pattern
        assert isinstance(pattern, PatternStr), terminal
        return f"`{pattern.value}`"


@cache
def parser() -> Parser:
    """The parser of this process."""
    return Parser()


def _start_rule(statement: Statement, problems: Problems) -> str | None:
    """The rule for a statement, by its block and first word."""
    first = statement.text.split(None, 1)[0]
    if statement.block == "schedule":
        word = first.split("=")[0]
        if word in KNOBS:
            return word
        span = Span(statement.line, statement.column, statement.line, statement.column + max(1, len(word)))
        hint = closest(word, KNOBS, f"the knobs are {', '.join(KNOBS)}")
        problems.add("E070", span, f"a schedule has no knob `{word}`", hint)
        return None
    if statement.block == "inputs" and first == "param":
        return "params"
    if statement.block == "output" and first == "when":
        return "when"
    return statement.block


def _in_words(names: Iterable[str]) -> str:
    """Several alternatives as a person would say them."""
    found = set(names)
    if found >= {"a name", "a number", "`(`"}:
        found = (found - _OPERAND) | {"a value"}
    if found >= _OPERATORS:
        found = (found - _OPERATORS - {"`(`", "`[`"}) | {"an operator"}
    if found >= _RANGE:
        found = (found - _RANGE) | {"a range"}
    rank = {word: i for i, word in enumerate(_ORDER)}
    words = sorted(found, key=lambda w: (w == "the end of the statement", rank.get(w, len(rank)), w))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _syntax_hint(text: str, token: Token, expected: str) -> str:
    """What to write instead, for the slips people make coming from Python or a paper."""
    before = text[: token.start_pos].rstrip() if token.start_pos is not None else text
    if token == "*" and before.endswith("*"):
        return "a power is written `x^2`"
    if token == "=" and before.endswith("="):
        return "one `=` is enough"
    if token == "+" and "`-`" in expected and "`]`" in expected:
        return "a recurrence looks back: `[t-1]`"
    if token == "=" and "`:`" in expected:
        return "`x[b t h] : f32 = 0` declares a default; an equation of a let or output has no brackets on its left"
    if "an operator" in expected and (token[:1].isalnum() or token == "("):
        return "a product needs its `*`"
    if token == "[" and expected == "`=`":
        return "tensors are declared under `inputs`"
    if token.type == "$END" and "`:`" in expected:
        return "a declaration ends with its dtype, as in `x[b t h] : f32`"
    return ""


def _too_deep(tree: Tree[Token]) -> Tree[Token] | None:
    """A subtree with too many levels below it, without recursion."""
    depth: dict[int, int] = {}
    for sub in tree.iter_subtrees():  # children first
        below = [depth[id(c)] for c in sub.children if isinstance(c, Tree)]
        depth[id(sub)] = 1 + max(below, default=0)
        if depth[id(sub)] > _DEEPEST:
            return sub
    return None


class _Build:
    """Lark's tree -> syntax, with spans of the file."""

    def __init__(self, statement: Statement) -> None:
        self.text = statement.text
        self._line = statement.line - 1
        self._column = statement.column - 1

    def _span(self, line: int, column: int, end_line: int, end_column: int) -> Span:
        start = column + (self._column if line == 1 else 0)
        end = end_column + (self._column if end_line == 1 else 0)
        return Span(self._line + line, start, self._line + end_line, end)

    def span(self, tree: Tree[Token]) -> Span:
        m = tree.meta
        return self._span(m.line, m.column, m.end_line, m.end_column)

    def token_span(self, t: Token) -> Span:
        line, column = t.line or 1, t.column or 1
        return self._span(line, column, t.end_line or line, t.end_column or column)

    def end_span(self) -> Span:
        """The place right after the statement."""
        lines = self.text.splitlines()
        return self._span(len(lines), len(lines[-1]) + 1, len(lines), len(lines[-1]) + 2)

    def word(self, token: object) -> s.Word:
        assert isinstance(token, Token)
        return s.Word(str(token), self.token_span(token))

    def words(self, tokens: list[Tree[Token] | Token]) -> tuple[s.Word, ...]:
        return tuple(self.word(t) for t in tokens)

    def number(self, token: object) -> s.Number:
        """A NUMBER token, or a `number` tree with its sign."""
        if isinstance(token, Tree):
            magnitude = token.children[-1]
            assert isinstance(magnitude, Token)
            value = INFINITY if magnitude.type == "INF" else self.number(magnitude).value
            return s.Number(-value if len(token.children) == 2 else value, self.span(token))
        assert isinstance(token, Token)
        return s.Number(int(token) if token.isdigit() else float(token), self.token_span(token))

    def statement(self, tree: Tree[Token]) -> s.Parsed:
        c = tree.children
        match tree.data:
            case "language":
                return s.Language(self.number(c[0]))
            case "layer":
                return s.Title(self.word(c[0]), str(c[1])[1:-1])
            case "axes":
                return s.AxisNames(self.words(c))
            case "groups":
                return s.Shares(tuple((self.word(p[0]), self.word(p[1])) for p in map(_children, c)))
            case "sizes":
                return s.Sizes(tuple((self.word(p[0]), self.number(p[1])) for p in map(_children, c)))
            case "inputs":
                return s.Inputs(tuple(tuple(self.form(f) for f in _children(t)) for t in c[:-1]), self.type(c[-1]))
            case "params":
                return s.Params(tuple(self.param(_children(p)) for p in c))
            case "let" | "value":
                return s.Assign(self.word(c[0]), (), self.term(c[1]), None, self.span(tree))
            case "when":
                return s.Assign(self.word(c[1]), (), self.term(c[2]), self.word(c[0]), self.span(tree))
            case "state" | "output":
                form = self.form(c[0])
                right = c[1]
                assert isinstance(right, Tree)
                if right.data == "type":
                    return s.Declare(form, self.type(right))
                return s.Assign(form.name, form.axes, self.term(right), None, self.span(tree))
            case _:
                return self.knob(tree)

    def form(self, tree: object) -> s.Form:
        assert isinstance(tree, Tree)
        return s.Form(self.word(tree.children[0]), self.words(tree.children[1:]), self.span(tree))

    def type(self, tree: object) -> s.Type:
        assert isinstance(tree, Tree)
        kind, interval, default, optional = tree.children
        words = self.words(_children(kind))
        return s.Type(
            dtypes=() if kind.data == "like" else words,
            like=words[0] if kind.data == "like" else None,
            range=self.range(interval),
            default=None if default is None else self.number(default),
            optional=None if optional is None else self.word(optional),
            span=self.span(tree),
        )

    def range(self, tree: object) -> s.Range | None:
        if tree is None:
            return None
        assert isinstance(tree, Tree)
        if tree.data == "interval":
            low, high = self.number(tree.children[1]).value, self.number(tree.children[2]).value
            opens, closes = tree.children[0] == "(", tree.children[3] == ")"
            return s.Range(Interval(float(low), float(high), opens, closes), self.span(tree))
        sign, bound = tree.children[0], float(self.number(tree.children[1]).value)
        strict = sign in ("<", ">")
        interval = (
            Interval(high=bound, high_open=strict) if str(sign)[0] == "<" else Interval(low=bound, low_open=strict)
        )
        return s.Range(interval, self.span(tree))

    def param(self, parts: list[Tree[Token] | Token]) -> s.ParamItem:
        name, dtype, interval, default = parts
        declared = None if dtype is None else self.word(dtype)
        return s.ParamItem(self.word(name), declared, self.range(interval), self.number(default))

    def term(self, tree: object) -> s.Term:
        assert isinstance(tree, Tree)
        c, span = tree.children, self.span(tree)
        match tree.data:
            case "constant":
                return self.number(c[0])
            case "reference":
                axis, lag = (None, 0) if c[1] is None else self._at(_children(c[1]))
                return s.Name(self.word(c[0]), axis, lag, span)
            case "call":
                args = tuple(self.term(a) for a in c[1:] if a is not None)
                return s.Call(self.word(c[0]), args, span)
            case op:
                return s.Call(s.Word(str(op), span), tuple(self.term(a) for a in c), span, operator=True)

    def _at(self, parts: list[Tree[Token] | Token]) -> tuple[s.Word, int | float]:
        return self.word(parts[0]), 0 if parts[1] is None else self.number(parts[1]).value

    def knob(self, tree: Tree[Token]) -> s.Knob:
        c = tree.children
        name = s.Word(str(tree.data), self.span(tree))
        empty = s.Knob(name, None, (), (), (), ())
        match tree.data:
            case "chunk" | "share_scores_from" | "segments":
                return s.Knob(name, None, (), tuple(map(self.number, c)), (), ())
            case "mma":
                subject = None if c[0] is None else self.word(c[0])
                pairs = tuple((self.word(p[0]), self.words(p[1:])) for p in map(_children, c[1:]))
                return s.Knob(name, subject, (), (), (), pairs)
            case "layout" | "internal":
                return s.Knob(name, self.word(c[0]), self.words(c[1:]), (), (), ())
            case "swap" | "plan" | "weighted" | "persistent":
                return s.Knob(name, None, self.words(c), (), (), ())
            case _:
                choices = tuple((self.word(p[0]), tuple(map(self.number, p[1:]))) for p in map(_children, c))
                return s.Knob(name, None, (), (), choices, ()) if choices else empty


def _children(tree: object) -> list[Tree[Token] | Token]:
    assert isinstance(tree, Tree)
    return tree.children
