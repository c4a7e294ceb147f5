"""return_max_logit: the largest score of each head, against a float64 loop over heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import AttentionError, mods


@tilewise.score_mod
def falling(score, b, h, q_idx, kv_idx, slopes):
    return score - slopes[h] * q_idx


def largest(q: Tensor, k: Tensor, seen: Any, change: Any = lambda s, h: s, scale: float | None = None) -> Tensor:
    """(B, H) in float64: head by head, over the pairs that seen(b) shows."""
    batch, _, heads, d = q.shape
    found = torch.full((batch, heads), -math.inf, dtype=torch.float64)
    scale = d**-0.5 if scale is None else scale
    for b in range(batch):
        for h in range(heads):
            s = change(scale * (q[b, :, h].double() @ k[b, :, h * k.shape[2] // heads].double().T), h)
            pairs = s[seen(b).expand(s.shape)]
            found[b, h] = pairs.max() if pairs.numel() else -math.inf
    return found


def everything(n_q: int, n_k: int) -> Any:
    return lambda b: torch.ones(n_q, n_k, dtype=torch.bool)


def causal(n_q: int, n_k: int) -> Any:
    return lambda b: torch.arange(n_k) <= torch.arange(n_q)[:, None] + n_k - n_q


def check(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), expected, rtol=4e-6, atol=4e-6)


def inputs(n_q: int = 19, n_k: int = 26, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(n_q + n_k)
    shapes = (2, n_q, heads, 16), (2, n_k, kv_heads, 16), (2, n_k, kv_heads, 16)
    return [torch.randn(shape).to(dtype) for shape in shapes]


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "negative scale": ({"scale": -0.8}, None),
    "scale 0": ({"scale": 0.0}, None),
    "softcap": ({"softcap": 0.5}, lambda s, h: 0.5 * torch.tanh(s / 0.5)),
    "sinks do not count": ({"sinks": torch.full((4,), 60.0)}, None),
    "bias": ({"bias": torch.full((1, 1, 1, 1), -3.0)}, lambda s, h: s - 3.0),
    "large bias": ({"bias": torch.full((1, 1, 1, 1), -1e9)}, lambda s, h: s.float().add(-1e9).double()),
    "mod": (
        {"score_mod": falling(torch.tensor([0.1, 0.2, 0.0, -0.3]))},
        lambda s, h: s - (0.1, 0.2, 0.0, -0.3)[h] * torch.arange(s.shape[0])[:, None],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("banded", [False, True], ids=["all keys", "causal"])
def test_terms(name: str, banded: bool, backend: str) -> None:
    options, change = CASES[name]
    q, k, v = inputs()
    out, lse, found = tilewise.attention(
        q, k, v, causal=banded, return_lse=True, return_max_logit=True, backend=backend, **options
    )
    seen = causal(19, 26) if banded else everything(19, 26)
    check(found, largest(q, k, seen, *([] if change is None else [change]), scale=options.get("scale")))
    plain = tilewise.attention(q, k, v, causal=banded, return_lse=True, backend=backend, **options)
    torch.testing.assert_close((out, lse), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes(dtype: torch.dtype, backend: str) -> None:
    q, k, v = inputs(dtype=dtype)
    out, found = tilewise.attention(q, k, v, softcap=2.0, return_max_logit=True, backend=backend)
    assert out.dtype == dtype
    check(found, largest(q, k, everything(19, 26), lambda s, h: 2.0 * torch.tanh(s / 2.0)))


def test_one_query_of_every_head(backend: str) -> None:
    """Heads of a group that share a tile, and keys that are divided among programs."""
    q, k, v = inputs(n_q=1, n_k=300, heads=6)
    _, found = tilewise.attention(q, k, v, return_max_logit=True, backend=backend)
    check(found, largest(q, k, everything(1, 300)))


def test_masks(backend: str) -> None:
    q, k, v = inputs(48, 48)
    ids = torch.arange(48) // 20
    mod = mods.document(ids=ids)
    block = tilewise.block_mask(mod, 48, 48, block=(16, 16) if backend == "reference" else (128, 128))
    for mask in (mod, block):
        _, found = tilewise.attention(q, k, v, mask_mod=mask, return_max_logit=True, backend=backend)
        check(found, largest(q, k, lambda b: ids[:, None] == ids))


def test_packed(backend: str) -> None:
    """Over all sequences; what is past a sequence's end, or past the last one, does not count."""
    torch.manual_seed(3)
    cu_q, cu_k = torch.tensor([0, 9, 9, 30], dtype=torch.int32), torch.tensor([0, 20, 25, 41], dtype=torch.int32)
    q, k = torch.randn(36, 4, 16), torch.randn(44, 2, 16)
    q[30:], k[41:] = 1e4, 1e4
    _, found = tilewise.attention_varlen(q, k, k, cu_q, cu_k, causal=True, return_max_logit=True, backend=backend)
    each = [
        largest(q[None, a:b], k[None, c:d], causal(b - a, d - c))[0] for a, b, c, d in ((0, 9, 0, 20), (9, 30, 25, 41))
    ]
    assert found.shape == (4,)
    check(found, torch.stack(each).amax(0))


def test_hidden_keys_and_nans_do_not_count(backend: str) -> None:
    q, k, v = inputs(16, 16)
    k[:, 9:] = torch.nan
    k[:, 0, 0] = torch.nan  # a visible NaN
    _, found = tilewise.attention(
        q, k, v, mask_mod=mods.block_diagonal(9), window=(None, 0), return_max_logit=True, backend=backend
    )
    own = causal(16, 16)(0) & (torch.arange(16)[:, None] < 9) & (torch.arange(16) < 9)
    expected = largest(q, k.nan_to_num(0.0), lambda b: own)
    expected[:, :2] = largest(q, k.nan_to_num(0.0), lambda b: own & (torch.arange(16) > 0))[:, :2]
    check(found, expected)


@tilewise.mask_mod
def nothing(b, h, q_idx, kv_idx):
    return kv_idx < 0


def test_nothing_is_visible(backend: str) -> None:
    q, k, v = inputs(20, 8)
    calls = (q, k, v, {"mask_mod": nothing()}), (q, k[:, :0], v[:, :0], {}), (q[:, :0], k, v, {})
    for q_some, k_some, v_some, options in calls:
        _, found = tilewise.attention(q_some, k_some, v_some, return_max_logit=True, backend=backend, **options)
        assert torch.equal(found, torch.full((2, 4), -math.inf))


def test_gradients_are_those_of_the_call_without_it(backend: str) -> None:
    x = [t.requires_grad_() for t in inputs()]
    both = [
        tilewise.attention(*x, causal=True, return_lse=True, return_max_logit=top, backend=backend)
        for top in (False, True)
    ]
    assert not both[1][2].requires_grad
    grads = [torch.autograd.grad(out.sin().sum() + lse.cos().sum(), x) for out, lse, *_ in both]
    torch.testing.assert_close(*grads)
    out, _ = tilewise.attention(*x, causal=True, return_max_logit=True, backend=backend)
    torch.testing.assert_close(out, both[0][0])
    assert out.requires_grad


def test_layouts_nested_and_compiled() -> None:
    q, k, v = inputs()
    expected = largest(q, k, causal(19, 26))
    _, found = tilewise.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", causal=True, return_max_logit=True
    )
    check(found, expected)
    compiled = torch.compile(tilewise.attention, backend="aot_eager", fullgraph=True)
    x = [t.requires_grad_() for t in inputs()]
    out, lse, found = compiled(*x, causal=True, return_lse=True, return_max_logit=True)
    check(found, expected)
    eager = tilewise.attention(*x, causal=True, return_lse=True)
    grads = [torch.autograd.grad(a.sum() + b.sum(), x) for a, b in ((out, lse), eager)]
    torch.testing.assert_close(*grads)
    offsets = torch.tensor([0, 45, 65])
    nested = [torch.nested.nested_tensor_from_jagged(torch.cat([y[0], y[1, :20]]), offsets) for y in inputs(45, 45)]
    _, found = tilewise.attention(*nested, return_max_logit=True)
    q, k, _ = inputs(45, 45)
    parts = largest(q[:1], k[:1], everything(45, 45))[0], largest(q[1:, :20], k[1:, :20], everything(20, 20))[0]
    check(found, torch.maximum(*parts))


def test_transforms(backend: str) -> None:
    q, k, v = inputs()

    def call(q: Tensor) -> Any:
        return tilewise.attention(q, k, v, return_max_logit=True, backend=backend)

    expected = largest(q, k, everything(19, 26))
    (out, found), (tangent, zero) = torch.func.jvp(call, (q,), (torch.ones_like(q),))
    check(found, expected)
    assert tangent.shape == out.shape
    assert not zero.any()
    _, found = torch.vmap(call)(torch.stack([q, -q]))
    check(found[0], expected)
    check(found[1], largest(-q, k, everything(19, 26)))
    grad = torch.func.grad(lambda q: call(q)[0].sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(call(leaf)[0].sum(), leaf)[0])


def test_entropy_by_head(backend: str) -> None:
    """The recipe of docs/how-to/statistics.md: entropy = lse - sum(p s) = lse - t d lse / d t, t the scale's factor."""
    q, k, v = inputs()
    temperature = torch.ones((), requires_grad=True)
    _, lse = tilewise.attention(q * temperature, k, v, causal=True, return_lse=True, backend=backend)
    expected = []
    for h in range(4):
        s = 0.25 * torch.einsum("bid,bjd->bij", q[:, :, h].double(), k[:, :, h // 2].double())
        p = s.masked_fill(~causal(19, 26)(0), -math.inf).softmax(-1)
        expected.append(torch.special.entr(p).sum(-1).mean())
    found = []
    for h in range(4):
        (slope,) = torch.autograd.grad(lse[:, h].sum(), temperature, retain_graph=True)
        found.append((lse[:, h].sum() - slope) / lse[:, h].numel())
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_errors() -> None:
    q, k, v = inputs()
    with pytest.raises(AttentionError, match="return_max_logit: found 1; expected True or False"):
        tilewise.attention(q, k, v, return_max_logit=1)
