"""The registered ops: fakes have the strides of results, and inductor and AOT autograd compile them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import cases
from tilewise import AttentionError, sparse
from tilewise.sparse.block_attention import sorted_choices

OPS: Any = torch.ops.tilewise_sparse
ON_GPU = {"block_parts", "block_parts_backward", "scattered_backward", "add_sums"}  # kernels alone


def strided(*shape: int) -> Tensor:
    """A view whose axes before the last lie in reverse order."""
    lead = range(len(shape) - 1)
    return torch.randn(*shape[-2::-1], shape[-1]).permute(*reversed(lead), len(lead))


def arguments() -> dict[str, list[tuple[Any, ...]]]:
    torch.manual_seed(0)
    q, k, v = strided(2, 8, 4, 16), strided(2, 8, 2, 16), strided(2, 8, 2, 12)
    columns = k[..., :12]
    indices = torch.rand(2, 2, 8, 8).argsort(-1)[..., :3].transpose(1, 2)
    topk = q, k, v, indices, 0.3, "reference"
    latent = q, k, columns, indices, 0.3, "reference"
    out, lse = (torch.empty_like(x).copy_(x) for x in OPS.topk(*topk))
    dout, dlse = strided(*out.shape), strided(*lse.shape)
    outs, gates = [strided(2, 8, 4, 12) for _ in range(3)], [strided(2, 8, 4) for _ in range(3)]
    chosen = torch.tensor([[[-1], [-1]]] * 4 + [[[0], [-1]]] * 4, dtype=torch.int32)
    lists = sorted_choices(chosen, 2, torch.tensor([0, 4, 8], dtype=torch.int32), None)
    count = len(lists.lines)
    base, parts = strided(len(lists.positions), 2, 16), strided(count, 2, 16)
    base_lse, part_lse = strided(len(lists.positions), 2), strided(2, count)
    number = torch.arange(8) // 2
    keys = strided(2, 4, 2, 16)
    return {
        "topk": [topk, latent],
        "topk_backward": [
            (out, lse, dout, None, False, False, *topk),
            (out, lse, dout, dlse, True, False, *topk),
            (out, lse, dout, dlse, False, True, *latent),
        ],
        "checked_indices": [(indices, 8)],
        "gated_sum": [(outs, gates)],
        "gated_sum_backward": [(dout, outs, gates)],
        "block_weights": [(q, keys, strided(2, 4, 8), 2, 0.3), (q[:, :, :2], keys[:, :, :1], strided(2, 2, 8), 2, 0.3)],
        "best_blocks": [(strided(8, 2, 4), number * 0, number, 2)],
        "blocks_by_mean_key": [(q, k, 2, 2)],
        "block_tokens": [(torch.zeros(2, 2, 8, 1, dtype=torch.int64).transpose(1, 2), 2)],
        "combine": [
            (base, base_lse, parts, part_lse, lists.positions, torch.float16),
            (None, None, parts, None, lists.positions, torch.float32),
        ],
        "gather": [(base, lists.lines)],
        "row_dots": [(q, q), (q[:, 0], q[:, 1])],
    }


@pytest.mark.parametrize("name", arguments())
def test_opcheck(name: str) -> None:
    for given in arguments()[name]:
        torch.library.opcheck(getattr(OPS, name).default, given)


def test_every_op_is_checked() -> None:
    names = {x.partition("::")[2] for x in torch._C._dispatch_get_all_op_names() if x.startswith("tilewise_sparse::")}
    assert names == {*arguments(), *ON_GPU}


def functions() -> dict[str, Callable[..., Tensor]]:
    torch.manual_seed(1)
    gates: Any = tuple(torch.rand(2, 12, 4) for _ in range(3))
    indices = torch.rand(2, 12, 2, 12).argsort(-1)[..., :3]
    return {
        "moba": lambda *x: sparse.moba(*x, block_size=4, top_k=2),
        "nsa": lambda *x: sparse.nsa(*x, gates, block_size=4, num_blocks=2, window=3),
        "topk": lambda *x: sparse.topk(*x, indices),  # type: ignore[return-value]
        "neighborhood": lambda *x: sparse.neighborhood(*x, kernel_size=3),
    }


@pytest.mark.slow
@cases("name", ["nsa", "neighborhood"], functions())
def test_inductor_of_views(name: str) -> None:
    f = functions()[name]
    x = [torch.randn(2, h, 12, 8).transpose(1, 2).requires_grad_() for h in (4, 2, 2)]
    weights = torch.randn(2, 4, 12, 8)

    def loss(*x: Tensor) -> Tensor:
        return (f(x[0] * 1.0, *x[1:]).transpose(1, 2) * weights).sum()

    expected = torch.autograd.grad(loss(*x), x)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*x), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_check_contents(backend: str) -> None:
    x = torch.randn(1, 8, 2, 8)
    gates: Any = (torch.ones(1, 8, 2),) * 3

    def nsa(blocks: Tensor) -> Tensor:
        return sparse.nsa(x, x, x, gates, block_size=4, num_blocks=2, window=3, blocks=blocks)

    def topk(indices: Tensor) -> Any:
        return sparse.topk(x, x, x, indices)

    for f, wrong in (
        (topk, torch.full((1, 8, 2, 1), 8)),
        (topk, torch.full((1, 8, 2, 1), -2)),
        (topk, torch.full((1, 8, 2, 2), 3)),
        (nsa, torch.full((1, 8, 2, 1), 1)),
        (nsa, torch.zeros(1, 8, 2, 2, dtype=torch.int64)),
    ):
        with pytest.raises(AttentionError) as eager:
            f(wrong)
        with pytest.raises(AttentionError) as compiled:
            torch.compile(f, backend=backend, fullgraph=True)(wrong)
        assert str(compiled.value) == str(eager.value)
