"""The peers that are packages of their own, each a few lines; one that cannot run says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata, util
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise_lab.bench.cases import Case, Inputs
from tilewise_lab.bench.provider import Answer, Attention, Provider, ends, first_line, named, not_cuda


@dataclass(frozen=True)
class FlashAttn(Provider):
    """flash-attn 2, 3 or 4, where it is installed: the same two functions in three modules."""

    module: str = "flash_attn"
    unbounded: int | None = -1

    def missing(self, device: torch.device) -> str | None:
        return not_cuda(device) or _absent(self.module, "flash_attn_func")

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
        if reason := not_cuda(device):
            return reason
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
        v, dout = (pad(t, (0, case.dim - case.dv)) for t in (x.v, x.dout))  # its backward has one head dim
        out, lse = fa3.forward(x.q, x.k, v, **options)
        if case.deterministic:
            options["deterministic"] = True

        def backward() -> dict[str, Tensor]:
            dq, dk, dv = fa3.backward(dout, x.q, x.k, v, out, lse, **options)
            return named((dq, dk, dv[..., : case.dv]))

        return backward

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
        return not_cuda(device) or _absent("xformers.ops", "memory_efficient_attention")

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
        return not_cuda(device) or _absent("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")

    def refuses(self, case: Case, which: str) -> str | None:
        return "made for inference: no backward" if which == "backward" else None

    def bind(self, case: Case, x: Inputs) -> Attention:
        workspace = torch.empty(2**28, dtype=torch.uint8, device=x.q.device)
        wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            ends(case, x, case.n_q), ends(case, x, case.seq), case.heads, case.kv_heads, case.dim, case.dv,
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
