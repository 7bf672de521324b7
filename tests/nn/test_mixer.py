"""Mixers around every recurrence: they train, and a token at a time, packed or in a graph they give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdgen.diagnostics import SpecError
from ssdgen.nn import Mixer

SPECS = ("mamba2", "state_space_duality", "mlstm", "retnet", "linear_attention", "simple_gla", "gla", "mamba3")
STEPPED = SPECS[:6]


def mixer(spec: str, **options: Any) -> Mixer:
    torch.manual_seed(0)
    return Mixer(spec, **{"width": 24, "heads": 4, "groups": 2, "sizes": {"p": 8, "n": 16}, **options})


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_has_a_gradient(spec: str) -> None:
    m = mixer(spec)
    y = m(tokens(2, 70, 24))
    assert y.shape == (2, 70, 24)
    y.square().sum().backward()
    for name, p in m.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.any(), name


@pytest.mark.parametrize("spec", STEPPED)
@pytest.mark.parametrize("taps", [0, 4])
def test_token_by_token(spec: str, taps: int) -> None:
    """Steps are the whole sequence, within float32 rounding."""
    m, u = mixer(spec, taps=taps), tokens(2, 9, 24)
    cache = m.init_cache(2)
    one = torch.stack([m.step(u[:, t], cache) for t in range(9)], 1)
    torch.testing.assert_close(one, m(u).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", STEPPED)
def test_packed(spec: str) -> None:
    """Each sequence is as on its own: neither the convolution nor the recurrence looks across a boundary."""
    m, u = mixer(spec), tokens(1, 50, 24)
    together = m(u, cu_seqlens=torch.tensor([0, 20, 50]))
    apart = torch.cat([m(u[:, :20]), m(u[:, 20:])], 1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    again = m(u, seq_idx=(torch.arange(50) >= 20).long()[None])
    torch.testing.assert_close(again, apart, rtol=1e-4, atol=1e-5)


def test_a_later_token_changes_nothing_before() -> None:
    m, u = mixer("mamba2"), tokens(1, 40, 24)
    changed = u.clone()
    changed[:, 30:] += 1
    assert torch.equal(m(u)[:, :30], m(changed)[:, :30])
    assert not torch.equal(m(u)[:, 30:], m(changed)[:, 30:])


def test_parameters_begin_as_in_mamba() -> None:
    m = mixer("mamba2", heads=64, groups=1)
    assert (m._ranged("A") <= -1).all()
    assert (m._ranged("A") >= -16).all()
    step = torch.nn.functional.softplus(m._ranged("dt_bias"))
    assert (step > 0.9e-3).all()
    assert (step < 1.1e-1).all()
    assert (m._ranged("D") == 1).all()


def test_a_state_dict_goes_around() -> None:
    one, two = mixer("mlstm"), Mixer("mlstm", width=24, heads=4, groups=2, sizes={"p": 8, "n": 16})
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(tokens(1, 5, 24)), two(tokens(1, 5, 24)))


def test_a_users_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is emitted into the cache folder; the built-in ones are those that come along."""
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path / "cache"))
    built_in = Path(__file__).resolve().parents[2] / "specs" / "simple_gla.ssd"
    mine = tmp_path / "mine.ssd"
    mine.write_text(built_in.read_text().replace("layer simple_gla", "layer mine"))
    m = mixer(str(mine))
    assert m.module.LAYER.name == "mine"
    assert m(tokens(1, 5, 24)).shape == (1, 5, 24)
    assert mixer("simple_gla").module.__name__ == "ssdgen.generated.simple_gla"


def test_compiled() -> None:
    m, u = mixer("mamba2"), tokens(1, 40, 24)
    got = torch.compile(m, fullgraph=True, backend="aot_eager")(u)
    torch.testing.assert_close(got, m(u), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": {"q": 8}}, "mamba2 has no channel axis `q`; sizes may be of p, n"),
        ({"sizes": {"p": 0}}, "mamba2: axis `p` must be a positive integer, got 0"),
        ({"heads": 3}, "mamba2: 2 groups do not divide 3 heads"),
        ({"heads": 2.0}, "axis `h` must be a positive integer, got 2.0"),
        ({"taps": 9}, "taps must be 0 or from 2 to 8, got 9"),
        ({"taps": 1}, "taps must be 0 or from 2 to 8, got 1"),
        ({"groups": 0}, "axis `g` must be a positive integer, got 0"),
        ({"taps": "4"}, "taps must be 0 or from 2 to 8, got '4'"),
        ({"width": "24"}, "width must be a positive integer, got '24'"),
    ],
)
def test_bad_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixer("mamba2", **options)


def test_bad_input() -> None:
    m = mixer("mamba2")
    with pytest.raises(ValueError, match=r"`u` must be \[b t width\] with width 24, got shape \[2, 5, 9\]"):
        m(tokens(2, 5, 9))
    with pytest.raises(ValueError, match=r"`u` must be \[b width\] with width 24, got shape \[2, 1, 24\]"):
        m.step(tokens(2, 1, 24), m.init_cache(2))
    with pytest.raises(ValueError, match=r"`cache`.* must have shape \[2, .*got \[3, "):
        m.step(tokens(2, 24), m.init_cache(3))
    with pytest.raises(ValueError, match="`cu_seqlens` must begin at 0, never decrease, and end at 5"):
        m(tokens(1, 5, 24), cu_seqlens=torch.tensor([0, 4]))


def test_a_spec_with_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.ssd"
    wrong.write_text("language 1\nlayer wrong\n")
    with pytest.raises(SpecError):
        mixer(str(wrong))
