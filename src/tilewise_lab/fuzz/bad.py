"""Arguments that are wrong, as Python: each must raise an AttentionError.

q, k and v in them are right ones, of 2 tokens, 2 heads and head dim 4.
"""

from __future__ import annotations

_NO_TENSOR = ("[[1.0, 2.0]]", "3.0", "'q'", "numpy.zeros((1, 2, 2, 4), dtype='float32')", "object()", "(q, k)")
_ODD_TENSOR = (
    "{0}.to(torch.complex64)", "{0}.to_sparse()", "{0}.to('meta')", "{0}[0]", "{0}[None, None]", "{0}.long()",
    "{0}.bool()", "{0}.to(torch.float8_e4m3fn)", "{0}[..., :0]", "{0}.new_zeros(*{0}.shape[:-1], 513)",
    "{0}.sum()", "torch.nested.nested_tensor([{0}[0]])", "torch.quantize_per_tensor({0}, 0.1, 0, torch.quint8)",
)  # fmt: skip
_NO_NUMBER = ("'x'", "[1.0]", "1j", "float('nan')", "torch.randn(2)", "torch.tensor(1j)", "object()")
_NO_BOOL = ("'no'", "2", "0.5", "torch.tensor([True, False])", "[]", "object()")


def _tensors(name: str) -> tuple[str, ...]:
    return ("None", *_NO_TENSOR, *(text.format(name) for text in _ODD_TENSOR))


BAD: dict[str, tuple[str, ...]] = {
    "q": (*_tensors("q"), "q.double()", "q[..., :3]", "q[..., :1, :].expand_as(q)[..., :0, :, :].sum(0)"),
    "k": (*_tensors("k"), "k.half()", "k[..., :3]", "k[..., :0, :]", "torch.cat([k, k[..., :1, :]], -2)"),
    "v": (*_tensors("v"), "v.half()", "v[..., :1, :]", "torch.cat([v, v], -3)"),
    "cu_seqlens_q": (
        "None", "[0, 2]", "'x'", "numpy.array([0, 2], dtype='int32')", "cu_q.short()", "cu_q.float()", "cu_q[None]",
        "cu_q[:0]", "cu_q.to('meta')", "torch.cat([cu_q, cu_q[-1:]])", "2",
    ),
    "cu_seqlens_k": ("None", "[0, 2]", "cu_k.short()", "cu_k[:1]", "cu_k.to('meta')", "torch.cat([cu_k, cu_k[-1:]])"),
    "bias": (
        *_NO_TENSOR, "torch.randn(3, 1)", "torch.randn(1, 1, 1, 2, 2)", "torch.randn(2, 2).to(torch.complex64)",
        "torch.randn(2, 2).to('meta')", "torch.ones(2, 2).long()", "torch.ones(2, 2) > 0",
        "torch.randn(2, 2).to_sparse()",
    ),
    "alibi_slopes": (
        *_NO_TENSOR, "torch.rand(3)", "torch.rand(2, 1)", "torch.rand(2).to('meta')", "torch.ones(2).long()",
    ),
    "sinks": (
        *_NO_TENSOR, "torch.rand(3)", "torch.rand(2, 1)", "torch.rand(2).to('meta')",
        "torch.rand(2).to(torch.complex64)",
    ),
    "causal": (*_NO_BOOL, "None"),
    "window": (
        "3", "(1,)", "(1, 2, 3)", "(-1, 0)", "(0, -5)", "(1.5, 0)", "('a', 0)", "(True, 0)", "'ab'", "{1, 2}",
        "torch.tensor([1, 2])", "(float('inf'), 0)", "((1, 2), 0)", "object()",
    ),
    "scale": (*_NO_NUMBER, "float('inf')", "True"),
    "softcap": (*_NO_NUMBER, "0", "-1.0", "float('inf')", "True"),
    "dropout_p": (*_NO_NUMBER, "1", "-0.1", "1.5", "True"),
    "seed": (
        "2**64", "-2**63 - 1", "1.5", "'x'", "torch.tensor([1, 2])", "torch.tensor(1.0)", "[1]", "True", "object()",
        "3  # without dropout",
    ),
    "score_mod": (
        "lambda s: s", "tilewise.mods.softcap", "tilewise.mods.block_diagonal(2)", "'x'", "3", "q",
    ),
    "mask_mod": (
        "lambda i, j: i > j", "tilewise.mods.block_diagonal", "tilewise.mods.softcap(1.0)",
        "torch.ones(2, 2) > 0", "'causal'", "tilewise.block_mask(tilewise.mods.block_diagonal(2), 7, 7)",
    ),
    "return_lse": (*_NO_BOOL, "None"),
    "return_max_logit": (*_NO_BOOL, "None"),
    "deterministic": _NO_BOOL,
    "precision": ("'fp16'", "'FP8'", "8", "True", "torch.float8_e4m3fn", "['fp8']", "object()"),
    "backend": ("'cuda'", "None", "3", "['auto']", "'Reference'", "object()"),
    "max_seqlen_q": ("'x'", "1.5", "-1", "[2]", "object()"),
    "max_seqlen_k": ("'x'", "1.5", "-1", "object()"),
    "is_causal": ("True",),
    "attn_mask": ("None",),
    "softmax_scale": ("1.0",),
    "enable_gqa": ("True",),
}  # fmt: skip
