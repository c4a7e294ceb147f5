"""The modules that `tilewise.compat.flash_attn.install` puts in the place of flash-attn's, and the error that an import
of any other module of flash-attn raises."""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "flash_attn"

# What to use in the place of a module that flash-attn has and tilewise has not: the first entry that is the module or
# a package around it. docs/from-flash-attn.md has the same table.
INSTEAD = {
    "flash_attn.losses": "torch.nn.CrossEntropyLoss",
    "flash_attn.ops.rms_norm": "torch.nn.RMSNorm",
    "flash_attn.ops.layer_norm": "torch.nn.LayerNorm",
    "flash_attn.ops.triton.layer_norm": "torch.nn.LayerNorm or torch.nn.RMSNorm",
    "flash_attn.ops.triton.cross_entropy": "torch.nn.functional.cross_entropy",
    "flash_attn.ops.activations": "torch.nn.functional.silu(x) * y for swiglu(x, y)",
    "flash_attn.ops.fused_dense": "torch.nn.Linear",
    "flash_attn.modules": "tilewise.nn.MultiheadAttention for mha.MHA, torch.nn for the others",
    "flash_attn.models": 'a model of transformers with attn_implementation="tilewise"',
    "flash_attn.flash_attn_triton": "tilewise.attention with bias=",
    "flash_attn.flash_blocksparse_attention": "tilewise.attention with mask_mod=",
    "flash_attn.cute": "tilewise.attention",
}
OTHERWISE = "torch, or a copy of that module"


class Missing:
    """A finder of `sys.meta_path` that says why a module of flash-attn is not here. `importlib.util.find_spec` gets
    None, as without it: torch asks so for flash_attn.cute."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        real = getattr(sys.modules.get(PACKAGE), "__file__", None)
        if not real and name.startswith(PACKAGE + ".") and _is_import():
            raise ModuleNotFoundError(reason(name), name=name)


def _is_import() -> bool:
    """Whether the finder was asked by an import, and not by `importlib.util.find_spec`. Only the caller tells."""
    frame = inspect.currentframe()
    for _ in range(3):  # the finder, importlib's _find_spec, and who called that
        frame = None if frame is None else frame.f_back
    return frame is not None and frame.f_code.co_name == "_find_and_load_unlocked"


def reason(name: str) -> str:
    """Why there is no module of this name, and what to use.

    >>> reason("flash_attn.losses.cross_entropy").partition("; ")[2][:30]
    'use torch.nn.CrossEntropyLoss.'
    """
    outer = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
    use = next((INSTEAD[x] for x in outer if x in INSTEAD), OTHERWISE)
    there = sorted(x for x in sys.modules if x.startswith(PACKAGE + ".") and not hasattr(sys.modules[x], "__path__"))
    return (
        f"No module named {name!r}: tilewise.compat.flash_attn.install() has flash-attn's attention functions, not "
        f"this module; use {use}. Modules of flash_attn that work: {', '.join(there)}"
    )


def package(name: str, **names: Any) -> ModuleType:
    return module(name, {"__path__": [], **names})


def module(name: str, names: dict[str, Any]) -> ModuleType:
    """A module of this name, with those of `names` that are public. Imports find it from now on."""
    made = ModuleType(name, "flash-attn's functions, by tilewise: see tilewise.compat.flash_attn")
    vars(made).update({k: x for k, x in names.items() if not k.startswith("_") or k in ("__version__", "__path__")})
    made.__spec__ = ModuleSpec(name, None, is_package="__path__" in names)
    sys.modules[name] = made
    return made
