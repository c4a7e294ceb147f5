"""The forward from inside: the state its loop starts from, the tiles it visits, what its end makes of them."""

from __future__ import annotations

import math
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.conftest import DEVICE, INTERPRETED
from tests.tilewise.backends.probes import stream_probe
from tilewise.backends.common.device.structs import KernelConfig
from tilewise.backends.common.kernel_call import view
from tilewise.backends.triton import launches as launch
from tilewise.merging import union
from tilewise.request import Gpu, Request, Spec
from tilewise_lab.derivation import attention as rung

BLOCK = 16
LN2 = math.log(2)


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make).to(DEVICE, dtype) for shape in shapes]


def streamed(q: Tensor, k: Tensor, v: Tensor, parts: int | None = None) -> tuple[list[Tensor], list[int]]:
    """acc, m, l of one tile of queries after its last key, m in natural units, for each part of the keys; and how many
    bits each of them has."""
    (n_q, d), (n_k, dv) = q.shape, v.shape
    assert n_q <= BLOCK
    plan = KernelConfig(1, d, dv, BLOCK, BLOCK, BLOCK, BLOCK, FOLD=True, PRECISION="ieee", CHUNK=32)
    acc = torch.empty(parts or 1, BLOCK, BLOCK, device=DEVICE)
    m, l = torch.empty(2, parts or 1, BLOCK, device=DEVICE)
    bits = torch.empty(3, dtype=torch.int32, device=DEVICE)
    views = [view(x[None, :, None]) for x in (q, k, v)]
    stream_probe[(parts or 1,)](*views, acc, m, l, bits, n_q, n_k, None, None, d**-0.5, parts, CONFIG=plan)
    return [acc[:, :n_q, :dv], m[:, :n_q] * LN2, l[:, :n_q]], bits.tolist()


def test_the_loop_starts_from_nothing_in_float32() -> None:
    """m = -inf, l = 0, acc = 0, each in float32 though q, k and v are not; l = 1 would be a key that is not there."""
    (acc, m, l), bits = streamed(*randoms((4, 8), (0, 8), (0, 8), dtype=torch.float16))
    assert (m == -torch.inf).all()
    assert torch.equal(l, torch.zeros_like(l))
    assert torch.equal(acc, torch.zeros_like(acc))
    assert bits == [32, 32, 32]


@pytest.mark.parametrize("parts", [None, 2, 3])
def test_the_loop_runs_over_its_share_of_the_keys(parts: int | None) -> None:
    """range(lo, hi, BLOCK_N): the parts are whole blocks, and each leaves the state of its own keys."""
    q, k, v = randoms((5, 8), (72, 8), (72, 8))
    (acc, m, l), _ = streamed(q, k, v, parts)
    each = -(-math.ceil(72 / (parts or 1)) // BLOCK) * BLOCK
    for part, (k_part, v_part) in enumerate(zip(k.split(each), v.split(each), strict=True)):
        (expected,) = rung.states(q, k_part, v_part, 72)
        assert_close((m[part], l[part], acc[part]), tuple(expected), rtol=1e-5, atol=1e-5)
    state = [(acc[n] / l[n][:, None], m[n] + l[n].log()) for n in range(len(acc))]
    whole = state[0]
    for other in state[1:]:
        whole = union(whole, other)
    assert_close(whole, rung.fa2(q, k, v, 5, 16), rtol=1e-5, atol=1e-5)


def test_sums_are_in_float32(backend: str) -> None:
    """2048 sixteen times, 1/4 sixteen times, -2048 sixteen times: in float16 the quarters would be lost."""
    q, k = torch.zeros(1, 3, 1, 16, dtype=torch.float16, device=DEVICE), torch.zeros(1, 48, 1, 16, device=DEVICE).half()
    v = torch.tensor([2048.0, 0.25, -2048.0], device=DEVICE).half().repeat_interleave(16)[None, :, None, None]
    out, lse = tilewise.attention(q, k, v, return_lse=True, backend=backend)
    in_half = torch.zeros((), dtype=torch.float16)
    for x in v.flatten().cpu():
        in_half = in_half + x
    assert in_half == 0
    assert_close(out, torch.full_like(out, 4 / 48))
    assert lse.dtype == torch.float32
    assert_close(lse, torch.full_like(lse, math.log(48)))


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a packed qkv": lambda x: torch.stack([x, x, x], 2)[:, :, 1],
    "columns first": lambda x: x.mT.contiguous().mT,
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_read_transposed_at_any_strides(layout: str) -> None:
    q, k, v = randoms((1, 9, 2, 8), (1, 20, 2, 8), (1, 20, 2, 8))
    expected = tilewise.attention(q, k, v, backend="reference")
    assert_close(tilewise.attention(q, LAYOUTS[layout](k), v, backend="triton"), expected)


def test_any_lengths_strides_groups_and_dtype() -> None:
    """No multiple of a tile, Sq ≠ Sk, two query heads for a key head, each tensor with strides of its own, bfloat16."""
    q, k, v = randoms((2, 17, 4, 8), (2, 23, 2, 8), (2, 23, 2, 8), dtype=torch.bfloat16)
    expected = tilewise.attention(*(x.float() for x in (q, k, v)), causal=True, backend="reference")
    q, k, v = (LAYOUTS[name](x) for name, x in zip(LAYOUTS, (q, k, v), strict=False))
    out = tilewise.attention(q, k, v, causal=True, backend="triton")
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("d", [5, 40, 100])
def test_a_score_is_a_product_over_the_whole_head_dim(d: int) -> None:
    """Tiles cut the sequence, never the head dim: 40 and 100 are read in pieces, and their products are one sum."""
    q, k, v = randoms((1, 9, 1, d), (1, 20, 1, d), (1, 20, 1, 8))
    found = tilewise.attention(q, k, v, return_lse=True, backend="triton")
    assert_close(found, tilewise.attention(q, k, v, return_lse=True, backend="reference"), rtol=1e-5, atol=1e-5)


def test_the_end_divides_and_keeps_the_logsumexp() -> None:
    """O / l, and m + log l, not the maximum: exp(S - lse) is then the whole softmax again, as the backward needs it."""
    q, k, v = randoms((1, 9, 1, 8), (1, 20, 1, 8), (1, 20, 1, 8))
    out, lse = tilewise.attention(q, k, v, return_lse=True, backend="triton")
    s = rung.scores(q[0, :, 0], k[0, :, 0])
    assert_close(lse[0, 0], s.logsumexp(-1))
    assert (lse[0, 0] - s.amax(-1)).min() > 0.1
    weights = torch.exp(s - lse[0, 0, :, None])
    assert_close(weights.sum(-1), torch.ones(9, device=DEVICE))
    assert_close(out[0, :, 0], weights @ v[0, :, 0])


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts products")
@pytest.mark.parametrize(("causal", "tiles"), [(False, 16), (True, 10)])
def test_causal_visits_a_triangle_of_tiles(causal: bool, tiles: int) -> None:
    """4 x 4 tiles of 16: 4 · 5 / 2 of them hold a pair that sees each other, and two products are taken of each."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    q, k, v = randoms((1, 64, 1, 16), (1, 64, 1, 16), (1, 64, 1, 16))
    counts, dot = Counter(), Builder.create_dot

    def counting(self, *args):
        counts["dots"] += 1
        return dot(self, *args)

    with mock.patch.object(Builder, "create_dot", counting):
        tilewise.attention(q, k, v, causal=causal, backend="triton")
    assert counts["dots"] == 2 * tiles


def test_float32_stays_float32() -> None:
    """Not TF32's ten bits, as tl.dot would have it: three such products make one, unless torch allows a single one."""
    q = torch.empty(1, 16, 1, 16, device="meta")
    request, lse = Request(q, q, q, Spec(0.25)), torch.empty(1, 1, 16, device="meta")

    def precision() -> str:
        return launch.forward_launch(request, q, lse, Gpu("cuda", 90)).options["CONFIG"].PRECISION

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    assert precision() == "tf32x3"
    try:
        matmul.allow_tf32 = True
        assert precision() == "tf32"
        matmul.allow_tf32 = False
        assert precision() == "tf32x3"
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix"):  # torch no longer answers to the old name
            _ = matmul.allow_tf32
        assert precision() == "tf32"
    finally:
        matmul.fp32_precision = before
