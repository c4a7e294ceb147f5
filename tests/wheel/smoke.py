"""What a user of the wheel does first, run in an environment with torch and tilewise alone."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import tilewise


@tilewise.score_mod
def relative(score, b, h, q_idx, kv_idx, slopes):
    return score + slopes[h] * (kv_idx - q_idx)


def main() -> None:
    assert "site-packages" in Path(tilewise.__file__).parts, tilewise.__file__
    assert not [name for name in sys.modules if name.startswith("tilewise_lab")]
    present = [name for name in ("rich", "markdown_it", "pygments", "matplotlib", "numpy", "pytest") if find_spec(name)]
    assert not present, f"not an empty environment: {present}"

    q, k, v = (torch.randn(2, 33, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    out, lse = tilewise.attention(q, k, v, causal=True, score_mod=relative(slopes), return_lse=True)
    (out.square().sum() + lse.sum()).backward()
    i = torch.arange(33, dtype=torch.float64)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4 + slopes[:, None, None] * (i - i[:, None])
    s = s.masked_fill(i > i[:, None], -torch.inf)
    expected = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)
    torch.testing.assert_close(out, expected)
    loss = expected.square().sum() + s.logsumexp(-1).sum()
    for x, g in zip((q, k, v, slopes), torch.autograd.grad(loss, (q, k, v, slopes)), strict=True):
        torch.testing.assert_close(x.grad, g)

    cu = torch.tensor([0, 13, 33], dtype=torch.int32)
    packed = tilewise.attention_varlen(q[0], k[0], v[0], cu, cu)
    torch.testing.assert_close(packed[13:], tilewise.attention(q[:1, 13:], k[:1, 13:], v[:1, 13:])[0])

    told = tilewise.explain((1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4, 64), device="H200", show=False)
    assert "H200" in str(told)
    print("smoke: fine")


main()
