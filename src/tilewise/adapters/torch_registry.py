"""torch's registry of flash attentions: `torch.nn.attention.activate_flash_attention_impl("tilewise")`.

Then torch's flash backend is tilewise: scaled_dot_product_attention where torch chooses flash (16-bit dtypes on a GPU,
no mask), `torch.nn.attention.varlen.varlen_attn`, and what is built on them, such as torch's context parallelism.
`restore_flash_attention_impl()` undoes it; torch 2.10 has no such function. On a CPU a mask is supported, as in torch.

Tested with torch 2.10, 2.11 and 2.13.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..call.fields import ATTENTION
from ..errors import AttentionError
from ..request import Request, arguments
from ..validation import dense as checks
from .arguments import top_left, window


class Handle:
    """What torch keeps while tilewise is active."""

    def __init__(self, *libraries: Any) -> None:
        self.libraries = libraries

    def remove(self) -> None:
        """Dropping the last reference to a Library takes its implementations out of the dispatcher."""
        self.libraries = ()


def activate() -> Handle:
    """Replace torch's flash attention ops on GPUs and CPUs."""
    made = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # overriding is intended
        for key in ("CUDA", "CPU"):
            library = torch.library.Library("aten", "IMPL", key)
            for name, function in OPS.items():
                if hasattr(torch.ops.aten, name) and (key == "CPU" or not name.endswith(ON_CPU)):
                    library.impl(name, function, key, allow_override=True)
            made.append(library)
    return Handle(*made)


def _options(
    is_causal: bool,
    dropout_p: float,
    state: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> dict[str, Any]:
    """The options that forward and backward have. `state`: integers; the first is the seed."""
    band = {"causal": is_causal, "window": window(window_size_left, window_size_right)}
    return band | {"scale": scale, "dropout_p": dropout_p, "seed": state[0] if dropout_p else None}


def _random(q: Tensor, dropout_p: float) -> Tensor:
    """Two integers, as torch's random state; the first is the seed of `tilewise.attention`."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p:
        state[:1].random_(2**62)
    return state


def _check_no_cache(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise AttentionError(
                f"{name} of torch's flash attention", "a tensor", "None; tilewise.attention_kv takes it"
            )


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **band: Any,
) -> tuple[Any, ...]:
    """aten::_flash_attention_forward: (B, S, H, D), or packed (T, H, D) with offsets."""
    _check_no_cache(seqused_k=seqused_k, block_table=block_table)
    packed = cum_seq_q is not None and cum_seq_k is not None
    if num_splits not in (None, 0) and not (packed and num_splits == 1):  # keys of packed sequences are never split
        expected = "None; or 1 with packed sequences (varlen_attn), whose keys are not split"
        raise AttentionError("num_splits of torch's flash attention", num_splits, expected)
    state = _random(query, dropout_p)
    options = _options(is_causal, dropout_p, state, **band) | {"alibi_slopes": alibi_slopes, "return_lse": True}
    if cum_seq_q is None or cum_seq_k is None:
        out, lse = attention(query, key, value, layout="bshd", **options)
    else:
        out, lse = attention_varlen(query, key, value, cum_seq_q, cum_seq_k, **options)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, state.view(torch.uint64), unused, query.new_empty(0)


def flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace."""
    found, lse, *_ = flash_forward(*args, **options)
    out.copy_(found)
    return lse  # type: ignore[no-any-return]


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    **band: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_flash_attention_backward."""
    full = ATTENTION.completed(_options(is_causal, dropout_p, rng_state.view(torch.int64), **band))
    if cum_seq_q is None or cum_seq_k is None or not cum_seq_q.numel():
        request = checks.dense(query, key, value, full)
    else:
        request = checks.packed(query, key, value, cum_seq_q, cum_seq_k, (None, None), full)
    return _gradients(grad_out, out, logsumexp, request)


def _gradients(grad_out: Tensor, out: Tensor, lse: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.ops.tilewise.backward(out, lse, grad_out, None, *arguments(request))
    return found  # type: ignore[no-any-return]


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, on (B, H, S, D); torch calls it with is_causal only for
    equal lengths."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, state, unused, mask = flash_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return _like(query, out), lse, None, None, q.shape[1], k.shape[1], state, unused, mask


def _like(query: Tensor, out: Tensor) -> Tensor:
    """(B, S, H, D) -> (B, H, S, D) with the strides of the query, which torch.compile expects."""
    out = out.transpose(1, 2)
    if out.shape != query.shape:
        return out
    wanted = torch.empty_like(query)
    return out if wanted.stride() == out.stride() else wanted.copy_(out)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    **scale: Any,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward. `rest` as in `flash_backward`, without offsets."""
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    given: Any = (*tensors, logsumexp, None, None, *rest[2:])
    return tuple(x.transpose(1, 2) for x in flash_backward(*given, **scale))


def _cpu_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """(q, k, v) and options. torch aligns is_causal top left: keys after the last query are not visible. By the
    reference: the backend "torch" would call the op that is computed here."""
    if dropout_p:
        raise AttentionError("dropout_p of torch's flash attention on a CPU", dropout_p, "0")
    n, band = top_left(query.shape[2], key.shape[2]) if is_causal else (key.shape[2], None)
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, :n], value[:, :, :n]))
    return (q, k, v), {"scale": scale, "bias": mask, "window": band, "backend": "reference"}


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu."""
    (q, k, v), options = _cpu_options(query, key, value, dropout_p, is_causal, attn_mask, scale)
    out, lse = attention(q, k, v, return_lse=True, layout="bshd", **options)
    return _like(query, out), lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    tensors, options = _cpu_options(query, key, value, dropout_p, is_causal, attn_mask, scale)
    request = checks.dense(*tensors, ATTENTION.completed(options))  # type: ignore[arg-type]
    dq, dk, dv = _gradients(grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp.contiguous(), request)
    unseen = key.shape[2] - dk.shape[1]
    dk, dv = (torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, unseen)) for x in (dk, dv))
    return dq.transpose(1, 2), dk, dv


ON_CPU = ("_for_cpu", "_for_cpu_backward")
OPS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_scaled_dot_product_flash_attention_for_cpu": cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": cpu_backward,
}
