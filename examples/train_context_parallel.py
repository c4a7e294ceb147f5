"""A small GPT trained on sequences that are sharded over processes, and the losses of one process beside it.

    torchrun --standalone --nproc-per-node 4 examples/train_context_parallel.py      # on a CPU, or on 4 GPUs
    python examples/train_context_parallel.py                                        # the same, processes spawned
    ... --documents 100 7 43 50 --strategy ring                                      # packed documents

Four lines make it context parallel: the plan, the shard of tokens and positions, the labels, which are shifted before
they are dealt, and the sum of gradients over ranks, which DDP or FSDP would do.
"""

from __future__ import annotations

import argparse
import os
import socket
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from tilewise.distributed import Plan, attention, plan, use

VOCABULARY, WIDTH, HEADS = 64, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)  # (B, S of this rank, H, D)
        x = x + self.out(attention(q, k, v).flatten(2))  # over the plan in use
        return x + self.down(gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(text) + self.places(positions))))
        return logits


def batch_of_text(step: int, length: int, device: torch.device) -> Tensor:
    """Words of a chain in which three may follow each: the same on every rank."""
    chain = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    words = [torch.zeros((), dtype=torch.int64)]
    for choice in torch.randint(3, (length - 1,), generator=generator):
        words.append(chain[words[-1], choice])
    return torch.stack(words)[None].to(device)


def train(made: Plan, args: argparse.Namespace, device: torch.device) -> list[float]:
    torch.manual_seed(0)
    model = GPT(args.layers, made.tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = made.positions(device=device)[None]
    labelled = made.tokens - sum(n > 0 for n in made.lengths)  # the last token of a document has no next
    losses = []
    for step in range(args.steps):
        text = batch_of_text(step, made.tokens, device)
        with use(made):
            logits = model(made.shard(text), positions)
        loss = cross_entropy(logits.flatten(0, 1), made.labels(text).flatten(), reduction="sum") / labelled
        optimizer.zero_grad()
        loss.backward()
        if made.ranks > 1:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
            dist.all_reduce(loss.detach_())
        optimizer.step()
        losses.append(loss.item())
    return losses


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=203, help="tokens; need not divide by the ranks")
    parser.add_argument("--documents", type=int, nargs="+", help="instead: lengths of packed documents")
    parser.add_argument("--window", type=int, help="keys that each token sees before it")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="processes to spawn, where torchrun has not")
    return parser.parse_args(words)


def run(args: argparse.Namespace) -> float:
    """The largest difference of the losses from those of one process."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ends = [0, *accumulate(args.documents or ())]
    given = {"cu_seqlens": ends} if args.documents else {"seqlen": args.length}
    words = {**given, "window": (args.window, 0)} if args.window else {**given, "causal": True}
    made = plan(**words, strategy=args.strategy)
    ours, alone = train(made, args, device), train(plan(1, **words), args, device)
    difference = max(abs(a - b) for a, b in zip(ours, alone, strict=True))
    if rank == 0:
        print(made.explain())
        for step in range(0, args.steps, max(1, args.steps // 10)):
            print(f"step {step:3d}   sharded {ours[step]:.6f}   one process {alone[step]:.6f}")
        print(f"largest difference {difference:.1e}")
    dist.destroy_process_group()
    return difference


def spawned(rank: int, port: int, words: list[str] | None) -> None:
    args = options(words)
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": args.ranks}
    os.environ |= {name: str(value) for name, value in settings.items()}
    difference = run(args)
    if difference > 1e-3:
        raise SystemExit(f"the losses differ by {difference:.1e}")


def main(words: list[str] | None = None) -> None:
    args = options(words)
    if "RANK" in os.environ:
        run(args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (port, words), nprocs=args.ranks)


if __name__ == "__main__":
    main()
