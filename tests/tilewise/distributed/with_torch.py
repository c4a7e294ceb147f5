"""Attention over plans, and attention on DTensors, with what else torch has for several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tilewise
from tests.tilewise.integrations.registry import active
from tilewise.distributed import Plan, attention, plan, use


class Tiny(torch.nn.Module):
    """Two layers of a transformer whose attention finds the plan in use."""

    def __init__(self, remember: bool = True) -> None:
        super().__init__()
        self.remember = remember
        self.embed = torch.nn.Embedding(17, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.head = torch.nn.Linear(16, 17)

    def layer(self, n: int, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.layers[n](x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + attention(q, k, v).flatten(2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for n in range(2):
            x = self.layer(n, x) if self.remember else checkpoint(self.layer, n, x, use_reentrant=False)
        return self.head(x)


def losses(model: torch.nn.Module, made: Plan, steps: int = 3, average: bool = True) -> list[float]:
    """Training on next tokens: the mean over all tokens, whoever holds them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(17, (2, made.tokens), generator=torch.Generator().manual_seed(1))
    total = 2 * (made.tokens - 1)
    ranks = made.ranks
    found = []
    for _ in range(steps):
        with use(made):
            logits = model(made.shard(tokens))
            loss = cross_entropy(logits.flatten(0, 1), made.labels(tokens).flatten(), reduction="sum") / total
            # FSDP and DDP average gradients over ranks; the loss is a sum over them
            (loss * ranks if average else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(value)
        found.append(float(value))
    return found


def model(remember: bool = True) -> Tiny:
    torch.manual_seed(5)
    return Tiny(remember)


def training(rank: int, ranks: int) -> list[str]:
    """FSDP2, DDP, and layers that are computed again in the backward: the losses of one process."""
    expected = losses(model(), plan(1, seqlen=33, causal=True), average=False)
    found = []
    made = plan(seqlen=33, causal=True)
    sharded_model = model()
    for layer in sharded_model.layers:
        fully_shard(layer)
    ways = {
        "fsdp2": fully_shard(sharded_model),
        "ddp": DistributedDataParallel(model()),
        "checkpoint": DistributedDataParallel(model(remember=False)),
    }
    for name, one in ways.items():
        ours = losses(one, made)
        if max(abs(a - b) for a, b in zip(ours, expected, strict=True)) > 1e-5:
            found.append(f"{name}: {ours}, of one process {expected}")
    return found


def compiled(rank: int, ranks: int) -> list[str]:
    """No graph break; a second plan is another number, not another graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    found = []
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda q, made: attention(q, q, q, plan=made, causal=True), backend=counter, fullgraph=True)
    for length in (16, 24, 32):
        made = plan(seqlen=length * ranks, causal=True)
        whole = torch.randn(1, length * ranks, 2, 8, generator=torch.Generator().manual_seed(2))
        q = made.shard(whole).requires_grad_()
        out = call(q, made)
        out.sum().backward()
        again = q.detach().clone().requires_grad_()
        attention(again, again, again, plan=made).sum().backward()
        if not torch.allclose(q.grad, again.grad):
            found.append(f"{length}: gradients differ")
    if counter.frame_count > 2:  # once as it is, once for any length and any plan
        found.append(f"compiled {counter.frame_count} times for 3 plans")
    return found


def dtensors(rank: int, ranks: int) -> list[str]:
    """tilewise.attention on DTensors: batch rows and heads stay where they are, and every gradient is there."""
    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    q, k, v = torch.randn(ranks, 9, 2 * ranks, 8), torch.randn(ranks, 9, ranks, 8), torch.randn(ranks, 9, ranks, 8)
    sinks, slopes = torch.randn(2 * ranks), torch.rand(2 * ranks)
    by_head, by_row = torch.randn(1, 2 * ranks, 9, 9), torch.randn(ranks, 1, 1, 9)
    heads, rows, everything = Shard(2), Shard(0), Replicate()
    found = []
    for placement, options, terms in (
        (heads, {"causal": True}, {}),
        (rows, {"softcap": 2.0}, {}),
        (everything, {}, {"sinks": (sinks, everything)}),
        (heads, {"softcap": 3.0}, {"sinks": (sinks, rows), "bias": (by_head, Shard(1))}),
        (heads, {"causal": True}, {"sinks": (sinks, everything), "bias": (by_row, everything)}),
        (rows, {"causal": True}, {"sinks": (sinks, everything), "bias": (by_row, rows)}),
        (rows, {"window": (3, 0)}, {"bias": (by_head, everything), "alibi_slopes": (slopes, everything)}),
    ):
        whole = [x.clone().requires_grad_() for x in (q, k, v, *(x for x, _ in terms.values()))]
        places = [placement] * 3 + [place for _, place in terms.values()]
        parts = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(whole, places, strict=True)]
        expected, out = (
            tilewise.attention(*x[:3], **options, **dict(zip(terms, x[3:], strict=True))) for x in (whole, parts)
        )
        expected.square().sum().backward()
        out.square().sum().backward()
        if out.placements != (placement,):
            found.append(f"{placement} became {out.placements}")
        pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(parts, whole, strict=True))]
        wrong = [n for n, (x, y) in enumerate(pairs) if not torch.allclose(x.full_tensor(), y, atol=1e-5)]
        if wrong:
            found.append(f"{placement}, {options}, {list(terms)}: results {wrong} are wrong")
    return found


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
    """The op that scaled_dot_product_attention picks on a GPU; for what it picks on a CPU torch has no ring."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


flash.__name__ = "scaled_dot_product_attention"


def torchs_own(rank: int, ranks: int) -> list[str]:
    """torch's context_parallel: its ring, its shards, and tilewise as the flash attention behind it."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(4)
    whole = [torch.randn(2, n, 8 * ranks, 16) for n in (4, 2, 2)]
    found, old = [], functional.scaled_dot_product_attention
    try:
        with active():
            for method in ("allgather", "alltoall"):
                set_rotate_method(method)
                exact = [x.double().requires_grad_() for x in whole]
                expected = old(*exact, is_causal=True, enable_gqa=True)
                expected.square().sum().backward()
                buffers = [x.clone() for x in whole]
                functional.scaled_dot_product_attention = flash
                with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                    parts = [x.clone().requires_grad_() for x in buffers]
                    out = functional.scaled_dot_product_attention(*parts, is_causal=True)
                    out.square().sum().backward()
                    ours = context_parallel_unshard(mesh, [out, *(x.grad for x in parts)], [2] * 4)
                functional.scaled_dot_product_attention = old
                for n, (x, y) in enumerate(zip(ours, (expected, *(x.grad for x in exact)), strict=True)):
                    if not torch.allclose(x.double(), y, atol=2e-5):
                        found.append(f"{method}: result {n} is {(x - y).abs().max():.1e} away")
    finally:
        functional.scaled_dot_product_attention = old
    return found
