"""Two things for scale: the loop over tokens that nobody wants to wait for, and attention of as many heads and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from ssdgen.run.bench.measure import Meter
from ssdgen.run.bench.rows import ATTENTION, LOOP, Scale
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.gpu_peers import Call
from ssdgen.run.inputs import Inputs

LOOP_TOKENS = 128
REPLAYS = 7
PAIRS_AT_MOST = 4 * 8 * 131072**2
"""Sequences times heads times pairs of tokens beyond which attention takes too long."""


def scale_rows(shape: Shape, meter: Meter, device: str, axis: str = "") -> list[Scale]:
    """Both at a shape, as far as they are feasible; each replayed a few times over two input sets."""
    out = []
    tokens = min(shape.t, LOOP_TOKENS)
    us = _time(token_loop, [_loop_inputs(replace(shape, t=tokens), device)], meter) * shape.t / tokens
    out.append(Scale(str(shape), LOOP, us, f"{tokens} tokens under a CUDA graph, times {shape.t // tokens}", axis))
    if shape.b * shape.h * shape.t**2 <= PAIRS_AT_MOST:
        us = _time(attention, [_attention_inputs(shape, device) for _ in range(2)], meter)
        out.append(Scale(str(shape), ATTENTION, us, "torch's scaled_dot_product_attention, causal, bf16", axis))
    return out


def token_loop(i: Inputs) -> tuple[torch.Tensor, ...]:
    """Mamba-2 token by token: state[b h p n] in float32."""
    x, step, A, B, C = (i.tensors[name] for name in ("x", "step", "A", "B", "C"))
    state = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1], device=x.device)
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        decay = torch.exp(A * step[:, t])
        entered = (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = decay[:, :, None, None] * state + entered
        y[:, t] = (state * C[:, t, :, None, :]).sum(-1)
    return y, state


def attention(i: Inputs) -> tuple[torch.Tensor, ...]:
    """Causal attention of q, k, v [b h t p]."""
    q, k, v = (i.tensors[name] for name in "qkv")
    return (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),)


def _time(call: Call, sets: Sequence[Inputs], meter: Meter) -> float:
    replay = meter.capture(call, sets)
    replay()
    return median(replay() for _ in range(REPLAYS))


def _loop_inputs(shape: Shape, device: str) -> Inputs:
    tokens = (shape.b, shape.t, shape.h)
    step = torch.exp(torch.empty(tokens, device=device).uniform_(-6.9, -2.3))
    vectors = {name: torch.randn(*tokens, shape.n, device=device) for name in "BC"}
    A = -torch.empty(shape.h, device=device).uniform_(1, 16)
    return Inputs({"x": torch.randn(*tokens, shape.p, device=device), "step": step, "A": A, **vectors}, {}, {})


def _attention_inputs(shape: Shape, device: str) -> Inputs:
    size = (shape.b, shape.h, shape.t, shape.p)
    return Inputs({name: torch.randn(size, dtype=torch.bfloat16, device=device) for name in "qkv"}, {}, {})
