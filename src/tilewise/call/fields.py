"""The options of every public call: each stands here once.

An option is a `Field`: its name, type, default, the check of its value, its names in other libraries, and the sentence
of its documentation. A `Table` has the fields of one function. From the tables come the defaults, the checks of single
values, the signatures that help() shows, and the hints in the error of an unknown name. `tilewise_lab.generate` writes
what static type checkers and editors must read: the TypedDicts of `call/options.py` and the Args of the docstrings; a
test says when they are stale. Checks that need more than one value are in `validation`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar, get_type_hints

from torch import Tensor

from ..errors import AttentionError, shown
from ..kv_request import UNDIVIDED, KvPlan
from ..mods.blocks import BlockMask
from ..mods.dropout import is_whole
from ..mods.modifier import as_mod
from ..mods.program import Mod
from . import options as typed

F = TypeVar("F", bound=Callable[..., Any])
LARGEST = 3.4e38  # of a float32
SPLIT = 128  # a split is a multiple of this, so that the key tiles of all kernels divide it

# The default of an argument that must be given: without it, the error is about the argument and not about the count.
REQUIRED: Any = type("nothing", (), {"__repr__": lambda _: "nothing"})()


def show_required(function: F) -> F:
    """Decorator: help() and inspect.signature show arguments whose default is REQUIRED without one."""
    own = inspect.signature(function)
    given = [
        x.replace(default=inspect.Parameter.empty) if x.default is REQUIRED else x for x in own.parameters.values()
    ]
    function.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
    return function


class Field(NamedTuple):
    """An option.

    Attributes:
        name: its name.
        type: its annotation, in the names of `call/options.py`.
        doc: what the docstrings say of it.
        default: its default. A number is an int: torch.compile would treat a float of a global dict as a variable.
        check: takes the name and a value other than the default; returns the value to use or raises AttentionError.
        elsewhere: its names in other libraries, and what to write here: a text, or a function of the value.
    """

    name: str
    type: str
    doc: str
    default: Any = None
    check: Callable[[str, Any], Any] | None = None
    elsewhere: Mapping[str, Any] = {}


class Table:
    """The options of a function.

    Args:
        function: its name.
        fields: its options.
        typed: the TypedDict of them.
        foreign: names of other libraries that are no option here, and what to write instead.
    """

    def __init__(self, function: str, fields: tuple[Field, ...], typed: Any, foreign: Mapping[str, Any]) -> None:
        self.function, self.typed = function, typed
        self.fields = {field.name: field for field in fields}
        self.defaults: dict[str, Any] = {field.name: field.default for field in fields}
        self.checks = {field.name: field.check for field in fields if field.check is not None}
        self.own_names = {theirs: field.name for field in fields for theirs in field.elsewhere}  # for adapters
        self.elsewhere = {**foreign}
        for field in fields:
            self.elsewhere |= field.elsewhere

    def completed(self, given: Mapping[str, Any]) -> Any:
        """The given options with the defaults of the others; each value is checked by itself.

        Raises:
            AttentionError: a name is unknown, or a value is not accepted.
        """
        options = self.defaults | given  # type: ignore[operator]
        if len(options) != len(self.defaults):
            raise self.unknown(given)
        for name, check in self.checks.items():
            if options[name] is not self.defaults[name]:
                options[name] = check(name, options[name])
        return options

    def unknown(self, given: Mapping[str, Any], accepted: Mapping[str, Any] | None = None) -> AttentionError:
        """The error of a name that is no option. It suggests what other libraries' names mean here, or the closest one.
        `accepted`: the options, if only some may be given."""
        accepted = self.defaults if accepted is None else accepted
        name = next(name for name in given if name not in accepted)
        near = get_close_matches(name, accepted, n=1)
        hint = self.elsewhere.get(name) or (f"{near[0]}=" if near else f"one of {', '.join(accepted)}")
        if callable(hint):
            hint = hint(given[name])
        return AttentionError("keyword argument", f"{name}=", hint)

    def shown(self, function: F) -> F:
        """Decorator: help() and inspect.signature show each option, instead of `**options`, with type and default.
        An option whose type is not generated yet is Any."""
        own = inspect.signature(show_required(function))
        *first, _ = (x for x in own.parameters.values() if x.kind is not inspect.Parameter.VAR_POSITIONAL)
        kinds = get_type_hints(self.typed)
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds.get(name, Any))
            for name, default in self.defaults.items()
        ]
        function.__signature__ = own.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
        return function


# Checks of one value.


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool):
        raise AttentionError(name, shown(x), "True or False")
    return x


def text(name: str, x: Any) -> str:
    if not isinstance(x, str):
        raise AttentionError(name, type(x).__name__, "a name, as a str")
    return x


def number(name: str, x: Any, expected: str) -> float:
    """x as a float. A tensor raises, because its gradient would be lost."""
    if isinstance(x, Tensor):
        raise AttentionError(name, shown(x), f"{expected}: call .item() (no gradient flows into it)")
    real = isinstance(x, (int, float)) or (hasattr(x, "__float__") and getattr(x, "shape", ()) == ())
    if not real or isinstance(x, bool):
        raise AttentionError(name, shown(x), expected)
    try:
        found = float(x)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError):
        raise AttentionError(name, shown(x), expected) from None
    if not -math.inf < found < math.inf:  # isfinite, which torch.compile does not trace
        raise AttentionError(name, shown(x), expected)
    return found


def factor(name: str, x: Any) -> float:
    return number(name, x, "a finite number (zero and negative are fine), or None for 1/sqrt(D)")


def positive(name: str, x: Any) -> float:
    found = number(name, x, "a finite number above 0, or None")
    if not 0 < found <= LARGEST:
        raise AttentionError(name, found, "a finite number above 0, or None")
    return found


def probability(name: str, x: Any) -> float:
    found = number(name, 0.0 if x is None else x, "0 <= p < 1")
    if not 0 <= found < 1:
        raise AttentionError(name, found, "0 <= p < 1")
    return found


def fp8(name: str, x: Any) -> str:
    if not isinstance(x, str) or x != "fp8":
        raise AttentionError(name, shown(x), "None, or 'fp8' (q, k and v quantised to float8_e4m3fn)")
    return x


def length(name: str, x: Any) -> Any:
    if not is_whole(x) or x < 0:
        raise AttentionError(name, shown(x), "an int >= 0, or None")
    return x


def keys_of_split(name: str, x: Any) -> int:
    if not is_whole(x) or x < 0 or x % SPLIT:
        raise AttentionError(
            name, shown(x), f"a multiple of {SPLIT} keys, 0 for one split, or None to balance the load"
        )
    return min(int(x), UNDIVIDED) or UNDIVIDED


def score_mod(name: str, x: Any) -> Any:
    return as_mod("score", x)


def mask_mod(name: str, x: Any) -> Any:
    return as_mod("mask", x)


def function_of_cache(name: str, x: Any) -> Any:
    """A mod of a call with a KV cache."""
    if isinstance(x, BlockMask):
        raise AttentionError(name, "a block mask", "a mask mod: block masks are for attention without a cache")
    if isinstance(x, Tensor):
        raise AttentionError(name, shown(x), "a function of b, h, q_idx and kv_idx that indexes it")
    return as_mod(name.removesuffix("_mod"), x)


def plan_of_cache(name: str, x: Any) -> KvPlan:
    if not isinstance(x, KvPlan):
        raise AttentionError(name, type(x).__name__, "what plan_kv returns, or None")
    return x


# What other libraries' names mean here.

VARLEN = "attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)"
KV_CACHE = "attention_kv(q, k_cache, v_cache, lengths)"
A_MASK = "mask_mod= for a bool mask, bias= for a float one"


def _sliding_window(tokens: Any) -> str:
    """
    >>> _sliding_window(4)
    'window=(3, 0): a query sees 4 keys, with its own'
    """
    if not isinstance(tokens, int) or tokens < 1:
        return "window=(left, right), each an int >= 0 or None for unbounded"
    return f"window=({tokens - 1}, 0): a query sees {tokens} keys, with its own"


FOREIGN: dict[str, Any] = {
    **dict.fromkeys(("query", "queries"), "q=, or the first argument"),
    **dict.fromkeys(("key", "keys"), "k=, or the second argument"),
    **dict.fromkeys(("value", "values"), "v=, or the third argument"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), VARLEN),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), f"{VARLEN}, which has it"),
    **dict.fromkeys(("page_table", "block_table", "cache_seqlens", "kv_cache"), KV_CACHE),
    "need_weights": "tilewise.weights(q, k, v, rows=)",
    "key_padding_mask": "attention_varlen, or mask_mod=",
    "enable_gqa": "nothing: heads of q may be a multiple of those of k",
    "layout": "packed tensors, (tokens, heads, dim), without it",
}
FOREIGN_OF_CACHE = FOREIGN | {
    "cache_seqlens": "lengths, the tokens in the cache before this call",
    "k": "k_new=",
    "v": "v_new=",
    "bias": "score_mod=",
}

_ATTENTION = (
    Field(
        "causal",
        "bool",
        "if True, query i sees no key after its position i + Sk - Sq (bottom-right alignment).",
        default=False,
        check=flag,
        elsewhere={
            "is_causal": "causal=True (here a query sits at key position i + Sk - Sq: "
            "torch's top-left only where Sq == Sk)"
        },
    ),
    Field(
        "window",
        "Window | None",
        """(left, right): query i sees the keys from position - left to position + right. None is unbounded.""",
        elsewhere={
            "window_size": "window=(left, right), with None where flash-attn writes -1",
            "sliding_window": _sliding_window,
        },
    ),
    Field(
        "scale",
        "float | None",
        "factor of q.k. Default 1 / sqrt(D). Zero and negative values are allowed.",
        check=factor,
        elsewhere={"softmax_scale": "scale=", "scaling": "scale="},
    ),
    Field(
        "softcap",
        "float | None",
        "if given, a score s becomes softcap * tanh(s / softcap).",
        check=positive,
        elsewhere={"logit_cap": "softcap=", "logits_soft_cap": "softcap="},
    ),
    Field(
        "bias",
        "Tensor | None",
        "added to the scores; broadcasts to (B, H, Sq, Sk). Differentiable.",
        elsewhere={"attn_bias": "bias="},
    ),
    Field(
        "alibi_slopes",
        "Tensor | None",
        """(H,) or (B, H). Subtracts slope * abs(i + Sk - Sq - j) from the score of query i and key j.
        Differentiable.""",
        elsewhere={"alibi": "alibi_slopes=, a tensor (heads,)"},
    ),
    Field(
        "sinks",
        "Tensor | None",
        """(H,) scores that are added to the softmax denominator and have no value. Differentiable.""",
        elsewhere={"s_aux": "sinks=", "learnable_sink": "sinks="},
    ),
    Field(
        "score_mod",
        "ScoreMod | None",
        """a function f(score, b, h, q_idx, kv_idx) that returns the new score of a pair. A plain function, or
        one decorated with `tilewise.score_mod` and called with its tensors; torch.compile needs a decorated
        one. Its float tensors are differentiable.""",
        check=score_mod,
    ),
    Field(
        "mask_mod",
        "MaskMod | BlockMask | None",
        """a function f(b, h, q_idx, kv_idx) that returns True if the query sees the key. It applies in addition
        to causal and window. A plain function, or one decorated with `tilewise.mask_mod`, as score_mod. Or a
        `tilewise.block_mask` of one, which also skips tiles without a visible pair.""",
        check=mask_mod,
        elsewhere={
            "mask": A_MASK,
            "attention_mask": A_MASK,
            "attn_mask": A_MASK,
            "block_mask": "mask_mod=tilewise.block_mask(...)",
        },
    ),
    Field(
        "dropout_p",
        "float",
        """probability that a softmax weight is dropped, 0 <= dropout_p < 1. It is rounded to a multiple of 1/65536, at
        most 65535/65536. The other weights are divided by 1 minus the rounded probability.""",
        default=0,
        check=probability,
        elsewhere={"dropout": "dropout_p="},
    ),
    Field(
        "seed",
        "int | Tensor | None",
        """seed of dropout, an int or an int64 tensor of one element. Default: drawn from torch's generator. The
        same seed drops the same weights: `tilewise.dropout_mask` returns which.""",
    ),
    Field(
        "return_lse",
        "bool",
        "if True, lse is returned too.",
        default=False,
        check=flag,
        elsewhere={"return_attn_probs": "return_lse=True", "return_softmax_lse": "return_lse=True"},
    ),
    Field(
        "return_max_logit",
        "bool",
        "if True, the largest score of each head is returned too, last, as QK-clip needs it.",
        default=False,
        check=flag,
    ),
    Field(
        "deterministic",
        "bool | None",
        """if True, the gradients have the same bits in every run. Default: as torch.use_deterministic_algorithms
        says. Only the backward of the "hopper" backend is faster without it.""",
        check=flag,
    ),
    Field(
        "precision",
        'Literal["fp8"] | None',
        """"fp8": q, k and v are quantised to float8_e4m3fn, with a float32 scale for each block, and multiplied
        by fp8 tensor cores (the how-to on fp8 says how, and how large the error is). Forward only: it raises
        if a gradient is needed. Default None: products in q's dtype.""",
        check=fp8,
    ),
    Field(
        "backend",
        "BackendName",
        """"reference" (torch, any device), "torch" (torch's fused kernels, CPUs), "triton" (GPUs), "hopper" (sm_90), or
        "auto".""",
        default="auto",
        check=text,
    ),
)


ATTENTION = Table("attention", _ATTENTION, typed.Options, FOREIGN)


def _same(name: str, doc: str = "as in `attention`.", **others: Any) -> Field:
    """An option that `attention` has too."""
    return ATTENTION.fields[name]._replace(doc=doc, **others)


_CACHE = (
    Field(
        "k_new",
        "Tensor | None",
        "new keys (B, Sn, Hk, D), or packed (Tn, Hk, D). Written into the cache first, in place.",
    ),
    Field(
        "v_new",
        "Tensor | None",
        "new values, as k_new. If v_cache is a view of k_cache (MLA), the same columns of k_new.",
    ),
    Field(
        "cu_seqlens_q",
        "Tensor | None",
        "int32 (B + 1,): offsets of the sequences in a packed q.",
    ),
    Field(
        "cu_seqlens_new",
        "Tensor | None",
        """int32 (B + 1,): offsets of the sequences in packed k_new and v_new. Default cu_seqlens_q.""",
        elsewhere={"cu_seqlens_k_new": "cu_seqlens_new="},
    ),
    Field(
        "page_table",
        "PageTable",
        """int32 (B, pages): the pages of each sequence. Or (indptr (B + 1,), pages (N,)). Entries past a
        sequence's last page are not read.""",
        elsewhere={"block_table": "page_table="},
    ),
    Field(
        "token_table",
        "Tensor | None",
        """int32 (B, keys), instead of a page table: the slot of each key, row * tokens + position (paged: page *
        page size + position), as in DeepSeek's sparse attention. A slot outside the cache, such as -1, is not
        a key. `lengths` says how many slots of a sequence count. All queries of a sequence see them.""",
    ),
    Field(
        "slots",
        "Tensor | None",
        """where each new token is written, row * tokens + position (paged: page * page size + position).
        Negative: it is not written. Default: after the sequence's last token.""",
        elsewhere={"slot_mapping": "slots="},
    ),
    Field(
        "cache_rows",
        "Tensor | None",
        "(B,): the row of a dense cache for each sequence. Default 0, 1, ...",
        elsewhere={"cache_batch_idx": "cache_rows="},
    ),
    Field(
        "starts",
        "Tensor | None",
        "(B,): the first valid key of each sequence, if it is padded on the left.",
        elsewhere={"cache_leftpad": "starts="},
    ),
    Field(
        "rotary",
        "Rotary | None",
        "a `tilewise.Rotary`, applied to k_new and q.",
        elsewhere={"rotary_cos": "rotary=tilewise.Rotary(cos, sin, interleaved=)"},
    ),
    Field(
        "qk_norm",
        "QkNorm | None",
        "a `tilewise.QkNorm`, applied to k_new and q before `rotary`.",
    ),
    Field(
        "k_scale",
        "Scale",
        """scale of a quantised k_cache: a key is the stored number times k_scale. A number, or a float32 tensor
        of shape (), (Hk,), (B, Hk), or by token and head, (rows or pages, tokens, Hk) as the cache, which is
        written for new tokens. For int4 also (.., Hk, G), a scale for each of an even number G of groups of D
        / G dims; the kernels read up to 32 groups. Default 1 for float8.""",
    ),
    Field(
        "v_scale",
        "Scale",
        "scale of a quantised v_cache, as k_scale.",
    ),
    Field(
        "tree",
        "Tensor | None",
        """mask among the draft tokens of speculative decoding: tree[b, i, j] is True if query i sees draft j,
        one of the last Sq keys of the sequence. bool (B, Sq, Sq), or (Sq, Sq) for all sequences; packed
        (T, drafts); or an int64 bit mask for each query.""",
    ),
    _same("causal", "default True. The last query of a sequence is at its last key.", default=True),
    _same("window"),
    _same("scale"),
    _same("softcap"),
    _same("sinks"),
    _same("alibi_slopes"),
    _same(
        "score_mod",
        """a plain function or a called `tilewise.score_mod`, as in `attention`. kv_idx counts from the
        sequence's first position in the cache.""",
        check=function_of_cache,
    ),
    _same(
        "mask_mod",
        """a plain function or a called `tilewise.mask_mod`, as in `attention`, with kv_idx as in score_mod. No
        `tilewise.block_mask`.""",
        type="MaskMod | None",
        check=function_of_cache,
    ),
    Field(
        "out",
        "Tensor | None",
        "a tensor for the result.",
    ),
    _same("return_lse", "if True, lse is returned too."),
    _same("return_max_logit", "if True, the largest score of each head is returned too, last."),
    Field(
        "plan",
        "KvPlan | None",
        "a plan from `plan_kv`. One plan serves all layers of a step that have the same shapes.",
        check=plan_of_cache,
    ),
    Field(
        "split",
        "int | None",
        """keys per split (split-KV, as in FlashDecoding). A fixed number makes results independent of the rest
        of the batch; 0 is one split. Default: chosen on the device.""",
        check=keys_of_split,
        elsewhere={"num_splits": "split=, the number of keys of a split (or None: the load is balanced on the device)"},
    ),
    Field(
        "shared_prefix",
        "SharedPrefix",
        """"auto": keys in pages that consecutive sequences begin with are read once for all of them (cascade
        attention). They are found on the device. Or int32 (B,): so many leading keys of each sequence lie in
        the pages of the sequence before it. Results are the same up to rounding. Default None: nothing is
        shared. Has no effect with a left window, starts, split, mask_mod, score_mod, alibi_slopes,
        return_max_logit or scales of shape (B, Hk), for MLA caches, for more than 2048 sequences, nor in the
        backends "reference" and "hopper". "auto" shares nothing that saves less than 96 MB.""",
    ),
    Field(
        "max_seqlen_q",
        "int | None",
        """the largest number of queries in a packed sequence. It is used to choose the tile. If it is too small,
        results are the same but slower; with `split`, and if hidden values are NaN, they are wrong.
        `check_kv` raises.""",
        check=length,
    ),
    _same("backend"),
)

CACHE = Table("attention_kv", _CACHE, typed.KvOptions, FOREIGN_OF_CACHE)


def misplaced(function: str, values: tuple[Any, ...]) -> AttentionError:
    """The error of positional arguments that a function does not have."""
    first = values[0]
    match first:
        case bool():
            hint = f"causal={first}"
        case int() if "varlen" in function:
            names = ("max_seqlen_q", "max_seqlen_k")
            hint = ", ".join(f"{name}={x}" for name, x in zip(names, values, strict=False))
        case BlockMask():
            hint = "mask_mod="
        case Mod():
            hint = f"{first.kind}_mod="
        case Tensor() if first.is_floating_point() or first.dim() != 1:
            hint = "bias=, or mask_mod= for a mask"
        case Tensor():
            hint = VARLEN
        case int() | float():
            hint = f"scale={first}"
        case _ if type(first).__name__ == "BlockMask":  # torch's
            hint = "mask_mod=tilewise.block_mask(...), or tilewise.compat.flex_attention, which takes torch's"
        case _:
            hint = "causal=True"
    found = ", ".join(type(x).__name__ for x in values)
    return AttentionError(f"positional arguments of {function} after its tensors", found, f"options by name: {hint}")
