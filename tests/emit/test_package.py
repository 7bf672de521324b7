"""The files of a package: with its modules go the tuning tables that are about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssdgen import pipeline
from ssdgen.emit import package as package_module
from ssdgen.emit.package import package, spec_digest
from ssdgen.emit.support._tuned import Entry, Key, parse, to_text


def test_tables_that_are_shipped_go_with_the_modules_they_are_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [pipeline.emit(pipeline.plan(pipeline.derive(name)[0], {})) for name in ("retnet", "mamba2")]
    keys = [Key(digest, "plan=a", (), "GPU", "1.7", ("bfloat16",), "walks=1") for digest in map(spec_digest, modules)]
    text = to_text([Entry(keys[0], {"chunk": 64}), Entry(keys[1], {"chunk": 128})])
    (tmp_path / "tuned_gpu.json").write_text(text)
    monkeypatch.setattr(package_module, "resource_dir", lambda name: tmp_path)
    assert f'SPEC_DIGEST = "{keys[0].digest}"' in modules[0].text
    (entry,) = parse(package(modules[:1])["tuned_gpu.json"])
    assert entry == Entry(keys[0], {"chunk": 64})
    assert package(modules)["tuned_gpu.json"] == text, "byte for byte, so that `generate --check` agrees"
    (tmp_path / "tuned_gpu.json").write_text(json.dumps({"format": 1, "entries": []}))
    assert "tuned_gpu.json" not in package(modules)
