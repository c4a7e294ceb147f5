"""The peers that come with torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise_lab.bench.cases import Case, Inputs
from tilewise_lab.bench.provider import Attention, Provider, RefusedError, ends, not_cuda


@dataclass(frozen=True)
class Sdpa(Provider):
    """torch's scaled_dot_product_attention, with one backend or with torch's own choice."""

    backend: SDPBackend | None = None
    cpu: bool = True

    def missing(self, device: torch.device) -> str | None:
        return None if self.cpu else not_cuda(device)

    def refuses(self, case: Case, which: str) -> str | None:
        if case.lengths:
            return "scaled_dot_product_attention takes no packed sequences"
        if case.window is not None:
            return "scaled_dot_product_attention has no window, and a dense mask is another algorithm"
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

        if self.backend is None:
            return attention
        only = self.backend

        def restricted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(only):
                return attention(q, k, v)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                restricted(x.q, x.k, x.v)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise RefusedError(_reasons(said) or str(error)) from None
        return restricted


def _reasons(said: list[warnings.WarningMessage]) -> str:
    """What torch says about the one backend it was allowed, without the lines about those it was not."""
    words = [str(warning.message).partition(" (Triggered")[0].strip() for warning in said]
    return " ".join(dict.fromkeys(w for w in words if "not used because" not in w and "runtime disabled" not in w))


class TorchFlash(Sdpa):
    """FlashAttention-2 as torch ships it; packed sequences and windows through torch.nn.attention.varlen."""

    def refuses(self, case: Case, which: str) -> str | None:
        if not case.lengths and case.window is None:
            return None
        if util.find_spec("torch.nn.attention.varlen") is None:
            return super().refuses(case, which)
        parameters = signature(import_module("torch.nn.attention.varlen").varlen_attn).parameters
        if "window_size" not in parameters:
            return "this torch's varlen_attn has no window_size"
        if case.heads != case.kv_heads and "enable_gqa" not in parameters:
            return "this torch's varlen_attn has no grouped heads"
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        if not case.lengths and case.window is None:
            return super().bind(case, x)
        if not x.q.is_cuda:
            raise RefusedError("varlen_attn runs on CUDA only")
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
        options: dict[str, Any] = {"window_size": (case.before, case.after)}
        if case.heads != case.kv_heads:
            options["enable_gqa"] = True
        cu, longest = ends(case, x, case.seq), case.longest

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (y.flatten(0, -3) for y in (q, k, v))
            out: Tensor = varlen_attn(*rows, cu, cu, longest, longest, **options)
            return out.view(*q.shape[:-1], -1)

        return attention


@dataclass(frozen=True)
class Naive(Provider):
    """The textbook, with the whole score matrix in memory."""

    def refuses(self, case: Case, which: str) -> str | None:
        return "one matrix of scores for packed sequences would be mostly padding" if case.lengths else None

    def bind(self, case: Case, x: Inputs) -> Attention:
        hidden = None
        if case.causal:
            hidden = torch.ones(case.seq, case.seq, dtype=torch.bool, device=x.q.device).triu_(1)
        if hidden is not None and case.window is not None:
            hidden |= torch.ones_like(hidden).tril_(-case.window - 1)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = q.shape[2] // k.shape[2]
            if group > 1:
                k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
            s = (q / math.sqrt(q.shape[-1])).transpose(1, 2) @ k.permute(0, 2, 3, 1)  # (B, H, queries, keys)
            if hidden is not None:
                s = s.masked_fill_(hidden, -torch.inf)
            return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

        return attention


@dataclass(frozen=True)
class Flex(Provider):
    """FlexAttention, compiled, with a block mask made beforehand."""

    def refuses(self, case: Case, which: str) -> str | None:
        return "its packed sequences need a document mask over all tokens, another algorithm" if case.lengths else None

    def bind(self, case: Case, x: Inputs) -> Attention:
        flex = import_module("torch.nn.attention.flex_attention")
        if not x.q.is_cuda and x.q.requires_grad:
            raise RefusedError("FlexAttention has no backward on the CPU")
        reach = case.seq if case.window is None else case.window

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j <= reach)

        mask = flex.create_block_mask(seen, None, None, case.seq, case.seq, x.q.device) if case.causal else None
        compiled = _compiled_flex()
        gqa = case.heads != case.kv_heads

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            out: Tensor = compiled(*heads_first, block_mask=mask, enable_gqa=gqa)
            return out.transpose(1, 2)

        return attention


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    flex = import_module("torch.nn.attention.flex_attention").flex_attention
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    compiled: Callable[..., Tensor] = torch.compile(flex, dynamic=False)
    return compiled
