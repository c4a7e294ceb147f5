"""The public functions: docstrings, validation, defaults. All is checked here, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .mods.blocks import BlockMask
from .mods.builtin import alibi, alibi_per_batch
from .mods.builtin import softcap as softcap_mod
from .mods.dropout import as_seed
from .mods.program import Mod, bound
from .spec import LIMIT, MAX_HEAD_DIM, NO_TERMS, AttentionError, Spec, Terms, band, signature

Window = tuple[int | None, int | None]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile in O(S) memory.

    >>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 128, 8, 64])

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), with H a multiple of Hk; any strides; D and Dv from 1 to 512.
    Returns out (B, Sq, H, Dv) in q's dtype, and with `return_lse` also the logsumexp of the scores, (B, H, Sq) in
    float32; gradients flow through both.

    causal, window: query i sits at key position i + Sk - Sq; `window=(left, right)` lets it see so many keys to either
        side, None meaning all; `causal` is right = 0. A query that sees no key gets out = 0 and lse = -inf.
    scale: 1/sqrt(D) unless given.
    softcap, score_mod, alibi_slopes, bias: what a score becomes, in this order: cap * tanh(s / cap); the mod (see
        `tilewise.score_mod`); minus slope * distance, slopes (H,) or (B, H); plus a bias that broadcasts to
        (B, H, Sq, Sk). The tensors get gradients where they require them, summed in a fixed order.
    mask_mod: which pairs see each other, besides the band: a `tilewise.mask_mod`, or a `tilewise.block_mask` made of
        one (`block_mask_varlen` for packed sequences), which skips the tiles nobody sees.
    sinks: (H,) scores that join the denominator and have no value; learnable.
    dropout_p, seed: each weight is dropped with this probability, by a hash of the seed (an int or one int64; drawn
        from torch's generator if None), batch row, head and both positions: see `tilewise.dropout_mask`.
    deterministic: the same bits in every run; by default as torch.use_deterministic_algorithms says. Only the backward
        of the "hopper" backend is faster without (docs/hopper-backward.md says by how much).
    backend: "reference" (torch, any device), "triton" (GPU), "hopper", or "auto".
    """
    q, k, v = _autocast(q, k, v)
    options = causal, window, scale, backend, _is_deterministic(deterministic)
    extras = softcap, bias, alibi_slopes, sinks, score_mod, mask_mod, dropout_p or None, seed
    key = _key((q, k, v), options, extras)
    call = _recalled(key)
    if call is None:
        _check_tensors(q, k, v, rank=4, axes="(batch, tokens, heads, dim)")
        if q.shape[0] != k.shape[0]:
            raise AttentionError("batch of k", k.shape[0], f"q's {q.shape[0]}")
        call = _call(key, q, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), options, extras, packed=False)
    out, lse = ops.attend(q, k, v, None, None, *call)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """`attention` over sequences packed one after the other, without padding and without a host sync.

    >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
    >>> cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)  # lengths 3, 0 and 7
    >>> out, lse = attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([10, 4, 32]), torch.Size([4, 10]))

    q (T, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv); cu_seqlens are int32 of length B + 1, from 0 to T. The maximal lengths
    are needed with a bias, whose axes they are; otherwise they are accepted for the sake of other libraries' callers.
    Every position, in mods, biases and dropout, counts within its sequence, and b is the sequence's number. Where a
    buffer is longer than its sequences, the rest are empty rows: out 0, lse -inf, gradients 0.
    """
    q, k, v = _autocast(q, k, v)
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    options = causal, window, scale, backend, _is_deterministic(deterministic)
    extras = softcap, bias, alibi_slopes, sinks, score_mod, mask_mod, dropout_p or None, seed
    key = _key((q, k, v, cu_q, cu_k), options, extras)
    call = _recalled(key)
    if call is None:
        _check_tensors(q, k, v, rank=3, axes="(tokens, heads, dim)")
        _check_offsets(q, k, cu_q, cu_k)
        call = _call(key, q, (cu_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k), options, extras, packed=True)
    out, lse = ops.attend(q, k, v, cu_q, cu_k, *call)
    return (out, lse) if return_lse else out


Options = tuple[bool, Window | None, float | None, str, bool]
Call = tuple[Spec, Terms, ops.Memo | None]
_known: dict[Any, Call] = {}


def _key(tensors: tuple[Tensor, ...], options: Options, extras: tuple[Any, ...]) -> Any:
    """What checks and kernels look at, where calls are remembered: on a GPU, without score terms and untraced."""
    softcap, bias, slopes, sinks, score_mod, mask_mod, dropout_p, seed = extras
    window, scale = options[1:3]
    if (
        not (softcap is bias is slopes is sinks is score_mod is mask_mod is dropout_p is seed is None)
        or not ops.is_remembered(*tensors)
        or not (window is None or type(window) is tuple)
        or not (scale is None or type(scale) is float)
    ):
        return None
    return (*options, *map(type, window or ()), *signature(*tensors))


def _recalled(key: Any) -> Call | None:
    """The call of this key, if it was remembered. torch.compile, whose calls have none, must not see the dict: it would
    compile again whenever an eager call has made it longer.
    """
    return None if key is None else _known.get(key)


def _call(
    key: Any, q: Tensor, sizes: tuple[int, int, int | None, int | None], options: Options, extras: tuple[Any, ...],
    packed: bool,
) -> Call:  # fmt: skip
    """What `ops.attend` is told of a call beside its tensors, from now on also for calls with the same key."""
    causal, window, scale, backend, deterministic = options
    terms, named = terms_of(q, sizes, band(causal, window), packed, *extras)
    spec = Spec.of(
        head_dim=q.shape[-1], causal=causal, window=window, scale=scale, backend=backend, deterministic=deterministic,
        **named,
    )  # fmt: skip
    if key is None:
        return spec, terms, None
    if len(_known) >= LIMIT:
        _known.clear()
    _known[key] = spec, NO_TERMS, ops.Memo()
    return _known[key]


def _is_deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


def terms_of(
    q: Tensor, sizes: tuple[int, int, int | None, int | None], seen: Window, packed: bool, softcap: float | None,
    bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None, score_mod: Mod | None,
    mask_mod: Mod | BlockMask | None, dropout_p: float | None, seed: int | Tensor | None,
) -> tuple[Terms, dict[str, Any]]:  # fmt: skip
    """The tensors of a call beside q, k, v, and the fields of its Spec that name its mods, all checked.

    sizes: B, H, Sq, Sk; seen: its band, keys to the left and to the right of a query.
    """
    batch, heads, _, _ = sizes
    if bias is not None:
        bias = _checked_bias(q, sizes, bias)
    if sinks is not None:
        _check_term("sinks", sinks, q, [(heads,)])
    mods = []
    if softcap is not None:
        if not 0 < softcap < float("inf"):
            raise AttentionError("softcap", softcap, "a finite number above 0, or None")
        mods.append(softcap_mod(float(softcap)))
    if score_mod is not None:
        mods.append(_checked_mod("score", score_mod, q))
    if alibi_slopes is not None:
        _check_term("alibi_slopes", alibi_slopes, q, [(heads,), (batch, heads)])
        mods.append(alibi(alibi_slopes) if alibi_slopes.dim() == 1 else alibi_per_batch(alibi_slopes))
    score = bound(mods)
    blocks: tuple[Tensor, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(mask_mod, BlockMask):
        mask_mod.check(sizes, q, packed, seen)
        blocks, named = mask_mod.lists, {"mask_block": (*mask_mod.block, *mask_mod.shape[:2])}
        mask_mod = mask_mod.mod
    mask = None if mask_mod is None else _checked_mod("mask", mask_mod, q)
    dropout_p = dropout_p or 0.0
    if not 0 <= dropout_p < 1:
        raise AttentionError("dropout_p", dropout_p, "0 <= p < 1")
    if dropout_p == 0 and seed is not None:
        raise AttentionError("seed", "one, with dropout_p=0", "dropout_p above 0, or no seed")
    if score is not None:
        named |= {"score_mod": score.key, "score_numbers": score.numbers}
    if mask is not None:
        named |= {"mask_mod": mask.key, "mask_numbers": mask.numbers}
    terms = Terms(
        bias, sinks, as_seed(seed, q.device) if dropout_p else None,
        () if score is None else score.tensors, () if mask is None else mask.tensors, blocks,
    )  # fmt: skip
    return terms, named | {"dropout_p": float(dropout_p)}


def _check_offsets(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    for name, cu, x in (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k)):
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise AttentionError(f"shape of {name}", tuple(cu.shape), "(B + 1,), starting with 0")
        if cu.dtype != torch.int32:
            raise AttentionError(f"dtype of {name}", cu.dtype, "torch.int32")
        if cu.device != q.device:
            raise AttentionError(f"device of {name}", cu.device, f"q's {q.device}")
        if cu.shape[0] == 1 and x.shape[0] > 0:
            raise AttentionError(f"sequences of {name}", f"none, for {x.shape[0]} tokens", "at least one sequence")
    if cu_q.shape != cu_k.shape:
        raise AttentionError("length of cu_seqlens_k", cu_k.shape[0], f"cu_seqlens_q's {cu_q.shape[0]}")


def _checked_bias(q: Tensor, sizes: Sequence[int | None], bias: Tensor) -> Tensor:
    """The bias as (B, H, Sq, Sk) with axes of size 1 where it broadcasts."""
    names = ("B", "H", "Sq", "Sk")
    if bias.dim() > 4:
        raise AttentionError("shape of bias", tuple(bias.shape), f"at most 4 axes, {names}")
    bias = bias[(None,) * (4 - bias.dim())]
    for name, size, found in zip(names, sizes, bias.shape, strict=True):
        if size is None and found != 1:
            raise AttentionError(f"a bias along {name} of packed sequences", found, "max_seqlen_q and max_seqlen_k too")
        if found not in (1, size):
            raise AttentionError(f"{name} of bias", found, f"{size} or 1")
    _check_term("bias", bias, q, [tuple(bias.shape)])
    return bias


def _check_term(name: str, x: Tensor, q: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tuple(x.shape) not in shapes:
        raise AttentionError(f"shape of {name}", tuple(x.shape), " or ".join(map(str, shapes)))
    if x.dtype not in DTYPES:
        raise AttentionError(f"dtype of {name}", x.dtype, " or ".join(map(str, DTYPES)))
    if x.device != q.device:
        raise AttentionError(f"device of {name}", x.device, f"q's {q.device}")


def _checked_mod(kind: str, mod: Any, q: Tensor) -> Mod:
    if not isinstance(mod, Mod):
        hint = "; call it with its tensors and numbers first" if hasattr(mod, "function") else ""
        raise AttentionError(f"{kind}_mod", repr(mod), f"a function decorated with tilewise.{kind}_mod, called{hint}")
    if mod.kind != kind:
        raise AttentionError(f"{kind}_mod", f"a {mod.kind} mod", f"a function decorated with tilewise.{kind}_mod")
    for x in mod.tensors:
        if x.device != q.device:
            raise AttentionError(f"device of a tensor of the {kind} mod", x.device, f"q's {q.device}")
    return mod


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, rank: int, axes: str) -> None:
    dims, k_dims, v_dims = q.shape, k.shape, v.shape
    if not len(dims) == len(k_dims) == len(v_dims) == rank:
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if x.dim() != rank)
        raise AttentionError(f"shape of {name}", tuple(x.shape), f"{rank} axes {axes}")
    for name, d in (("q", dims[-1]), ("k", k_dims[-1]), ("v", v_dims[-1])):
        if not 1 <= d <= MAX_HEAD_DIM:
            raise AttentionError(f"head dim of {name}", d, f"1 to {MAX_HEAD_DIM}")
    dtype, device = q.dtype, q.device
    if dtype not in DTYPES:
        raise AttentionError("dtype of q", dtype, " or ".join(map(str, DTYPES)))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise AttentionError(f"dtype of {name}", x.dtype, f"q's {dtype}")
        if x.device != device:
            raise AttentionError(f"device of {name}", x.device, f"q's {device}")
    if k_dims[-1] != dims[-1]:
        raise AttentionError("head dim of k", k_dims[-1], f"q's {dims[-1]}")
    if k_dims[:-1] != v_dims[:-1]:
        raise AttentionError("shape of v", tuple(v_dims), f"k's {axes}, {tuple(k_dims)}, up to the head dim")
    heads, kv_heads = dims[-2], k_dims[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise AttentionError("heads of q", heads, f"a multiple of k's {kv_heads} (each KV head serves a group)")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    if q.dtype == k.dtype == v.dtype == dtype:
        return q, k, v
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
