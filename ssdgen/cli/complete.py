"""`ssdgen complete`: continue a prompt with the checkpoint of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdgen.cli.app import app
from ssdgen.cli.options import Debug, Json
from ssdgen.cli.output import show, show_json
from ssdgen.diagnostics import UserError

if TYPE_CHECKING:
    from ssdgen.models.loop import Decoder


@app.command()
def complete(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder with a Mamba-2's config.json, weights and tokenizer.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="The most tokens to make.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, max=1e6, help="Draw tokens, the likelier the lower it is; 0 takes the likeliest.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from so many likeliest only; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where tokenizer.json lies, if not in CHECKPOINT.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="A GPU where there is one.")] = None,
    dtype: Annotated[Literal["f32", "bf16", "f16"] | None, typer.Option(help="bf16 on a GPU, else f32.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt with a Mamba-2 checkpoint, printed as it comes."""
    from ssdgen.models.config import read_config
    from ssdgen.models.loop import Decoder
    from ssdgen.models.mamba2 import Mamba2
    from ssdgen.models.place import place
    from ssdgen.models.sampling import Sampling
    from ssdgen.models.text import Text

    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is no UTF-8 text", "see that the terminal sends UTF-8") from error
    if not checkpoint.is_dir():
        raise UserError(f"there is no folder {checkpoint}", "name one with config.json, weights and tokenizer.json")
    read_config(checkpoint)
    text = Text(tokenizer or checkpoint)
    ids = text.tokens(prompt)
    if not ids:
        raise UserError("the prompt has no tokens", "write a word or two")
    model = Mamba2.load(checkpoint, *place(device, dtype))
    odd = [i for i in ids if i >= model.config.vocab]
    if odd:
        raise UserError(
            f"the tokenizer gives token {odd[0]}, and {checkpoint} has {model.config.vocab}", "it is another model's"
        )
    stop = model.config.stop or tuple(t for t in text.stop if t < model.config.vocab)
    decoder = Decoder(model, sampling=Sampling(temperature, top_k, seed), stop=stop)
    made: list[int] = []
    if not json:
        show(prompt, end="")
    pieces = []
    for piece in text.pieces(ids, _noted(decoder, ids, tokens, made)):
        pieces.append(piece)
        if not json:
            show(piece, end="")
    ended = "stop" if made[-1] in stop else "length"
    if json:
        found = {"prompt": prompt, "prompt_tokens": ids, "text": "".join(pieces), "tokens": made, "ended": ended}
        show_json(found)
    else:
        show("")


def _noted(decoder: Decoder, prompt: list[int], most: int, made: list[int]) -> Iterator[int]:
    """The tokens behind a prompt one by one; they are put into `made` too."""
    for (row,) in decoder.run([prompt], most):
        for token in row:
            made.append(token)
            yield token
