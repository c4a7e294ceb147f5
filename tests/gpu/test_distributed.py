"""All ranks of a plan on one GPU, one after the other: every strategy and feature on the kernels, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.tilewise.backends.test_origin import to_device
from tests.tilewise.distributed.cases import CASES, along_queries, faults, make, planned, run
from tilewise.backends.registry import choose
from tilewise.distributed import rehearse
from tilewise.distributed.layout import LAYOUTS
from tilewise.request import Request, Spec

WAYS = [(s, layout) for s in ("ring", "allgather", "halo", "ulysses", "two-level") for layout in LAYOUTS]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_ranks(name, dtype):
    case = CASES[name]
    inputs = to_device(make(case, 611, dtype))
    for strategy, layout in WAYS if dtype == torch.float32 else WAYS[::3]:
        if along_queries(case) and strategy in ("ulysses", "two-level"):
            continue
        made = planned(case, 4, 611, strategy=strategy, layout=layout, node=2)
        ours = run(case, inputs, lambda q, k, v, made=made, **o: rehearse(q, k, v, plan=made, **o))
        assert not (found := faults(ours, case, inputs)), (made, found)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_parts_are_float32_on_the_kernels_of_this_gpu(d, dv):
    """More ranks, the same error: nothing is rounded in between."""
    torch.manual_seed(0)
    shapes = ((8, d), (2, d), (2, dv), (8, dv))
    q, k, v, dout = (torch.randn(1, 2048, *x, device="cuda", dtype=torch.bfloat16) for x in shapes)
    part = Request(q, k, v, Spec(d**-0.5, None, 0, partial=True))
    if torch.cuda.get_device_capability() == (9, 0):
        assert choose(part).backend.name == "hopper"

    def results(ranks: int) -> list[torch.Tensor]:
        from tilewise.distributed import plan

        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = rehearse(*leaves, plan=plan(ranks, seqlen=2048, causal=True, strategy="ring"))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    import tilewise

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*leaves, causal=True)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]
    one, many = (
        [float((x.double() - y).square().mean().sqrt()) for x, y in zip(results(n), exact, strict=True)]
        for n in (1, 16)
    )
    assert all(b <= 1.1 * a for a, b in zip(one, many, strict=True)), (one, many)
