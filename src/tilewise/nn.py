"""Modules on top of `attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.init import constant_, xavier_uniform_

from .api import attention
from .debug import weights
from .errors import AttentionError
from .mods.modifier import mask_mod

__all__ = ["MultiheadAttention"]


@mask_mod
def _not_padding(b, h, q_idx, kv_idx, padding):  # type: ignore[no-untyped-def]
    return ~padding[b, kv_idx]


@mask_mod
def _not_hidden(b, h, q_idx, kv_idx, hidden):  # type: ignore[no-untyped-def]
    """`hidden` is (B, H, L, S), each axis possibly 1: an index past the end reads the last element."""
    return ~hidden[b, h, q_idx, kv_idx]


@mask_mod
def _neither(b, h, q_idx, kv_idx, padding, hidden):  # type: ignore[no-untyped-def]
    return ~padding[b, kv_idx] & ~hidden[b, h, q_idx, kv_idx]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, computed by `tilewise.attention`: same arguments, parameters and state_dict.

    >>> theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> ours = MultiheadAttention(64, 4, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 10, 64)
    >>> out, _ = ours(x, x, x, need_weights=False)
    >>> torch.allclose(out, theirs(x, x, x, need_weights=False)[0], atol=1e-5)
    True

    Where it differs from torch's module: a query that sees no key gets the bias of the output projection, not NaN;
    the returned weights have no gradient; dropout drops other pairs; nn.TransformerEncoderLayer never replaces it by
    torch's fused evaluation. Nested tensors are not supported.

    Args:
        embed_dim: width of query and of the output.
        num_heads: query heads, a divisor of embed_dim.
        dropout: probability that a softmax weight is dropped in training. Default 0.
        bias: if True, the projections have a bias.
        add_bias_kv: must be False. If you need it, use torch's module within `tilewise.replaces_sdpa`.
        add_zero_attn: must be False, as add_bias_kv.
        kdim: width of key. Default: embed_dim.
        vdim: width of value. Default: embed_dim.
        batch_first: if True, inputs and output are (N, tokens, width). If False, (tokens, N, width).
        device: device of the parameters.
        dtype: dtype of the parameters.
        num_kv_heads: KV heads, a divisor of num_heads, for grouped-query attention. Fewer than num_heads: the
            projections of key and value are smaller and have weights of their own, and the state_dict is not torch's.
            Default: num_heads.

    Raises:
        AttentionError: an argument is not as above.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise AttentionError(name, given, "False, or torch.nn.MultiheadAttention in tilewise.replaces_sdpa()")
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise AttentionError("num_heads", num_heads, f"a divisor of embed_dim {embed_dim}")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise AttentionError("num_kv_heads", num_kv_heads, f"a divisor of num_heads {num_heads}")
        super().__init__(embed_dim, num_heads, dropout, bias, False, False, kdim, vdim, batch_first, device, dtype)
        self.num_kv_heads = kv_heads
        # torch.nn.TransformerEncoder(Layer) reads this to decide whether it may skip `forward`.
        self._qkv_same_embed_dim = False
        if kv_heads < num_heads:
            self._group(self.out_proj.weight.new_empty)

    def _group(self, new: Any) -> None:
        """Weights for fewer KV heads than query heads."""
        width = self.num_kv_heads * self.head_dim
        shapes = {"q": (self.embed_dim, self.embed_dim), "k": (width, self.kdim), "v": (width, self.vdim)}
        self.register_parameter("in_proj_weight", None)
        for name, shape in shapes.items():
            self.register_parameter(f"{name}_proj_weight", torch.nn.Parameter(new(shape)))
        if self.in_proj_bias is not None:
            self.in_proj_bias = torch.nn.Parameter(new(self.embed_dim + 2 * width))
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """As torch's, by the weights that there are."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            constant_(self.in_proj_bias, 0.0)
            constant_(self.out_proj.bias, 0.0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and, if need_weights, the softmax weights.

        Args:
            query: (N, L, embed_dim), or (L, N, embed_dim) without batch_first, or (L, embed_dim) unbatched.
            key: (N, S, kdim), or as query.
            value: (N, S, vdim), or as query.
            key_padding_mask: (N, S), or (S,) unbatched. Bools are True where a key is hidden from all queries; floats
                are added to the scores.
            need_weights: if True, the weights are computed too, in a separate pass with O(L S) memory. False is faster.
            attn_mask: (L, S) or (N * num_heads, L, S). Bools are True where a pair is hidden; floats are added to the
                scores and differentiable.
            average_attn_weights: if True, the weights are averaged over the heads.
            is_causal: if True and L = S, query i sees the keys up to i, and attn_mask is not read; it may be None. If L
                and S differ, attn_mask is used and required.

        Returns:
            The output, in the shape of query, and None or the weights: (N, L, S), (N, num_heads, L, S) if not averaged,
            without N if unbatched.

        Raises:
            AttentionError: a shape or a dtype is not as above.
        """
        batched = self._batched(query, key, value)
        q, k, v = self._projected(query, key, value, batched)
        sizes = q.shape[0], q.shape[1], k.shape[1]
        options = self._masks(key_padding_mask if batched else _lead(key_padding_mask), attn_mask, is_causal, sizes)
        if self.training and self.dropout > 0:
            options |= {"dropout_p": self.dropout, "seed": torch.randint(2**62, (), device=q.device)}
        if "bias" in options:
            options["bias"] = options["bias"].to(q.dtype)
        out: Tensor = attention(q, k, v, layout="bshd", **options)
        out = out.flatten(2)
        if not (batched and self.batch_first):
            out = out.transpose(0, 1) if batched else out[0]
        out = functional.linear(out, self.out_proj.weight, self.out_proj.bias)
        if not need_weights:
            return out, None
        found = weights(q, k, v, layout="bshd", **options).to(q.dtype)
        if average_attn_weights:
            found = found.mean(1)
        return out, found if batched else found[0]

    def _batched(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the inputs have a batch axis."""
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if getattr(x, "is_nested", False):
                raise AttentionError(
                    name, "a nested tensor", "a dense one (TransformerEncoder: enable_nested_tensor=False)"
                )
            if not isinstance(x, Tensor) or x.dim() not in (2, 3) or x.dim() != query.dim():
                found = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise AttentionError(name, found, f"a tensor with 3 axes (2 unbatched), the last {width}")
            if x.shape[-1] != width:
                raise AttentionError(f"last axis of {name}", x.shape[-1], width)
        if key.shape[:-1] != value.shape[:-1]:
            raise AttentionError("shape of value", tuple(value.shape), f"the tokens of key, {tuple(key.shape)}")
        axis = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[axis] != key.shape[axis]:
            expected = f"{key.shape[axis]}, key's (batch_first={self.batch_first})"
            raise AttentionError("batch of query", query.shape[axis], expected)
        return query.dim() == 3

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> list[Tensor]:
        """q, k and v as (N, tokens, heads, head_dim). One matrix product if the three inputs are one tensor."""
        width = self.num_kv_heads * self.head_dim
        widths = [self.embed_dim, width, width]
        if self.in_proj_weight is not None and query is key and key is value:
            found = functional.linear(query, self.in_proj_weight, self.in_proj_bias).split(widths, -1)
        else:
            one = self.in_proj_weight
            split = (
                one.split(widths) if one is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            )
            bias = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(widths)
            given = zip((query, key, value), split, bias, strict=True)
            found = tuple(functional.linear(x, weight, b) for x, weight, b in given)
        heads = [x.unflatten(-1, (-1, self.head_dim)) for x in found]
        if not batched:
            return [x[None] for x in heads]
        return heads if self.batch_first else [x.transpose(0, 1) for x in heads]

    def _masks(self, padding: Any, mask: Any, is_causal: bool, sizes: tuple[int, int, int]) -> dict[str, Any]:
        """The options of `attention` that mean the same as both masks. Bools hide, floats are added."""
        n, n_q, n_k = sizes
        if is_causal and n_q == n_k:
            mask = None
        elif is_causal and mask is None:
            raise AttentionError("is_causal", f"True, {n_q} queries and {n_k} keys without attn_mask", "an attn_mask")
        options: dict[str, Any] = {"causal": True} if is_causal and n_q == n_k else {}
        if padding is not None:
            _check("key_padding_mask", padding, [(n, n_k)])
        if mask is not None:
            _check("attn_mask", mask, [(n_q, n_k), (n * self.num_heads, n_q, n_k)])
            mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (n, self.num_heads))
        hides = [x is not None and x.dtype == torch.bool for x in (padding, mask)]
        if all(hides):
            options["mask_mod"] = _neither(padding, mask)
        elif any(hides):
            options["mask_mod"] = _not_padding(padding) if hides[0] else _not_hidden(mask)
        added = [x for x, hidden in ((_wide(padding), hides[0]), (mask, hides[1])) if x is not None and not hidden]
        if added:
            options["bias"] = sum(added[1:], start=added[0])
        return options


def _lead(x: Tensor | None) -> Tensor | None:
    return x[None] if isinstance(x, Tensor) else x


def _wide(padding: Tensor | None) -> Tensor | None:
    """(N, S) as (N, 1, 1, S)."""
    return None if padding is None else padding[:, None, None, :]


def _check(name: str, mask: Any, shapes: list[tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise AttentionError(name, found, "bools (True is hidden) or floats (added to the scores)")
    if tuple(mask.shape) not in shapes:
        raise AttentionError(f"shape of {name}", tuple(mask.shape), " or ".join(map(str, shapes)))
