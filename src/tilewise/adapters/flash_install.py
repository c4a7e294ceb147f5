"""tilewise's functions in the place of the package flash_attn, and the error of an import of what is not there."""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import AttentionError
from . import bert_padding, flash_attn, flash_attn_3, rotary

PACKAGE, VERSION = "flash_attn", "2.8.3"

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


def install() -> None:
    """Let `import flash_attn` (2.8) and `import flash_attn_interface` (3) find these functions; call it before anything
    imports flash-attn.

        tilewise.compat.flash_attn.install()
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    Other modules of that package (losses, normalisations, layers, models) do not exist: their import raises
    ModuleNotFoundError, which says what to use.

    Raises:
        AttentionError: flash_attn is imported already.
    """
    there = sys.modules.get("flash_attn")
    if there is not None and getattr(there, "__file__", None):
        raise AttentionError("install()", "flash_attn is imported already", "a call before anything imports it")
    functions = {name: x for name, x in vars(flash_attn).items() if name.startswith("flash_attn_") and callable(x)}
    interface = module("flash_attn.flash_attn_interface", functions)
    padding = module("flash_attn.bert_padding", vars(bert_padding))
    layers = package("flash_attn.layers", rotary=module("flash_attn.layers.rotary", vars(rotary)))
    rotation = module("flash_attn.ops.triton.rotary", {"apply_rotary": rotary.apply_rotary})
    ops = package("flash_attn.ops", triton=package("flash_attn.ops.triton", rotary=rotation))
    names = {"flash_attn_interface": interface, "bert_padding": padding, "layers": layers, "ops": ops}
    package("flash_attn", __version__=VERSION, **names, **functions)
    module("flash_attn_interface", vars(flash_attn_3))
    if not any(isinstance(x, Missing) for x in sys.meta_path):
        sys.meta_path.append(Missing())


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
