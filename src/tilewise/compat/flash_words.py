"""flash-attn's words, of 2.8 and of 3, in tilewise's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache.api import attention_kv
from ..cache.plans import Plans
from ..checks import tensor
from ..kv_spec import Rotary
from ..mods.dropout import is_whole
from ..spec import AttentionError

Window = tuple[int, int]
BOTH_WAYS: Window = (-1, -1)


def options_of(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """flash-attn's words in tilewise's: -1 is no bound, a softcap of 0 none."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(side is None or is_whole(side) for side in window_size):
        raise AttentionError("window_size", repr(window_size), "(left, right), two ints, -1 for no bound")
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return {
        "scale": softmax_scale, "causal": causal, "window": None if left is right is None else (left, right),
        "softcap": softcap or None, "dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "return_lse": True,
        "deterministic": True if deterministic else None,
    }  # fmt: skip


def over_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, lengths: Any,
    rotary: dict[str, Any], words: dict[str, Any], plans: Plans | None = None, rotary_lengths: Any = None,
) -> Any:  # fmt: skip
    """(out, lse) of tilewise.attention_kv. flash-attn turns the i-th query by the place of the i-th new key if there is
    a band (also where new keys are more or fewer than queries), and all of them by that of the first if there is none;
    places count from `rotary_lengths`, where they are not the cache's."""
    cos, sin = rotary["cos"], rotary["sin"]
    if (k is None) != (v is None) or (k is None and cos is not None):
        raise AttentionError("k and v", "one of them, or none beside rotary_cos", "both")
    if (cos is None) != (sin is None):
        raise AttentionError("rotary_cos and rotary_sin", "one of them", "both, or neither")
    for name, x in (("q", q), ("k_cache", k_cache), *((("k", k), ("v", v)) if k is not None else ())):
        tensor(name, x)
    if plans is not None and not isinstance(plans, Plans):
        raise AttentionError("scheduler_metadata", type(plans).__name__, "what get_scheduler_metadata returns")
    if lengths is None:
        table = words.get("page_table")
        pages = 1 if table is None else tensor("page_table", table).shape[-1]
        lengths = pages * k_cache.shape[1] - (0 if k is None else k.shape[1])
    words = {name: x for name, x in words.items() if name not in ("dropout_p", "deterministic") and x is not None}
    if k is not None:
        words |= {"k_new": k, "v_new": v}
    if cos is not None:
        banded = words["causal"] or "window" in words
        alike = k is not None and q.shape[:-2] == k.shape[:-2] and "cu_seqlens_new" not in words
        if rotary_lengths is not None or not banded or not alike:
            cu_q, cu_new = words.get("cu_seqlens_q"), words.get("cu_seqlens_new", words.get("cu_seqlens_q"))
            batch = q.shape[0] if cu_q is None else tensor("cu_seqlens_q", cu_q).shape[0] - 1
            own = _starts(lengths if rotary_lengths is None else rotary_lengths, q, batch)
            rotary = rotary | {"positions": _places(k, cu_new, own), "q_positions": _places(q, cu_q, own, banded)}
        words["rotary"] = Rotary(**rotary)
    if plans is not None:
        words["plan"] = plans.of(q, k_cache, v_cache, lengths, words)
    return attention_kv(q, k_cache, v_cache, lengths, **words)


def _starts(given: Any, q: Tensor, batch: int) -> Tensor:
    """Where places begin to be counted, as a tensor."""
    if is_whole(given):
        return torch.full((), given, device=q.device)
    lengths = tensor("lengths that rotary counts from", given)
    if lengths.is_floating_point() or tuple(lengths.shape) not in ((), (1,), (batch,)):
        found = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise AttentionError("lengths that rotary counts from", found, f"{batch} integers, one for each sequence")
    return lengths.to(q.device)


def _places(x: Any, cu: Tensor | None, starts: Tensor, one_by_one: bool = True) -> Tensor:
    """The place of every token, dense or packed, where its sequence's first is at `starts`; or that of the first."""
    if x.dim() == 4:
        step = torch.arange(x.shape[1], device=x.device) * int(one_by_one)
        return starts.expand(x.shape[0])[:, None] + step
    assert cu is not None
    t = torch.arange(x.shape[0], device=x.device)
    b = torch.bucketize(t, cu[1:], right=True).clamp(max=max(cu.shape[0] - 2, 0))
    return starts.expand(cu.shape[0] - 1)[b] + (t - cu[b]) * int(one_by_one)
