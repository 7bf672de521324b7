"""Checkpoints of Mamba-2: every file is opened and every weight's name, shape and dtype compared before any is loaded.

A folder holds config.json and the weights, in one file or in several with an index:

    model.safetensors        model.safetensors.index.json        read by the safetensors library
    pytorch_model.bin        pytorch_model.bin.index.json        by torch.load with weights_only, which runs no code

Where both are there, safetensors are read. torch is imported for .bin files alone; the weights of safetensors come as arrays of
the caller's framework.
"""

from __future__ import annotations

import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, Literal

from ssdgen.diagnostics import UserError
from ssdgen.models.config import Config, Layout, read_config, read_json

Framework = Literal["pt", "np", "flax"]

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights, as safetensors calls them."""

FOLDERS = ("model.safetensors", "pytorch_model.bin")
"""Names of weights in one file, in the order of preference; in several, FILE.index.json lists them."""

INSTALL = "pip install 'ssdgen[models]'"


@dataclass(frozen=True)
class Stored:
    """A weight in a file: under which key, of what shape, its dtype as safetensors calls it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose weights are all there and fit its configuration; `weights` by their canonical names, which
    `Config.shapes` lists."""

    folder: Path
    layout: Layout
    config: Config
    weights: Mapping[str, Stored]

    def read(self, framework: Framework = "pt") -> Iterator[tuple[str, Any]]:
        """Every weight once: (canonical name, array), in the shape that `Config.shapes` gives and the dtype that is stored.

        framework: arrays of torch ("pt"), of jax ("flax") or of numpy ("np", which has no bfloat16: those are widened to
        float32); of .bin files, numpy's also for "flax"

        One file is open at a time, one weight of it in memory. Raises UserError for a decay that is not finite.
        """
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name, stored in self.weights.items():
            by_file[stored.file].append(name)
        shapes = self.config.shapes()
        for file, names in by_file.items():
            for name, array in _arrays(file, {name: self.weights[name] for name in names}, framework):
                if name.endswith(".A_log") and not bool((array - array == 0).all()):
                    raise UserError(
                        f"{file}: `{self.weights[name].key}` holds numbers that are not finite",
                        "it is damaged; fetch it again",
                    )
                yield name, array.reshape(shapes[name])


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint in a folder, its weights compared with its configuration and none of them loaded yet.

    Raises UserError, which names the file, for a file that is missing, cut short, or holds anything but tensors, for weights
    that are unknown or missing, all of them listed, and for those of another shape or of a dtype that is no float.
    """
    folder = Path(folder)
    config, layout = read_config(folder)
    files = _files(folder)
    found: dict[str, Stored] = {}
    for file in files:
        for stored in _contents(file):
            if stored.key in found:
                raise UserError(f"{file}: `{stored.key}` is in {found[stored.key].file.name} too; which one counts?")
            found[stored.key] = stored
    return Checkpoint(folder, layout, config, MappingProxyType(_matched(folder, config, layout, found)))


def stored_name(name: str, layout: Layout) -> str:
    """What a layout calls the weight of a canonical name."""
    whole = {
        "embedding": f"backbone.embedding{'s' if layout == 'transformers' else ''}.weight",
        "norm": "backbone.norm_f.weight",
        "head": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    _, number, rest = name.split(".", 2)
    inner = {"conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias", "gated_norm": "norm.weight"}
    place = "norm.weight" if rest == "norm" else f"mixer.{inner.get(rest, rest)}"
    return f"backbone.layers.{number}.{place}"


def _matched(folder: Path, config: Config, layout: Layout, found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Weights by canonical name. UserError if some are missing, too many, or do not fit."""
    shapes = config.shapes()
    names = {stored_name(name, layout): name for name in shapes}
    beside = {stored_name("head", layout)} if config.tied else set()  # written a second time by some
    missing, unknown = sorted(names.keys() - found.keys()), sorted(found.keys() - names.keys() - beside)
    if missing or unknown:
        parts = [f"{label}: {_listed(keys)}" for label, keys in (("missing", missing), ("unknown", unknown)) if keys]
        raise UserError(
            f"the weights in {folder} are not those of its config.json; {'; '.join(parts)}",
            "the checkpoint is incomplete, or of another model",
        )
    wrong: dict[str, list[str]] = defaultdict(list)
    for key, stored in found.items():
        shape = shapes["embedding" if key in beside else names[key]]
        in_file = (shape[0], 1, shape[1]) if key.endswith("conv1d.weight") else shape
        if len(shape) == 2 and key.endswith(".D"):
            in_file = (shape[0] * shape[1],)
        if stored.shape != in_file:
            wrong[f"{list(stored.shape)} instead of {list(in_file)} in {stored.file.name}"].append(key)
        elif stored.dtype not in FLOATS:
            wrong[f"of dtype {stored.dtype}, which is no float, in {stored.file.name}"].append(key)
    if wrong:
        parts = [f"{_listed(keys)}: {what}" for what, keys in wrong.items()]
        raise UserError(f"weights in {folder} do not fit its config.json; {'; '.join(parts)}")
    return {name: found[key] for key, name in names.items()}


def _listed(keys: Iterable[str]) -> str:
    """All of the names, those that differ in a layer's number together: `backbone.layers.{0-3,7}.mixer.D`."""
    layers: dict[str, list[int]] = {}
    for key in sorted(keys):
        cut = re.fullmatch(r"(.*?\.)(\d+)(\..*)", key)
        before, number, after = cut.groups() if cut else (key, None, "")
        layers.setdefault(f"`{before}{{}}{after}`" if number else f"`{key}`", []).extend(
            [int(number)] if number else []
        )
    return ", ".join(
        pattern.replace("{}", _ranges(numbers)) if numbers else pattern for pattern, numbers in layers.items()
    )


def _ranges(numbers: list[int]) -> str:
    """Numbers as text: `3`, or `{0-3,7}`."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"


def _files(folder: Path) -> list[Path]:
    """The files with weights in a folder."""
    for name in FOLDERS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(folder, index)
    raise UserError(
        f"there are no weights in {folder}", f"one of {', '.join(FOLDERS)}, or FILE.index.json beside its pieces"
    )


def _shards(folder: Path, index: Path) -> list[Path]:
    """The files that an index lists, all of which must be there, in the folder itself."""
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise UserError(f"{index}: `weight_map` must be an object of file names")
    names = sorted(set(weights.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UserError(f"{index}: `{outside[0]}` is no file of this folder")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{index} lists files that are not there: {', '.join(absent)}", "fetch the checkpoint again")
    return [folder / name for name in names]


def _contents(file: Path) -> list[Stored]:
    """What a file holds, by its header alone. UserError, which names the file, if it is damaged."""
    if file.suffix == ".bin":
        return [Stored(file, key, tuple(x.shape), _dtype_name(x)) for key, x in _unpickled(file).items()]
    with _safetensors(file, "np") as content:
        slices = {key: content.get_slice(key) for key in content.keys()}  # noqa: SIM118 - it is no dict
        return [Stored(file, key, tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()]


def _arrays(file: Path, weights: Mapping[str, Stored], framework: Framework) -> Iterator[tuple[str, Any]]:
    """The arrays of one file by canonical name."""
    if file.suffix == ".bin":
        content = _unpickled(file)
        for name, stored in weights.items():
            tensor = content[stored.key]
            yield name, tensor if framework == "pt" else _widened(tensor).numpy()
        return
    halves = framework == "np" and any(stored.dtype == "BF16" for stored in weights.values())
    with _safetensors(file, "pt" if halves else framework) as content:
        for name, stored in weights.items():
            array = content.get_tensor(stored.key)
            yield name, _widened(array).numpy() if halves else array


def _widened(tensor: Any) -> Any:
    """A tensor of torch in a dtype that numpy has."""
    return tensor.float() if _dtype_name(tensor) == "BF16" else tensor


def _dtype_name(tensor: Any) -> str:
    """The dtype of a tensor of torch as safetensors calls it, or torch itself where it is no float."""
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    name = str(tensor.dtype).removeprefix("torch.")
    return names.get(name, name)


def _safetensors(file: Path, framework: Framework) -> Any:
    """A safetensors file, opened. Its whole header is checked, and that the file is as long as that says."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError(f"{file}: the package safetensors is not installed", INSTALL) from error
    try:
        return safe_open(str(file), framework)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is no whole safetensors file: {' '.join(str(error).split())}",
            "it is damaged or cut short; fetch it again",
        ) from error


def _unpickled(file: Path) -> dict[str, Any]:
    """The tensors of a .bin file, which stay in the file until they are used. No code in it is run."""
    import torch

    if not zipfile.is_zipfile(file):
        raise UserError(
            f"{file} is no whole file of torch.save: it is damaged, cut short, or older than torch 1.6",
            "fetch it again, or save it as safetensors",
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise UserError(
            f"{file} holds more than tensors, or is damaged: to load it would be to run code, and nothing of it was run",
            f"take the checkpoint as safetensors; torch says: {_reason(error)}",
        ) from error
    except (RuntimeError, OSError, EOFError, KeyError) as error:  # what torch raises for damaged archives
        raise UserError(f"{file} cannot be read: {_reason(error)}", "it is damaged; fetch it again") from error
    tensors = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in content.items()
    )
    if not tensors:
        raise UserError(f"{file} holds no tensors by name, as a checkpoint does")
    return dict(content)


def _reason(error: Exception) -> str:
    """The part of an error of torch that says what is wrong, in one line."""
    text = " ".join(str(error).split())
    at = max(text.find("WeightsUnpickler error:"), 0)
    return text[at : at + 160]
