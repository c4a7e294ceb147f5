"""Attention where it is used: a transformer layer, and a small GPT in training.

Both take attention as a function (q, k, v) -> out of (B, S, H, D), causal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from tilewise_lab.bench.provider import Attention
from tilewise_lab.bench.settings import Model

Step = Callable[[], Sequence[Tensor]]


class Layer(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, c // self.heads).unbind(2)
        x = x + self.project(self.attention(q, k, v).reshape(b, s, c))
        y: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return y


class Gpt(nn.Module):
    def __init__(self, size: Model, attention: Attention) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.layers = nn.ModuleList(Layer(size.hidden, size.heads, attention) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def flops(size: Model) -> float:
    """Three products per weight and token (one forward, two backward); attention 3.5 times its causal forward."""
    tokens = size.batch * size.seq
    weights = size.layers * 12 * size.hidden**2 + size.vocabulary * size.hidden
    return 6.0 * weights * tokens + 3.5 * size.layers * 2 * tokens * size.seq * size.hidden


def layer_steps(
    size: Model, attentions: dict[str, Attention], naive: Attention, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Step], Step, Step]:
    """Forward and backward of one layer with each attention; then with the naive one, in this dtype and in float64."""
    torch.manual_seed(0)
    model = Layer(size.hidden, size.heads, naive).to(device, dtype)
    x, dout = (torch.randn(size.batch, size.seq, size.hidden, device=device).to(dtype) for _ in range(2))

    def step(attention: Attention, kind: torch.dtype) -> Step:
        layer = copy.deepcopy(model).to(kind)
        layer.attention = attention
        leaf, along = x.to(kind).requires_grad_(), dout.to(kind)

        def run() -> Sequence[Tensor]:
            out = layer(leaf)
            return out.detach(), *torch.autograd.grad(out, [leaf, *layer.parameters()], along)

        return run

    steps = {name: step(attention, dtype) for name, attention in attentions.items()}
    return steps, step(naive, dtype), step(naive, torch.float64)


def head_by_head(attention: Attention) -> Attention:
    """The same, with no more than the scores of one head in memory at once, forward and backward."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([checkpoint(attention, *head, use_reentrant=False) for head in heads], dim=2)

    return attend


MODES: dict[str, Callable[[nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {  # of settings.MODES
    "eager": lambda gpt: gpt,
    "compiled": lambda gpt: torch.compile(gpt),
    "graphs": lambda gpt: torch.compile(gpt, mode="reduce-overhead"),
}


def gpt_steps(
    size: Model,
    attentions: dict[str, Attention],
    naive: Attention,
    device: torch.device,
    dtype: torch.dtype,
    mode: str,
) -> tuple[dict[str, Step], Step, Step]:
    """One training step with each attention (weights in float32, AdamW, autocast where the dtype is a short one); then
    with torch's own, eager, and with the textbook's in float64.

    A step returns the gradients it used. The rate of learning is 0, so that every step has the same answer, the last
    one too: a CUDA graph replays from the third on.
    """
    torch.manual_seed(0)
    model = Gpt(size, naive).to(device)
    tokens, targets = (torch.randint(size.vocabulary, (size.batch, size.seq), device=device) for _ in range(2))
    short = dtype in (torch.bfloat16, torch.float16)

    def gradients(gpt: nn.Module, run: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
        with torch.autocast(device.type, dtype, enabled=short and kind != torch.float64):
            loss = run(tokens, targets)
        return list(torch.autograd.grad(loss, list(gpt.parameters())))

    def training(attention: Attention) -> Step:
        gpt = copy.deepcopy(model)
        _use(gpt, attention)
        run = MODES[mode](gpt)
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.0, fused=device.type == "cuda")

        def step() -> Sequence[Tensor]:
            torch.compiler.cudagraph_mark_step_begin()
            grads = gradients(gpt, run, dtype)
            for parameter, grad in zip(gpt.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
            return grads

        return step

    def still(attention: Attention, kind: torch.dtype) -> Step:
        gpt = copy.deepcopy(model).to(kind)
        _use(gpt, attention)
        return lambda: gradients(gpt, gpt, kind)

    steps = {name: training(attention) for name, attention in attentions.items()}
    return steps, still(attentions["sdpa"], torch.float32), still(head_by_head(naive), torch.float64)


def _use(gpt: Gpt, attention: Attention) -> None:
    for layer in gpt.layers:
        assert isinstance(layer, Layer)
        layer.attention = attention


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float | None:
    """The norm of the difference over the norm, of all tensors together; None where it is not finite."""

    def squared(tensors: Iterator[Tensor]) -> float:
        return sum(float(tensor.double().square().sum()) for tensor in tensors)

    off = squared(a.double() - b for a, b in zip(found, exact, strict=True))
    error = (off / squared(iter(exact))) ** 0.5
    return error if error < float("inf") else None
