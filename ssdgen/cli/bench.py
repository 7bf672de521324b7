"""`ssdgen bench`: measure on a GPU, draw anywhere."""

from __future__ import annotations

import json as json_text
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdgen import pipeline
from ssdgen.cli.app import app
from ssdgen.cli.bench_table import as_text, tables
from ssdgen.cli.options import Debug, Json, folder, settings, several
from ssdgen.cli.output import progress, say, show
from ssdgen.diagnostics import UserError
from ssdgen.files import make_folder, write

if TYPE_CHECKING:
    from ssdgen.run.bench.forward import Effort, Subject
    from ssdgen.run.bench.rows import Document, Row, TrainingStep
    from ssdgen.run.bench.shapes import Shape

bench = typer.Typer(rich_markup_mode=None, no_args_is_help=False, invoke_without_command=True)
app.add_typer(bench, name="bench")

WINNERS = Path("bench/results/peer_winners.json")

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="b,t,h,g,p,n", help="Batch, tokens, heads, groups, channels, state; several times."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", parser=folder, help="Write JSON, tables and pictures there."),
]
Peers = Annotated[
    str,
    typer.Option(metavar="NAMES", help="TileGym, mamba_ssm, fla, a variant (`TileGym chunk 64`), by commas; or none."),
]
Rounds = Annotated[int, typer.Option(min=5, help="Replays of every graph, in turn.")]
Seconds = Annotated[float, typer.Option(min=1, help="No shape is begun after this.")]
SecondsOfAll = Annotated[
    float, typer.Option(min=1, help="No shape is begun after this; compiling all first may take half of it.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes that compile at a time; two fewer than cores.")]
WinnersFile = Annotated[
    Path, typer.Option("--winners", metavar="FILE", help="What the peers' searches found before, and are written to.")
]
Knobs = Annotated[
    list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="A knob of the best configuration.")
]
ALL_PEERS = "TileGym,mamba_ssm,fla"


@bench.callback()
def bench_help(context: typer.Context) -> None:
    """Measure the passes forward and backward, and one-token steps, beside others on a GPU; draw the results."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@bench.command()
def forward(
    shape: Shapes = None,
    out: Out = None,
    peers: Peers = ALL_PEERS,
    search_peers: Annotated[
        bool, typer.Option("--search-peers", help="Let each peer search all it can again, and record what wins.")
    ] = False,
    plans: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Which of ours beside the default, by commas; all of them if not given."),
    ] = None,
    scale: Annotated[bool, typer.Option("--scale/--no-scale", help="A token loop and attention, for scale.")] = True,
    rounds: Rounds = 40,
    seconds: Seconds = 540.0,
    workers: Workers = None,
    winners: WinnersFile = WINNERS,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Our plans and the peers in one run, in turn, on the same inputs, each checked against float64 first."""
    from ssdgen.run.bench.environment import environment
    from ssdgen.run.bench.forward import forward as measured
    from ssdgen.run.bench.measure import CudaMeter
    from ssdgen.run.bench.ours import PLANS
    from ssdgen.run.bench.rows import DEFAULT
    from ssdgen.run.bench.shapes import SHAPES

    ours = (
        PLANS
        if plans is None
        else {name: PLANS[name] for name in dict.fromkeys((DEFAULT, *several(plans, PLANS, "--plans")))}
    )
    shapes, subject = _shapes(shape, SHAPES), _subject(peers, ours)
    file, save = _winners(winners, search_peers), _saver(out)
    with progress("bench forward") as step:
        document = measured(
            subject, shapes, CudaMeter(), environment(command_line()), _effort(rounds, seconds, workers), file,
            again=search_peers, scale=scale, progress=step, save=save,
        )  # fmt: skip
    _finish(document, out, json)


@bench.command()
def backward(
    shape: Shapes = None,
    out: Out = None,
    peers: Annotated[str, typer.Option(metavar="NAMES", help="TileGym, mamba_ssm, by commas; or none.")] = (
        "TileGym,mamba_ssm"
    ),
    rounds: Rounds = 20,
    seconds: SecondsOfAll = 300.0,
    workers: Workers = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The gradient kernels and the peers' backward passes, alone and behind the forward pass, checked against float64 first."""
    from ssdgen.run.bench.backward import PEERS, SHAPES
    from ssdgen.run.bench.backward import backward as measured
    from ssdgen.run.bench.environment import environment, need_gpu
    from ssdgen.run.bench.measure import CudaMeter
    from ssdgen.run.bench.ours import differentiable_module

    shapes, others = _shapes(shape, SHAPES), () if peers == "none" else several(peers, PEERS, "--peers")
    need_gpu()
    form, _ = pipeline.derive("mamba2")
    module = differentiable_module(pipeline.emit(pipeline.plan(form, {})))
    save = _saver(out)
    with progress("bench backward") as step:
        document = measured(
            module, form.recurrence.layer, shapes, CudaMeter(), environment(command_line()), _effort(rounds, seconds, workers),
            peers=others, progress=step, save=save,
        )  # fmt: skip
    _finish(document, out, json)


@bench.command()
def ablation(
    shape: Shapes = None,
    out: Out = None,
    config: Knobs = None,
    rounds: Rounds = 40,
    seconds: Seconds = 240.0,
    workers: Workers = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What each technique is worth: one taken away at a time from the best configuration."""
    from ssdgen.run.bench.ablation import ABLATED
    from ssdgen.run.bench.ablation import ablation as measured
    from ssdgen.run.bench.conflicts import read_conflicts
    from ssdgen.run.bench.environment import environment, need_gpu
    from ssdgen.run.bench.measure import CudaMeter
    from ssdgen.run.bench.ours import PLANS

    shapes, best = _shapes(shape, ABLATED), settings(config) or PLANS["segmented"]
    need_gpu()
    form, _ = pipeline.derive("mamba2")
    save = _saver(out)
    with progress("bench ablation") as step:
        document = measured(
            form, lambda shape: best, shapes, CudaMeter(), environment(command_line()), _effort(rounds, seconds, workers),
            read_conflicts, progress=step, save=save,
        )  # fmt: skip
    _finish(document, out, json)


@bench.command()
def growth(
    along: Annotated[
        str, typer.Option(metavar="AXES", help="t (tokens), n (state channels), h (heads), b (batch), by commas.")
    ] = "t,n,h,b",
    out: Out = None,
    peers: Peers = "TileGym chunk 64,mamba_ssm",
    rounds: Rounds = 15,
    seconds: Seconds = 240.0,
    workers: Workers = None,
    winners: WinnersFile = WINNERS,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Time a token along sequence, state, heads and batch, one after the other, and where it bends."""
    from ssdgen.run.bench.environment import environment
    from ssdgen.run.bench.growth import AXES
    from ssdgen.run.bench.growth import growth as measured
    from ssdgen.run.bench.measure import CudaMeter
    from ssdgen.run.bench.rows import DEFAULT

    axes = {axis: AXES[axis] for axis in several(along, AXES, "--along")}
    subject = _subject(peers, {DEFAULT: {}})
    save = _saver(out)
    with progress("bench growth") as step:
        document = measured(
            subject, CudaMeter(), environment(command_line()), _effort(rounds, seconds, workers), winners,
            axes=axes, progress=step, save=save,
        )  # fmt: skip
    _finish(document, out, json)


@bench.command()
def decode(
    shape: Shapes = None,
    out: Out = None,
    peers: Annotated[str, typer.Option(metavar="NAMES", help="mamba_ssm, FlashInfer, by commas; or none.")] = (
        "mamba_ssm,FlashInfer"
    ),
    rounds: Rounds = 40,
    seconds: Seconds = 120.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """One token beside the steps of others, after how long a context, and on the CPU beside transformers."""
    from ssdgen.run.bench.decode import PEERS, SHAPES
    from ssdgen.run.bench.decode import decode as measured
    from ssdgen.run.bench.environment import environment, need_gpu
    from ssdgen.run.bench.measure import CudaMeter
    from ssdgen.run.bench.ours import load_module, write_module

    shapes, others = _shapes(shape, SHAPES), () if peers == "none" else several(peers, PEERS, "--peers")
    longer = next((s for s in shapes if s.t != 1), None)
    if longer is not None:
        raise UserError(f"--shape {longer}: a step is one token, not {longer.t}", f"--shape {SHAPES[0]}")
    need_gpu()
    form, _ = pipeline.derive("mamba2")
    module = load_module(write_module(form, pipeline.plan(form, {}).config), "mamba2")
    save = _saver(out)
    with progress("bench decode") as step:
        document = measured(
            form.recurrence.layer, module, CudaMeter(), environment(command_line()), rounds, seconds, shapes=shapes,
            peers=others, progress=step, save=save,
        )  # fmt: skip
    _finish(document, out, json)


@bench.command()
def training(
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Mixers of the model; 24 are 130M parameters.")] = 24,
    out: Out = None,
    peers: Annotated[str, typer.Option(metavar="NAMES", help="mamba_ssm, or none.")] = "mamba_ssm",
    rounds: Rounds = 20,
    seconds: Seconds = 120.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """A training step of a 130M model with our kernels and with a peer's in their place, and what of it the scans are."""
    from ssdgen.nn import Mixer
    from ssdgen.run.bench.environment import environment, need_gpu
    from ssdgen.run.bench.measure import CudaMeter
    from ssdgen.run.bench.training import PEERS, CudaTimer, Size
    from ssdgen.run.bench.training import training as measured

    others = () if peers == "none" else several(peers, PEERS, "--peers")
    need_gpu()
    save = _saver(out)
    with progress("bench training") as step:
        document = measured(
            Mixer, CudaMeter(), CudaTimer(), environment(command_line()), rounds, seconds,
            size=Size(layers=layers, batch=batch, tokens=tokens), peers=others, progress=step, save=save,
        )  # fmt: skip
    _finish(document, out, json)


@bench.command()
def draw(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.json...", help="What the other commands wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", parser=folder)] = Path("."),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw the pictures of measured results; needs matplotlib and no GPU."""
    from ssdgen.run.bench.pictures import pictures
    from ssdgen.run.bench.rows import read_document

    documents = {file.stem: read_document(file) for file in files}
    if len(documents) < len(files):
        raise UserError("two files have the same name, and so would their pictures", "draw them into different folders")
    make_folder(out)
    written = [str(path) for name, document in documents.items() for path in pictures(document, out, name)]
    if json:
        show(json_text.dumps({"written": written}, indent=2))
    else:
        show("\n".join(f"wrote {path}" for path in written) if written else "nothing to draw")


def _shapes(texts: list[str] | None, default: tuple[Shape, ...]) -> tuple[Shape, ...]:
    from ssdgen.run.bench.shapes import read_shape

    return tuple(dict.fromkeys(map(read_shape, texts))) if texts else default


def _subject(peers: str, plans: Mapping[str, Mapping[str, str]]) -> Subject:
    """The forms derived and our modules emitted. UserError for a peer that there is not, and without a GPU."""
    from ssdgen.run.bench.environment import need_gpu
    from ssdgen.run.bench.forward import subject
    from ssdgen.run.bench.others import CHOICES

    variants = [v for name in several(peers, CHOICES, "--peers") for v in CHOICES[name]] if peers != "none" else []
    need_gpu()
    mamba2, _ = pipeline.derive("mamba2")
    simple_gla, _ = pipeline.derive("simple_gla")
    return subject(mamba2, simple_gla, list(dict.fromkeys(variants)), plans)


def _effort(rounds: int, seconds: float, workers: int | None) -> Effort:
    from ssdgen.run.bench.forward import Effort

    return Effort(rounds, seconds, workers or max(1, (os.cpu_count() or 1) - 2))


def _winners(path: Path, search: bool) -> Path:
    """`path`, whose folder must be there if searches are to be written; UserError before any time is spent."""
    if search and not path.parent.is_dir():
        raise UserError(f"--winners {path}: there is no folder {path.parent}", f"mkdir -p {path.parent}")
    return path


def command_line() -> str:
    """This command, with DIR for folders and FILE for files: no machine's paths are recorded."""
    words, hidden = sys.argv[1:], {"-o": "DIR", "--out": "DIR", "--winners": "FILE"}
    return shlex.join(["ssdgen", *(hidden.get(words[i - 1], w) if i else w for i, w in enumerate(words))])


def _saver(out: Path | None) -> Callable[[Document], None]:
    """Writes the results so far: a run that is cut short keeps them."""
    if out is not None:
        make_folder(out)
    return lambda document: None if out is None else _write(document, out)


def _write(document: Document, out: Path) -> None:
    from ssdgen.run.bench.rows import to_json

    write(out / f"{document.study}.json", to_json(document) + "\n")


def _finish(document: Document, out: Path | None, json: bool) -> None:
    """Print the results and write them, with pictures where matplotlib is installed; exit code 1 if one of ours is wrong."""
    from ssdgen.run.bench.rows import OURS, to_json

    if out is not None:
        _write(document, out)
        write(out / f"{document.study}.txt", as_text(tables(document)))
        if find_spec("matplotlib") is None:
            say(
                f"ssdgen: no pictures: matplotlib is not installed here\n  hint: ssdgen bench draw {document.study}.json"
            )
        else:
            from ssdgen.run.bench.pictures import pictures

            pictures(document, out)
    if json:
        show(to_json(document))
    else:
        show(as_text(tables(document)).rstrip("\n"))
    wrong: list[Row | TrainingStep] = [row for row in document.rows if row.family == OURS and not row.right]
    wrong += [step for step in document.steps if step.family == OURS and step.note]
    if wrong:
        say(f"ssdgen: {len(wrong)} results of ours are wrong or failed; the first: {wrong[0].name} at {wrong[0].shape}")
        raise typer.Exit(1)
