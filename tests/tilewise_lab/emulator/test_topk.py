"""The Hopper kernel of named keys in the emulator, against brute force in float64."""

from __future__ import annotations

import pytest
import torch

from tilewise import sparse
from tilewise_lab.emulator import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")


@pytest.mark.parametrize(
    ("batch", "n_q", "n_k", "heads", "kv_heads", "count"),
    [(1, 2, 300, 64, 1, 130), (2, 1, 70, 80, 2, 64), (1, 1, 40, 128, 1, 37), (1, 3, 500, 100, 1, 256)],
)
def test_topk(batch: int, n_q: int, n_k: int, heads: int, kv_heads: int, count: int) -> None:
    from tilewise.backends.hopper import topk as kernels

    torch.manual_seed(count)
    q, k = (torch.randn(batch, n, h, 576).half() for n, h in ((n_q, heads), (n_k + 1, kv_heads)))
    k[:, n_k] = torch.nan  # a row past the end
    indices = torch.stack([torch.randperm(max(n_k, count)) for _ in range(batch * n_q * kv_heads)])[:, :count]
    indices = torch.where(indices < n_k, indices, n_k).int().view(batch, n_q, kv_heads, count)
    indices[:, 0, :, 3] = -1
    indices[:, -1, :, 5:] = -1 if count == 64 else indices[:, -1, :, 5:]
    out, lse = torch.empty(batch, n_q, heads, 512).half(), torch.empty(batch, heads, n_q)
    made = kernels.topk_launch(q, k[:, :n_k], indices, (out, lse), 0.04)
    named = torch.where(indices < n_k, indices, -1)
    expected = sparse.topk(q.double(), k[:, :n_k].double(), 512, named, scale=0.04, return_lse=True)
    for seed in range(2):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        launch(made.kernel, made.programs, made.args, made.options, seed=seed)
        torch.testing.assert_close(out.double(), expected[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-4)
