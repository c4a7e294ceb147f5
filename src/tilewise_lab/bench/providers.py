"""Who takes part: tilewise's backends and every peer, each a few lines; one that cannot says why.

A provider binds a case to a function of q, k, v that autograd can follow; what need not be paid at every call (masks,
plans, compilation) is done while binding.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata, util
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.dispatch import NAMES, choose
from tilewise.spec import AttentionError, Request, Spec
from tilewise_lab.bench.cases import Case, Inputs

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Answer = Callable[[], dict[str, Tensor]]
OURS = "tilewise"


class RefusedError(Exception):
    """A provider's own reason not to run a case."""


@dataclass(frozen=True)
class Provider:
    name: str
    about: str

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all."""
        return None

    def refuses(self, case: Case, which: str) -> str | None:
        """Why it will not run this case."""
        return None

    def same_bits(self, case: Case) -> str | None:
        """Why its backward will not give the same bits twice."""
        return "no switch of its own for a deterministic backward"

    def lse(self, case: Case, x: Inputs) -> Tensor | None:
        """The logsumexp of the call, (B, H, S) or packed (H, T), where the provider gives it."""
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        raise NotImplementedError

    def forward(self, case: Case, x: Inputs) -> Answer:
        attention = self.bind(case, x)
        return lambda: {"out": attention(x.q, x.k, x.v)}

    def backward(self, case: Case, x: Inputs) -> Answer:
        """Only the backward: the forward and its graph are kept."""
        leaves = x.leaves()
        inputs = leaves[:3]
        out = self.bind(case, leaves)(*inputs)
        if not out.requires_grad:
            raise RefusedError("its output carries no gradient")
        return lambda: _named(torch.autograd.grad(out, inputs, x.dout, retain_graph=True))

    def recorded(self, case: Case, x: Inputs) -> Answer:
        """A forward that leaves what its backward needs."""
        leaves = x.leaves()
        attention = self.bind(case, leaves)
        return lambda: {"out": attention(*leaves[:3]).detach()}

    def step(self, case: Case, x: Inputs) -> Answer:
        """Forward and backward, as in training."""
        leaves = x.leaves()
        inputs, attention = leaves[:3], self.bind(case, leaves)
        return lambda: _named(torch.autograd.grad(attention(*inputs), inputs, x.dout))

    def answer(self, case: Case, which: str, x: Inputs) -> Answer:
        ways = {"forward": self.forward, "backward": self.backward, "recorded": self.recorded, "step": self.step}
        return ways[which](case, x)

    def version(self) -> str:
        return f"torch {torch.__version__}"


def _named(grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


@dataclass(frozen=True)
class Tilewise(Provider):
    backend: str = "auto"

    def missing(self, device: torch.device) -> str | None:
        if self.backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            return "Triton's interpreter is on, and its speed means nothing"
        probe = torch.zeros(1, 128, 1, 64, device=device, dtype=torch.float16)
        try:
            choose(Request(probe, probe, probe, Spec.of(head_dim=64, backend=self.backend)))
        except AttentionError as error:
            return str(error)
        return None

    def same_bits(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        attention: Attention = self._bind(case, x)
        return attention

    def lse(self, case: Case, x: Inputs) -> Tensor | None:
        found: Tensor = self._bind(case, x, return_lse=True)(x.q, x.k, x.v)[1]
        return found

    def _bind(self, case: Case, x: Inputs, **options: Any) -> Any:
        window = None if case.window is None else (case.window, 0)
        options |= {"causal": case.causal, "window": window, "backend": self.backend}
        options["deterministic"] = case.deterministic
        cu = x.cu
        if cu is not None:
            return lambda q, k, v: tilewise.attention_varlen(q, k, v, cu, cu, **options)
        return lambda q, k, v: tilewise.attention(q, k, v, **options)

    def version(self) -> str:
        return f"tilewise {tilewise.__version__}"


def auto(case: Case, x: Inputs) -> str:
    """The name of the provider that tilewise.attention runs when nobody names a backend."""
    window = None if case.window is None else (case.window, 0)
    spec = Spec.of(head_dim=case.dim, causal=case.causal, window=window)
    return f"{OURS}-{choose(Request(x.q, x.k, x.v, spec)).backend.name}"


@dataclass(frozen=True)
class Sdpa(Provider):
    """torch's scaled_dot_product_attention, with one backend or with torch's own choice."""

    backend: SDPBackend | None = None
    cpu: bool = True

    def missing(self, device: torch.device) -> str | None:
        return None if self.cpu or device.type == "cuda" else f"only for CUDA, and the tensors are on the {device.type}"

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
        cu, longest = _ends(case, x, case.seq), case.longest

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (y.flatten(0, -3) for y in (q, k, v))
            out: Tensor = varlen_attn(*rows, cu, cu, longest, longest, **options)
            return out.view(*q.shape[:-1], -1)

        return attention


def _ends(case: Case, x: Inputs, tokens: int) -> Tensor:
    """Where the sequences end once they are packed, of `tokens` each unless they are packed already."""
    if x.cu is not None:
        return x.cu
    return torch.arange(0, (case.batch + 1) * tokens, tokens, device=x.q.device, dtype=torch.int32)


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


@dataclass(frozen=True)
class FlashAttn(Provider):
    """flash-attn 2, 3 or 4, where it is installed: the same two functions in three modules."""

    module: str = "flash_attn"
    unbounded: int | None = -1

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"only for CUDA, and the tensors are on the {device.type}"
        return _absent(self.module, "flash_attn_func")

    def same_bits(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        module = import_module(self.module)
        ends = [self.unbounded if end < 0 else end for end in (case.before, case.after)]
        options: dict[str, Any] = {"causal": case.causal}
        if case.window is not None:
            options = {"causal": False, "window_size": tuple(ends)}
        if case.deterministic:
            options["deterministic"] = True
        cu, longest = x.cu, case.longest
        if cu is not None:
            varlen = module.flash_attn_varlen_func
            lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return lambda q, k, v: _first(varlen(q, k, v, **lengths, **options))
        dense = module.flash_attn_func
        options |= self.splits(case, dense)
        return lambda q, k, v: _first(dense(q, k, v, **options))

    def splits(self, case: Case, attend: Callable[..., Any]) -> dict[str, int]:
        """The option that lets it cut the keys as it likes, where it has to be asked."""
        return {}

    def version(self) -> str:
        return _version(
            {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3"}.get(self.module, "flash-attn-4")
        )


@dataclass(frozen=True)
class FlashAttn3(FlashAttn):
    """FlashAttention-3: installed, or its shared object in a folder with the fa3.py that calls it."""

    module: str = "flash_attn_interface"
    folder: Path | None = None

    def missing(self, device: torch.device) -> str | None:
        if self.folder is None:
            reason = super().missing(device)
            return reason and reason + "; or give its folder: --fa3 DIR"
        if device.type != "cuda":
            return f"only for CUDA, and the tensors are on the {device.type}"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "only for Hopper GPUs (compute capability 9.x)"
        return None if (self.folder / "fa3.py").exists() else f"no fa3.py in {self.folder.name}"

    def bind(self, case: Case, x: Inputs) -> Attention:
        if self.folder is None:
            return super().bind(case, x)
        fa3, options = _load(self.folder), self._options(case, x)

        class Attend(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out, lse = fa3.forward(q, k, v, **options)
                ctx.save_for_backward(q, k, v, out, lse)
                found: Tensor = out
                return found

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                return fa3.backward(grads[0], *ctx.saved_tensors, **options)

        attention: Attention = Attend.apply
        return attention

    def forward(self, case: Case, x: Inputs) -> Answer:
        if self.folder is None:
            return super().forward(case, x)
        fa3, options = _load(self.folder), self._options(case, x)
        options |= self.splits(case, fa3.forward)
        return lambda: {"out": fa3.forward(x.q, x.k, x.v, **options)[0]}

    def backward(self, case: Case, x: Inputs) -> Answer:
        if self.folder is None:
            return super().backward(case, x)
        fa3, options = _load(self.folder), self._options(case, x)
        out, lse = fa3.forward(x.q, x.k, x.v, **options)
        if case.deterministic:
            options["deterministic"] = True
        return lambda: _named(fa3.backward(x.dout, x.q, x.k, x.v, out, lse, **options))

    def lse(self, case: Case, x: Inputs) -> Tensor | None:
        if self.folder is None:
            return None
        fa3, options = _load(self.folder), self._options(case, x)
        found: Tensor = fa3.forward(x.q, x.k, x.v, **options, **self.splits(case, fa3.forward))[1]
        return found

    def splits(self, case: Case, attend: Callable[..., Any]) -> dict[str, int]:
        """Its default is one split; 0 is its own choice, which few queries need."""
        asks = case.queries is not None and "num_splits" in signature(attend).parameters
        return {"num_splits": 0} if asks else {}

    def _options(self, case: Case, x: Inputs) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": case.causal}
        if case.window is not None:
            options = {"causal": False, "window": (case.before, case.after)}
        if x.cu is not None:
            options |= {"cu_q": x.cu, "cu_k": x.cu, "max_q": case.longest, "max_k": case.longest}
        return options

    def version(self) -> str:
        return super().version() if self.folder is None else "FlashAttention-3, from the given folder"


@cache
def _load(folder: Path) -> Any:
    spec = util.spec_from_file_location("fa3", folder / "fa3.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Xformers(Provider):
    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"only for CUDA, and the tensors are on the {device.type}"
        return _absent("xformers.ops", "memory_efficient_attention")

    def refuses(self, case: Case, which: str) -> str | None:
        return "its grouped heads have no backward" if case.heads != case.kv_heads else None

    def bind(self, case: Case, x: Inputs) -> Attention:
        attend = import_module("xformers.ops").memory_efficient_attention
        biases = import_module("xformers.ops.fmha.attn_bias")
        if case.lengths:
            bias = biases.BlockDiagonalCausalMask if case.causal else biases.BlockDiagonalMask
            packed = bias.from_seqlens(list(case.lengths))
            return lambda q, k, v: _first(attend(q[None], k[None], v[None], attn_bias=packed))[0]
        if case.window is not None:
            local = biases.LowerTriangularFromBottomRightLocalAttentionMask(case.window + 1)
            return lambda q, k, v: _first(attend(q, k, v, attn_bias=local))
        mask = biases.LowerTriangularMask() if case.causal else None
        return lambda q, k, v: _first(attend(q, k, v, attn_bias=mask))

    def version(self) -> str:
        return _version("xformers")


@dataclass(frozen=True)
class FlashInfer(Provider):
    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"only for CUDA, and the tensors are on the {device.type}"
        return _absent("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")

    def refuses(self, case: Case, which: str) -> str | None:
        return "made for inference: no backward" if which == "backward" else None

    def bind(self, case: Case, x: Inputs) -> Attention:
        workspace = torch.empty(2**28, dtype=torch.uint8, device=x.q.device)
        wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            _ends(case, x, case.n_q), _ends(case, x, case.seq), case.heads, case.kv_heads, case.dim, case.dv,
            causal=case.causal, window_left=case.before, q_data_type=x.q.dtype,
        )  # fmt: skip
        return lambda q, k, v: wrapper.run(*(y.flatten(0, -3) for y in (q, k, v))).view(*q.shape[:-1], -1)

    def version(self) -> str:
        return _version("flashinfer-python")


def _absent(module: str, name: str) -> str | None:
    """Why `from module import name` fails, None where it works."""
    try:
        if hasattr(import_module(module), name):
            return None
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:
        return f"importing {module} fails: {first_line(error)}"
    return f"{module} has no {name}"


def _first(result: Any) -> Tensor:
    """Some versions return (out, lse), some only out."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return distribution


def first_line(error: BaseException) -> str:
    """
    >>> first_line(ValueError("no\\nbecause"))
    'ValueError: no'
    """
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0][:300]}" if words else type(error).__name__


@dataclass(frozen=True)
class Roster:
    """Everyone known, and the names of those asked to take part."""

    known: Mapping[str, Provider]
    asked: tuple[str, ...] = field(default=())

    def taking_part(self) -> list[Provider]:
        return [provider for name, provider in self.known.items() if name in self.asked]


# Default peers: the fast ones; the others by name or with `--peers all`.
DEFAULT = {"cuda": ("cudnn", "fa2", "flash-attn", "fa3", "fa4"), "cpu": ("sdpa", "naive")}


def roster(device: torch.device, peers: tuple[str, ...] | None = None, fa3: Path | None = None) -> Roster:
    """tilewise's backends and the peers that were named; unknown names are an error.

    >>> roster(torch.device("cpu"), ("naive",)).asked
    ('tilewise-reference', 'tilewise-triton', 'tilewise-hopper', 'naive')
    """
    ours = [Tilewise(f"{OURS}-{backend}", f"tilewise, backend={backend!r}", backend) for backend in NAMES[1:]]
    others = [
        Sdpa("sdpa", "torch SDPA, torch's own choice"),
        Sdpa("cudnn", "torch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION, cpu=False),
        TorchFlash("fa2", "torch SDPA, FlashAttention-2", SDPBackend.FLASH_ATTENTION, cpu=False),
        Sdpa("efficient", "torch SDPA, memory-efficient", SDPBackend.EFFICIENT_ATTENTION, cpu=False),
        Flex("flex", "torch FlexAttention, compiled"),
        Naive("naive", "the textbook in torch, the whole matrix"),
        FlashAttn("flash-attn", "flash-attn 2"),
        FlashAttn3("fa3", "FlashAttention-3", folder=fa3),
        FlashAttn("fa4", "FlashAttention-4", "flash_attn.cute", None),
        Xformers("xformers", "xformers memory_efficient_attention"),
        FlashInfer("flashinfer", "FlashInfer, ragged prefill"),
    ]
    known = {provider.name: provider for provider in [*ours, *others]}
    backends = tuple(provider.name for provider in ours)
    if device.type == "cuda":  # the reference is for CPUs and for reading
        backends = tuple(name for name in backends if name != f"{OURS}-reference")
    if peers is None:
        peers = DEFAULT.get(device.type, DEFAULT["cpu"])
    elif peers == ("all",):
        peers = tuple(known)
    for name in peers:
        if name not in known:
            raise AttentionError("--peers", name, f"'all', or of: {', '.join(known)}")
    return Roster(known, tuple(dict.fromkeys((*backends, *peers))))
