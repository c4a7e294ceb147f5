"""FlexAttention's functions and masks, as people write them, beside torch's own."""

from __future__ import annotations

import functools
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import flex_attention as torchs
from torch.testing import assert_close

import tilewise
from tests.covering import cases
from tilewise.adapters.flex import _converted
from tilewise.compat import flex_attention

B, H, S, D = 2, 4, 200, 8


@pytest.fixture(autouse=True)
def quiet() -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noop(score, b, h, q_idx, kv_idx):
    return score


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def causal_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def make_alibi(heads: int) -> Callable[..., Tensor]:
    def alibi(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + scale * (kv_idx - q_idx)

    return alibi


def make_softcap(cap: float) -> Callable[..., Tensor]:
    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap


def make_window(size: int) -> Callable[..., Tensor]:
    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return window


def make_prefix(length: int) -> Callable[..., Tensor]:
    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < length

    return or_masks(prefix, causal)


def make_documents(inner: Callable[..., Tensor], ids: Tensor, offsets: Tensor) -> Callable[..., Tensor]:
    """A mask of positions within documents, in each of them."""

    def documents(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        return same & inner(b, h, q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]])

    return documents


def make_natten(columns: int, radius: int) -> Callable[..., Tensor]:
    def row(x):
        return x // columns

    def natten(b, h, q_idx, kv_idx):
        near = (row(q_idx) - row(kv_idx)).abs() <= radius
        return near & ((q_idx % columns - kv_idx % columns).abs() <= radius)

    return natten


def make_dilated(size: int, step: int) -> Callable[..., Tensor]:
    def dilated(b, h, q_idx, kv_idx):
        diff = torch.abs(q_idx - kv_idx)
        in_window = diff <= size
        return in_window & (diff % step == 0)

    return dilated


# As attention-gym writes them: helpers that return tuples, an `if` over what is closed over, rows of tables, loops.


def make_neighbourhood(columns: int, rows: int, radius: int) -> Callable[..., Tensor]:
    def place(x):
        return x // columns, x % columns

    def neighbourhood(b, h, q_idx, kv_idx):
        q_y, q_x = place(q_idx)
        kv_y, kv_x = place(kv_idx)
        y = q_y.clamp(radius, rows - 1 - radius)
        x = q_x.clamp(radius, (columns - 1) - radius)
        return ((y - kv_y).abs() <= radius) & ((x - kv_x).abs() <= radius)

    return neighbourhood


def make_frames(prompt: int, width: int, first_frame: bool) -> Callable[..., Tensor]:
    def rounded(x):
        return math.floor(x / 8) * 8

    def frames(b, h, q_idx, kv_idx):
        column = kv_idx < prompt
        if first_frame:
            column = column | (kv_idx < prompt + width)
        return column | (q_idx < prompt) | (torch.abs(q_idx - kv_idx) < rounded(2 * width))

    return frames


def make_images(intervals: Tensor, tokens: int) -> Callable[..., Tensor]:
    image = torch.arange(len(intervals)).repeat_interleave(tokens)

    def images(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[..., 0]) & (q_idx < interval[..., 1])

    def in_rows(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    in_rows.dense = images  # type: ignore[attr-defined]  # the same, of whole tensors of indices
    return in_rows


def make_top_k(chosen: Tensor, size: int) -> Callable[..., Tensor]:
    """Tiles of keys that each tile of queries has chosen, (B, tiles, k)."""

    def top_k(b, h, q_idx, kv_idx):
        return (chosen[b, q_idx // size] == (kv_idx // size).unsqueeze(-1)).any(dim=-1)

    return top_k


def make_rotated(queries: Tensor, keys: Tensor, scale: float) -> Callable[..., Tensor]:
    """MLA's: the part of a score that knows positions, of queries (B, H, S, R) and keys (B, 1, S, R)."""

    def rotated(score, b, h, q_idx, kv_idx):
        return score + (scale * torch.dot(queries[b, h, q_idx], keys[b, h // H, kv_idx]))

    return rotated


def make_groups(inner: Callable[..., Tensor], size: int) -> Callable[..., Tensor]:
    def groups(b, h, q_idx, kv_idx):
        return (q_idx // size == kv_idx // size) & inner(b, h, q_idx % size, kv_idx % size)

    groups.__name__ = f"groups_of_{size}"
    return groups


def make_paths(table: Tensor, kinds: Tensor, lengths: Tensor) -> Callable[..., Tensor]:
    """A bias for every step of a path, table (H, steps, kinds), kinds (S, S, steps), lengths (S, S)."""
    tables = [table[:, n] for n in range(table.shape[1])]

    def paths(score, b, h, q_idx, kv_idx):
        length, total = lengths[q_idx, kv_idx], 0.0
        for n, one in enumerate(tables):
            total = total + torch.where(length > n, one[h, kinds[q_idx, kv_idx, n]], 0.0)
        return score + total / torch.clamp(length, min=1)

    return paths


# What is no plain function: tensors and numbers are attributes, or arguments given beforehand.


class Chooser:
    def __call__(self, score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else 0.0


class Biased(torch.nn.Module):
    """A module, whose parameters are not where its other attributes are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = torch.nn.Parameter(torch.randn(H, 4)), torch.ones(3, dtype=torch.complex64)
        self.factor = 0.5

    def row(self, distance):
        return distance.abs().clamp(max=3)

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.factor + self.table[h, self.row(q_idx - kv_idx)]


class Near:
    def __init__(self, reach: int, ids: Tensor) -> None:
        self.reach, self.ids = reach, ids

    def same(self, b, h, q_idx, kv_idx):
        return self.ids[q_idx] == self.ids[kv_idx]

    def __call__(self, b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx).abs() < self.reach) & self.same(b, h, q_idx, kv_idx)


def scaled(factors, score, b, h, q_idx, kv_idx, *, power):
    return score * factors[h] ** power


def spread(x):
    """The bits of x at every other place."""
    for step, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        x = (x | (x << step)) & mask
    return x


def along_a_curve(b, h, q_idx, kv_idx):
    q, k = ((spread(i // 16) << 1) | spread(i % 16) for i in (q_idx, kv_idx))
    return (q >> 5 == k >> 5) ^ (k & 7 == 0)


def gelus(score, b, h, q_idx, kv_idx):
    return torch.log(torch.nn.functional.gelu(score) + 1) + torch.nn.functional.gelu(score, approximate="tanh")


# As torch's own tests of FlexAttention write them.


def trigonometric(score, b, h, q_idx, kv_idx):
    return torch.sin(torch.cos(score)) + torch.tan(b)


def silu(score, b, h, q_idx, kv_idx):
    return torch.nn.functional.silu(score)


def with_new_zeros(score, b, h, q_idx, kv_idx):
    return score + SEEN[b + h.new_zeros(h.shape), kv_idx]


def with_aten(score, b, h, q_idx, kv_idx):
    return score * torch.ops.aten.index(FACTORS, [h])


def from_the_end(score, b, h, q_idx, kv_idx):
    return score * FACTORS[-1] + BIAS[b, -2, q_idx, kv_idx]


def of_dtypes(score, b, h, q_idx, kv_idx):
    score = score + (q_idx - kv_idx).to(score.dtype) / 16 + torch.zeros_like(score)
    return torch.where(q_idx >= kv_idx, score, torch.finfo(score.dtype).min)


FACTORS = torch.rand(H)
IDS = torch.arange(S) // 70
OFFSETS = torch.tensor([0, 70, 140])
SEEN = torch.rand(B, S) < 0.8
BIAS = torch.randn(B, H, S, S)
SCORES: dict[str, Any] = {
    "noop": noop, "relative": relative, "alibi": make_alibi(H), "softcap": make_softcap(5.0), "causal": causal_score,
    "bias": lambda score, b, h, q_idx, kv_idx: score + BIAS[b, h, q_idx, kv_idx],
    "paths": make_paths(torch.randn(H, 3, 5), torch.randint(0, 5, (S, S, 3)), torch.randint(0, 4, (S, S))),
    "gelus": gelus, "a module": Biased(), "a method": Biased().forward,
    "a partial": functools.partial(scaled, torch.rand(H), power=2),
    "trigonometric": trigonometric, "silu": silu, "new zeros": with_new_zeros, "aten's index": with_aten,
    "from the end": from_the_end, "dtypes": of_dtypes,
    "bias, index by index": lambda score, b, h, q_idx, kv_idx: score + BIAS[b][h][q_idx, kv_idx],
}  # fmt: skip
MASKS: dict[str, tuple[Any, Any, bool]] = {  # a mask mod, B of its block mask, and whether all of it is a band
    "noop": (noop_mask, None, True),
    "causal": (causal, None, True),
    "strictly causal": (lambda b, h, q_idx, kv_idx: kv_idx < q_idx, None, True),
    "window": (make_window(50), None, True),
    "window both ways": (lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < 33, None, True),
    "prefix": (make_prefix(64), None, False),
    "documents": (make_documents(causal, IDS, OFFSETS), None, False),
    "causal documents": (and_masks(causal, lambda b, h, q_idx, kv_idx: IDS[q_idx] == IDS[kv_idx]), None, False),
    "natten": (make_natten(20, 3), None, False),
    "dilated": (make_dilated(60, 3), None, False),
    "padding": (lambda b, h, q_idx, kv_idx: SEEN[b, kv_idx], B, False),
    "neighbourhood": (make_neighbourhood(20, 10, 2), None, False),
    "frames": (make_frames(16, 28, False), None, False),
    "frames with the first": (make_frames(16, 28, True), None, False),
    "images": (make_images(torch.tensor([[0, 90], [40, 120], [100, 200], [0, 200]]), 50), None, False),
    "bits": (along_a_curve, None, False),
    "an object": (Near(40, IDS), None, False),
    "a partial": (functools.partial(Near.same, Near(40, IDS)), None, False),
    "a method of an object": (and_masks(causal, Near(40, IDS).same), None, False),
    "top k": (make_top_k(torch.randint(0, 13, (B, 13, 4)), 16), B, False),
    "groups": (make_groups(noop_mask, 32), None, False),
    "groups of prefixes": (make_groups(make_prefix(7), 32), None, False),
    "groups of other prefixes": (make_groups(make_prefix(9), 32), None, False),
}


def seen_by(mask_mod: Any) -> Any:
    return getattr(mask_mod, "dense", mask_mod)


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """FlexAttention in a few lines, which has a gradient on a CPU (torch's own has none): indices broadcast."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if score_mod is None else score_mod(s, b, h, i, j)
    seen = (
        torch.ones_like(s, dtype=torch.bool)
        if block_mask is None
        else seen_by(block_mask.mask_mod)(b, h, i, j).expand_as(s)
    )
    empty = ~seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen, -torch.inf)
    out = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0) @ v
    return (out, s.logsumexp(-1)) if return_lse else out


def results(function: Any, leaves: list[Tensor], **words: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = function(*leaves, return_lse=True, **words)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, weights)]


def qkv(n_q: int = S, n_k: int = S, kv_heads: int = H) -> list[Tensor]:
    return [torch.randn(B, H, n_q, D), *(torch.randn(B, kv_heads, n_k, D) for _ in "kv")]


@cases(
    "name",
    ["relative", "bias", "paths", "a module", "aten's index", "from the end", "dtypes", "bias, index by index"],
    SCORES,
)
def test_scores(name: str) -> None:
    leaves = qkv()
    ours = flex_attention(*leaves, score_mod=SCORES[name])
    if name != "paths" or torch.__version__ >= (2, 11):  # torch 2.10 cannot trace it itself
        assert_close(ours, torchs(*leaves, score_mod=SCORES[name]), rtol=1e-4, atol=1e-5)
    if "index by index" not in name:
        ours, expected = (results(f, leaves, score_mod=SCORES[name]) for f in (flex_attention, naive))
        assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@cases("name", ["noop", "causal", "window both ways", "causal documents", "natten", "padding", "top k"], MASKS)
def test_masks(name: str) -> None:
    mod, batch, is_band = MASKS[name]
    mask = create_block_mask(mod, batch, None, S, S, device="cpu")
    leaves = qkv()
    assert_close(flex_attention(*leaves, block_mask=mask), torchs(*leaves, block_mask=mask), rtol=1e-4, atol=1e-5)
    if name != "noop":
        ours, expected = (results(f, leaves, block_mask=mask) for f in (flex_attention, naive))
        assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (_converted(mask, S, S).mask is None) is is_band


@cases(
    "name, n_q, n_k",
    [("causal", 100, 200), ("strictly causal", 200, 100), ("window", 100, 200), ("documents", 200, 100)],
    [(name, *n) for name in ("causal", "strictly causal", "window", "documents") for n in ((100, 200), (200, 100))],
)
def test_other_lengths(name: str, n_q: int, n_k: int) -> None:
    """FlexAttention counts both from 0: aligned top left."""
    mask = create_block_mask(MASKS[name][0], None, None, n_q, n_k, device="cpu")
    leaves = qkv(n_q, n_k)
    ours, theirs = (f(*leaves, block_mask=mask, return_lse=True) for f in (flex_attention, torchs))
    seen = theirs[1].isfinite()
    assert torch.equal(ours[1].isfinite(), seen)
    assert_close(ours[0][seen], theirs[0][seen], rtol=1e-4, atol=1e-5)


def test_score_and_mask_grouped_heads_and_scale() -> None:
    leaves = qkv(kv_heads=2)
    mask = create_block_mask(MASKS["causal documents"][0], None, None, S, S, device="cpu")
    words = {"score_mod": SCORES["alibi"], "block_mask": mask, "scale": 0.3, "enable_gqa": True}
    assert_close(flex_attention(*leaves, **words), torchs(*leaves, **words), rtol=1e-4, atol=1e-5)
    assert_close(results(flex_attention, leaves, **words), results(naive, leaves, **words), rtol=1e-4, atol=1e-4)


def test_products_of_rows() -> None:
    queries, keys = (torch.randn(B, n, S, 8, requires_grad=True) for n in (H, 1))
    leaves, mod = qkv(), make_rotated(queries, keys, 0.4)
    assert_close(flex_attention(*leaves, score_mod=mod), torchs(*leaves, score_mod=mod), rtol=1e-4, atol=1e-5)
    grads = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in leaves)
        if dtype is torch.float32:
            out = flex_attention(q, k, v, score_mod=mod)
        else:
            s = q @ k.mT * D**-0.5 + 0.4 * queries.double() @ keys.double().mT
            out = torch.softmax(s, -1) @ v
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        grads.append([x.double() for x in torch.autograd.grad(out, (queries, keys), weights)])
    assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_gradients_of_what_is_captured() -> None:
    q, k, v = qkv()
    grads = []
    table, slope = torch.randn(H, 2 * S, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    for function in (flex_attention, naive):

        def closed(score, b, h, q_idx, kv_idx):
            return score * slope + table[h, q_idx - kv_idx + S]

        grads.append(torch.autograd.grad(function(q, k, v, score_mod=closed).sin().sum(), (table, slope)))
    assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_what_objects_hold() -> None:
    """Their parameters get gradients, and a mask is worked out again when a number of its object is another."""
    leaves, mod = qkv(), Biased()
    grads = [torch.autograd.grad(f(*leaves, score_mod=mod).sin().sum(), mod.table)[0] for f in (flex_attention, naive)]
    assert_close(*grads, rtol=1e-3, atol=1e-4)
    near = Near(200, IDS)
    for mod_of_it in (near, and_masks(near.__call__), functools.partial(near)):
        mask = create_block_mask(mod_of_it, None, None, S, S, device="cpu")
        for near.reach in (200, 3):
            assert_close(
                flex_attention(*leaves, block_mask=mask), naive(*leaves, block_mask=mask), rtol=1e-4, atol=1e-5
            )


def test_numbers_are_those_of_the_moment() -> None:
    q, k, v = qkv()
    found = []
    for cap in (1.0, 3.0):
        found.append(flex_attention(q, k, v, score_mod=make_softcap(cap)))
        assert_close(found[-1], torchs(q, k, v, score_mod=make_softcap(cap)), rtol=1e-4, atol=1e-5)
    assert not torch.equal(*found)


def test_what_is_returned() -> None:
    leaves = qkv()
    out, aux = flex_attention(*leaves, return_aux=AuxRequest(lse=True))
    again, lse = flex_attention(*leaves, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(aux.lse, lse)
    assert_close(lse, torchs(*leaves, return_lse=True)[1])


def test_what_cannot_be_done_says_where() -> None:
    q, k, v = qkv()

    def choosing(score, b, h, q_idx, kv_idx):
        for _ in range(3):
            if q_idx > kv_idx:
                score = score * 2
        return score

    def short(score, b, h, q_idx):
        return score

    def sorting(score, b, h, q_idx, kv_idx):
        return score + math.lgamma(q_idx)

    mask = create_block_mask(causal, None, None, S, S, device="cpu")
    for words, call in (
        ("if q_idx > kv_idx:`: found a choice", lambda: flex_attention(q, k, v, score_mod=choosing)),
        ("lgamma", lambda: flex_attention(q, k, v, score_mod=sorting)),
        (r"short\(score, b, h, q_idx\)", lambda: flex_attention(q, k, v, score_mod=short)),
        ("a function, a method", lambda: flex_attention(q, k, v, score_mod=7)),
        ("a function, a method", lambda: flex_attention(q, k, v, score_mod=torch.tanh)),
        ("alone", lambda: flex_attention(q, k, v, score_mod=functools.partial(relative, b=0, h=0))),
        ("'Chooser', .*a choice by a value", lambda: flex_attention(q, k, v, score_mod=Chooser())),
        ("max_scores", lambda: flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))),
        ("enable_gqa", lambda: flex_attention(q, k[:, :2], v[:, :2])),
        ("BlockMask", lambda: flex_attention(q, k, v, block_mask=SEEN)),
        ("lengths of the block mask", lambda: flex_attention(q[:, :, :50], k, v, block_mask=mask)),
        ("alone", lambda: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j, more: s)),
    ):
        with pytest.raises(tilewise.AttentionError, match=words):
            call()


def test_functions_are_not_kept() -> None:
    """A closure of every step, and the tensor in it, are gone with the step; a plain function, when nobody has it."""

    def step(plain: bool) -> list[weakref.ref[Any]]:
        x, bias = torch.randn(1, 1, 4, 8), torch.randn(4)
        space: dict[str, Any] = {}
        exec("def f(score, b, h, q_idx, kv_idx): return score * 2", space)
        mod = space["f"] if plain else lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]
        flex_attention(x, x, x, mod)
        return [weakref.ref(mod), weakref.ref(bias)]

    assert [found() for found in step(False)] == [None, None]
    kept = step(True)
    gc.collect()
    assert kept[0]() is None


def test_a_wrapper_is_not_what_it_wraps() -> None:
    x = torch.randn(1, 1, 4, 8)
    once = flex_attention(x, x, x, relative)

    @functools.wraps(relative)
    def nothing(score, b, h, q_idx, kv_idx):
        return score

    assert_close(flex_attention(x, x, x, nothing), flex_attention(x, x, x))
    assert_close(flex_attention(x, x, x, relative), once)
