"""The table at run time: which Config a call gets, that nothing in a file breaks a call, and that lookups cost nothing."""

from __future__ import annotations

import json
import timeit
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgen.build.store import cache_folder
from ssdgen.emit.support import _tuned
from ssdgen.emit.support._tuned import Entry, Gpu, Key, Rule, Shape

SIZE = {"b": 4, "t": 16384, "h": 8, "p": 64, "g": 1, "n": 128}
GPU = Gpu("Some GPU", 132)


@dataclass(frozen=True)
class Config:
    """As an emitted one: it refuses what no kernel takes."""

    chunk: int = 64
    tile_p: int = 64
    segments: int = 0
    intra: str = "tf32"

    def __post_init__(self) -> None:
        if type(self.chunk) is not int or self.chunk not in (32, 64, 128):
            raise ValueError(f"config field `chunk` must be 32, 64 or 128, got {self.chunk!r}")
        if self.intra not in {"tf32": 1, "bf16": 0}:  # TypeError for what cannot be hashed
            raise ValueError("intra")


@dataclass(frozen=True)
class Layer:
    name: str = "layer"
    batch: str = "b"
    time: str = "t"
    head: str = "h"
    groups: Any = None


LAYER = Layer(groups={"g": "h"})
CONFIGS = {torch.bfloat16: Config(), torch.float32: Config(chunk=32)}
KEY = Key("digest", "plan=a", (), GPU.name, _tuned.compiler_version(), ("bfloat16",), _tuned.shape_of(LAYER, SIZE).text)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder and one beside the modules, `tmp_path`/user and `tmp_path`/shipped."""
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(_tuned, "shipped_folder", lambda: tmp_path / "shipped")
    for name in ("user", "shipped"):
        (tmp_path / name).mkdir()
    _tuned.forget()
    _tuned._warn.cache_clear()
    yield tmp_path
    _tuned.forget()


def chosen(config: Any = None, x: Any = None, **changed: Any) -> Any:
    arguments = {"digest": "digest", "variant": "plan=a", "present": (), "size": SIZE, "dtypes": (torch.bfloat16,)}
    x = torch.empty(1) if x is None else x
    with _tuned.assumed(GPU):
        return _tuned.chosen(LAYER, config, CONFIGS, **{**arguments, **changed}, x=x)  # type: ignore[arg-type]


def write(folder: Path, *entries: Entry) -> None:
    (folder / "tuned_layer.json").write_text(_tuned.to_text(entries))
    _tuned.forget()


def test_a_callers_config_wins_and_has_to_be_one(folders: Path) -> None:
    write(folders / "user", Entry(KEY, {"chunk": 128}))
    assert chosen(Config(chunk=32)) == Config(chunk=32)
    with pytest.raises(TypeError, match=r"layer: `config` must be a layer\.Config, got dict"):
        chosen({"chunk": 32})


def test_off_the_gpu_it_is_the_default(folders: Path) -> None:
    """What is emulated or portable must not depend on the tables of a machine."""
    write(folders / "user", Entry(KEY, {"chunk": 128}))
    x = torch.empty(1)
    arguments: Any = {"digest": "digest", "variant": "plan=a", "present": (), "size": SIZE, "x": x}
    assert _tuned.chosen(LAYER, None, CONFIGS, dtypes=(torch.bfloat16,), **arguments) == Config()
    assert _tuned.chosen(LAYER, None, CONFIGS, dtypes=(torch.float64,), **arguments) == Config(chunk=32)


def test_a_users_entry_wins_over_a_shipped_one(folders: Path) -> None:
    assert chosen() == Config()
    write(folders / "shipped", Entry(KEY, {"chunk": 32}), Entry(replace(KEY, present=("z",)), {"chunk": 32}))
    assert chosen() == Config(chunk=32)
    write(folders / "user", Entry(KEY, {"chunk": 128, "segments": 8}))
    assert chosen() == Config(chunk=128, segments=8)
    assert chosen(present=("z",)) == Config(chunk=32)


def test_what_is_present_is_what_is_given() -> None:
    assert _tuned.present({}) == ()
    assert _tuned.present({"z": torch.empty(0), "w": None, "packed": 0}) == ("z", "packed")


def test_the_key_covers_every_field(folders: Path) -> None:
    """An entry for another GPU, compiler, dtype, variant, option or class of shape is none for this call."""
    for f in fields(Key):
        other: Any = ("other",) if isinstance(getattr(KEY, f.name), tuple) else "other"
        write(folders / "user", Entry(replace(KEY, **{f.name: other}), {"chunk": 128}))
        assert chosen() == Config(), f.name
    write(folders / "user", Entry(KEY, {"chunk": 128}))
    assert chosen() == Config(chunk=128)
    for changed in (
        {"digest": "other"},
        {"variant": "other"},
        {"present": ("z",)},
        {"dtypes": (torch.bfloat16, torch.float32)},
        *({"size": {**SIZE, axis: length * 2}} for axis, length in SIZE.items()),
    ):
        assert chosen(**changed) == Config(), changed


def test_a_shape_stands_for_its_class() -> None:
    def text(**changed: int) -> str:
        return _tuned.shape_of(LAYER, {**SIZE, **changed}).text

    assert text() == "walks=32 tokens=16384 per_group=8 n=128 p=64"
    assert text(t=16000) == text(t=20000) == text()
    assert text(b=8, h=4, g=1) != text()  # as many walks, other groups
    assert text(t=8192) != text()
    assert text(b=1, h=80, g=1).startswith("walks=91 ")  # to half a power of two
    assert text(t=0, b=0).startswith("walks=0 tokens=0 ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[]", "no tuning table"),
        ('{"format": 99, "entries": []}', "format 99"),
        ('{"format": 1}', "no list of entries"),
        ('{"format": 1, "entries": [{}]}', "entry 1 lacks a part"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_table_that_is_none_is_left_out_with_one_warning(folders: Path, text: str, reason: str) -> None:
    path = folders / "user" / "tuned_layer.json"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert chosen() == Config()
    assert str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.forget()
        assert chosen() == Config()


def test_what_no_config_takes_is_left_out(folders: Path) -> None:
    write(folders / "user", Entry(KEY, {"chunk": 128, "warp_drive": 9}))
    with pytest.warns(RuntimeWarning, match="no Config of this module has warp_drive"):
        assert chosen() == Config(chunk=128)
    for wrong in ({"chunk": 65}, {"chunk": True}, {"chunk": None}, {"intra": []}):
        write(folders / "user", Entry(KEY, wrong))  # type: ignore[arg-type]
        _tuned._warn.cache_clear()
        with pytest.warns(RuntimeWarning, match="an entry is left out"):
            assert chosen() == Config()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@st.composite
def tables(draw: st.DrawFn) -> str:
    """Texts of a table that are nearly right: the key of the call with any value for a field, any Config."""
    key = {f.name: getattr(KEY, f.name) for f in fields(Key)}
    key |= draw(st.dictionaries(st.sampled_from([*key, "more"]), JSON, max_size=1))
    entry = {"key": key, "config": draw(JSON | st.dictionaries(st.sampled_from(["chunk", "intra", "x"]), JSON))}
    return json.dumps({"format": draw(st.just(1) | JSON), "entries": [entry]})


@given(text=st.text() | JSON.map(json.dumps) | tables())
@settings(max_examples=300, deadline=None)
def test_no_text_of_a_table_breaks_a_call(text: str) -> None:
    folder = _tuned.user_folder()
    (folder / "tuned_any.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    _tuned.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert isinstance(chosen(), Config)


def test_a_table_written_is_a_table_read() -> None:
    entries = (Entry(KEY, {"chunk": 128}, {"microseconds": 1.5}), Entry(replace(KEY, gpu="b"), {}))
    back = {e.key: (e.config, e.measured) for e in _tuned.parse(_tuned.to_text(entries))}
    assert back == {e.key: (e.config, e.measured) for e in entries}
    assert _tuned.to_text(entries) == _tuned.to_text(entries[::-1])


def test_the_cache_folder_is_that_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convention is written twice, since emitted modules work without ssdgen."""
    for name in ("SSDGEN_CACHE_DIR", "XDG_CACHE_HOME"):
        for value in ("/somewhere", ""):
            monkeypatch.setenv(name, value)
            assert _tuned.user_folder() == cache_folder()
        monkeypatch.delenv(name)
        assert _tuned.user_folder() == cache_folder()


class Cuda:
    """What `chosen` asks of a tensor on a GPU."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


def test_a_lookup_costs_little_and_sees_a_new_table(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuned, "gpu_of", lambda device: GPU)
    write(folders / "user", Entry(KEY, {"chunk": 128}))
    x: Any = Cuda()

    def call() -> Any:
        return _tuned.chosen(
            LAYER,
            None,
            CONFIGS,
            digest="digest",
            variant="plan=a",
            present=(),
            size=SIZE,
            dtypes=(torch.bfloat16,),
            x=x,
        )

    assert call() == Config(chunk=128)
    seconds = min(timeit.repeat(call, number=1000, repeat=20)) / 1000
    assert seconds < 3e-6, "on the host, at every call"
    write(folders / "user", Entry(KEY, {"chunk": 32}))
    assert call() == Config(chunk=32)


def test_sizes_that_never_come_again_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuned, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(_tuned, "MOST_MEMOISED", 8)
    for tokens in range(100):
        chosen(size={**SIZE, "t": tokens}, x=Cuda())
    assert 0 < len(_tuned._MEMO) <= 8


@dataclass(frozen=True)
class SharingConfig:
    """Fields of a Config about scores."""

    share_scores_from: int = 4
    latency_x: int = 3
    latency_B: int = 2
    latency_C: int = 2
    latency_scores: int = 2


@dataclass(frozen=True)
class WalkConfig(SharingConfig):
    """Of the plan that walks segments."""

    segments: int = 0
    state_latency_x: int = 2
    state_latency_B: int = 2


def test_the_heuristic_fits_tiles_to_axes_and_keeps_the_rest() -> None:
    shape = Shape(32, 16384, 8, (("n", 128), ("p", 16)))
    assert _tuned.heuristic(Config(), shape, 132) == Config(tile_p=32)
    assert _tuned.heuristic(Config(tile_p=32), replace(shape, channels=(("p", 256),)), 132) == Config(tile_p=32)


def test_the_heuristic_for_wide_and_narrow_states() -> None:
    """What an H200 was faster with: long scores are made where they are used, and short ones of few columns, unless many heads
    share them; and where heads share scores, B is asked for late."""
    default = WalkConfig()
    wide, middle, narrow, few = (Shape(32, 16384, 8, (("n", n), ("p", 64))) for n in (256, 128, 64, 32))
    own = [replace(shape, per_group=2) for shape in (middle, narrow)]
    many = replace(few, per_group=16)
    found = {shape: _tuned.heuristic(default, shape, 132) for shape in (wide, middle, narrow, few, many, *own)}
    assert found[wide] == WalkConfig(
        share_scores_from=0, latency_x=8, latency_B=4, latency_C=3, state_latency_x=1, state_latency_B=1
    )
    assert found[middle] == WalkConfig(latency_B=1)
    assert found[narrow] == WalkConfig(latency_x=4, latency_B=1)
    assert found[few] == WalkConfig(share_scores_from=16, latency_x=5, latency_B=4, latency_C=4)
    assert found[many] == WalkConfig(share_scores_from=16, latency_x=4, latency_B=1)
    assert [found[shape] for shape in own] == [default, WalkConfig(latency_x=5, latency_B=4, latency_C=4)]
    assert _tuned.heuristic(replace(default, share_scores_from=0), few, 132).share_scores_from == 0, "never stays"


def test_other_plans_keep_their_latencies() -> None:
    for n in (64, 128, 256):
        assert _tuned.heuristic(SharingConfig(), Shape(32, 16384, 8, (("n", n), ("p", 64))), 132) == SharingConfig()


def test_a_rule_is_one_line() -> None:
    """How a rule is added: a field, its value from the shape and the GPU; a field that no Config has is no error."""
    rules = (
        Rule("chunk", lambda v, s, sms, axis: 128 if s.walks * 2 < sms else v, "few walks"),
        Rule("shared_scores", lambda v, s, sms, axis: int(s.per_group > 1), "heads share them"),
    )
    shape = Shape(8, 16384, 8, ())
    assert _tuned.heuristic(Config(), shape, 132, rules) == Config(chunk=128)
    assert _tuned.heuristic(Config(), replace(shape, walks=200), 132, rules) == Config()
