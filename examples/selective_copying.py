"""Selective copying (Gu and Dao 2023, arXiv 2312.00752): a small model learns to say again what it was told between noise.

    python examples/selective_copying.py [--spec mamba2] [--steps 1000] [--device cpu] [--out DIR]

A sequence is 6 tokens to remember at random places among 42 of noise, then 6 of a marker, at which the model says the 6
tokens in their order. Prints loss and accuracy, of sequences that were not trained on, and writes
DIR/selective_copying.png; ends with exit code 1 below 99 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ssdgen.nn import Mixer

LETTERS, NOISE, MARKER, VOCABULARY = 8, 8, 9, 10
LENGTH, REMEMBERED = 48, 6
GOAL = 0.99


class Block(nn.Module):
    """A mixer behind a norm, added to what comes in."""

    def __init__(self, spec: str, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mixer = Mixer(spec, width=width, heads=8, sizes={"p": 16, "n": 32})

    def forward(self, u: Tensor) -> Tensor:
        """u[b t width] -> [b t width]."""
        added: Tensor = u + self.mixer(self.norm(u))
        return added


def model(spec: str, width: int = 64, blocks: int = 2) -> nn.Sequential:
    """Tokens [b t] -> scores of the next letter [b t letters]."""
    layers = [Block(spec, width) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.RMSNorm(width), nn.Linear(width, LETTERS))


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [count, LENGTH + REMEMBERED] and the letters to say [count, REMEMBERED]."""
    letters = torch.randint(LETTERS, (count, REMEMBERED), generator=generator)
    places = torch.rand(count, LENGTH, generator=generator).argsort(1)[:, :REMEMBERED].sort(1).values
    tokens = torch.full((count, LENGTH + REMEMBERED), NOISE)
    tokens[:, LENGTH:] = MARKER
    return tokens.scatter(1, places, letters), letters


def train(spec: str, steps: int, device: str, batch: int = 64) -> tuple[list[float], list[tuple[int, float]]]:
    """Losses by step, and (step, accuracy) on other sequences; stops at GOAL twice in a row."""
    torch.manual_seed(0)
    generator, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    net = model(spec).to(device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    losses: list[float] = []
    accuracies: list[tuple[int, float]] = []
    begun = time.monotonic()
    for step in range(1, steps + 1):
        tokens, letters = (x.to(device) for x in sequences(batch, generator))
        loss = cross_entropy(net(tokens)[:, LENGTH:].flatten(0, 1), letters.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            tokens, letters = (x.to(device) for x in sequences(256, other))
            with torch.no_grad():
                right = (net(tokens)[:, LENGTH:].argmax(2) == letters).float().mean().item()
            accuracies.append((step, right))
            print(
                f"step {step:4}  loss {losses[-1]:.4f}  accuracy {right:.4f}  {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            if len(accuracies) > 1 and min(right, accuracies[-2][1]) >= GOAL:
                break
    return losses, accuracies


def draw(spec: str, losses: list[float], accuracies: list[tuple[int, float]], path: Path) -> None:
    """The loss by step, and the accuracy on other sequences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    left = figure.subplots()
    left.plot(range(1, len(losses) + 1), losses, color="#0072b2", linewidth=1)
    left.set(xlabel="step", ylabel="loss (nats a letter)", title=f"selective copying, {spec}", yscale="log")
    right = left.twinx()
    right.plot(*zip(*accuracies, strict=True), color="#d55e00", marker="o")
    right.axhline(GOAL, color="#d55e00", linewidth=0.8, linestyle="--")
    right.set(ylabel="accuracy, other sequences", ylim=(0, 1.02))
    left.yaxis.label.set_color("#0072b2")
    right.yaxis.label.set_color("#d55e00")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spec", default="mamba2", help="a built-in spec or a file")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR")
    options = parser.parse_args()
    losses, accuracies = train(options.spec, options.steps, options.device)
    draw(options.spec, losses, accuracies, options.out / "selective_copying.png")
    return 0 if accuracies[-1][1] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
