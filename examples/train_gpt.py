"""A small GPT, trained from one seed and on one stream of text with tilewise and with torch, and their losses compared.

    ./run example train_gpt --json losses.json     # on a GPU: 300 steps, head dims 64 and 128, half a minute
    ./run example train_gpt --steps 20             # on a CPU, a smaller model
    ./run example train_gpt --draw losses.json     # docs/train-gpt.svg, with matplotlib

Two runs that differ by nothing but rounding drift apart, because training is chaotic. So torch is run twice, with the
kernel of its choice and with its formula, and the distance between those two is the noise by which ours is judged.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import tilewise

VOCABULARY = 64
NOISE = 2.0  # how many times farther from torch than torch is from itself
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (B, S, H, D), causal


def of_tilewise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, causal=True)


def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def of_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return of_torch(q, k, v)


ATTENTIONS: dict[str, Attention] = {"torch": of_torch, "torch's formula": of_formula, "tilewise": of_tilewise}


class Block(nn.Module):
    def __init__(self, width: int, dim: int, attention: Attention) -> None:
        super().__init__()
        self.dim, self.attention = dim, attention
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, -1, self.dim)).unbind(2)  # (B, S, H, D)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        x = x + self.down(gelu(self.up(self.after(x))))
        return x


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, length: int, dim: int, attention: Attention) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, dim, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def batch_of_text(step: int, batch: int, length: int) -> Tensor:
    """Words of a Markov chain in which three words may follow each, said twice: the second time they can be copied."""
    chain = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    half = length // 2 + 1
    choices = torch.randint(3, (half, batch), generator=generator)
    words = [torch.randint(VOCABULARY, (batch,), generator=generator)]
    for choice in choices:
        words.append(chain[words[-1], choice])
    said = torch.stack(words[1:], 1)
    return torch.cat([said, said], 1)[:, : length + 1]


def train(dim: int, attention: Attention, args: argparse.Namespace, tick: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    device = args.device
    model = GPT(args.width, args.layers, args.length, dim, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95))
    stream = [batch_of_text(step, args.batch, args.length).to(device) for step in range(args.steps)]
    losses = []
    began = time.perf_counter()
    for step, text in enumerate(stream):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 20)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(text[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        tick()
    return {"losses": torch.stack(losses).tolist(), "seconds": time.perf_counter() - began}


def distance(a: list[float], b: list[float]) -> float:
    """Root mean square of the difference of two curves."""
    return float((torch.tensor(a) - torch.tensor(b)).square().mean().sqrt())


def verdict(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    losses = {name: run["losses"] for name, run in runs.items()}
    noise = distance(losses["torch"], losses["torch's formula"])
    ours = min(distance(losses["tilewise"], losses[name]) for name in ("torch", "torch's formula"))
    floor = 1e-6 * losses["torch"][0]
    return {"noise": noise, "ours": ours, "agree": ours <= NOISE * max(noise, floor)}


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table("head dim", "attention", "first loss", "last 20", "seconds", "from torch (rms)", "within noise")
    for dim, found in results.items():
        for name, run in found["runs"].items():
            losses = run["losses"]
            last = sum(losses[-20:]) / len(losses[-20:])
            off = distance(losses, found["runs"]["torch"]["losses"])
            agrees = ("[green]yes" if found["agree"] else "[red]no") if name == "tilewise" else ""
            shown.add_row(dim, name, f"{losses[0]:.4f}", f"{last:.4f}", f"{run['seconds']:.1f}", f"{off:.2e}", agrees)
    return shown


def draw(source: Path, target: Path) -> None:
    from matplotlib import pyplot

    results = json.loads(source.read_text())["results"]
    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.4), squeeze=False, sharey=True)
    looks = {"torch": {"color": "#2f6fd6", "lw": 3, "alpha": 0.5}, "tilewise": {"color": "#e4572e", "lw": 1}}
    for axis, (dim, found) in zip(axes[0], results.items(), strict=True):
        for name, look in looks.items():
            axis.plot(found["runs"][name]["losses"], label=name, **look)
        axis.set(title=f"head dim {dim}: {found['ours']:.1e} apart, noise {found['noise']:.1e}", xlabel="step")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def options(words: list[str] | None = None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dims")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=512 if gpu else 128)
    parser.add_argument("--layers", type=int, default=4 if gpu else 2)
    parser.add_argument("--length", type=int, default=512 if gpu else 64)
    parser.add_argument("--batch", type=int, default=16 if gpu else 4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--json", type=Path, help="where to write the losses")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw these losses and stop")
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "train-gpt.svg")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> bool:
    args = options(words)
    if args.draw:
        draw(args.draw, args.picture)
        return True
    results: dict[str, dict[str, Any]] = {}
    bars = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*bars) as progress:
        for dim in args.dims:
            runs = {}
            for name, attention in ATTENTIONS.items():
                task = progress.add_task(f"head dim {dim}, {name}", total=args.steps)
                runs[name] = train(dim, attention, args, partial(progress.advance, task))
            results[str(dim)] = {"runs": runs, **verdict(runs)}
    Console().print(table(results))
    if args.json:
        settings = {
            name: getattr(args, name) for name in ("steps", "width", "layers", "length", "batch", "rate", "seed")
        }
        args.json.write_text(json.dumps({"settings": settings, "results": results}) + "\n")
    return all(found["agree"] for found in results.values())


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
