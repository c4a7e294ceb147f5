"""The environment variables of the library. No other module reads the environment (tests/test_structure.py).

Each is read when a call needs it, so a change through `os.environ` has an effect on the next call. TILEWISE_TARGET and
TILEWISE_TILES decide how kernels are compiled: they are read at the first call on a GPU, and hold for the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from .errors import AttentionError

CHECK, KV_TILE, NO_OVERLAP = "TILEWISE_CHECK", "TILEWISE_KV_TILE", "TILEWISE_NO_OVERLAP"
INTERPRET = "TRITON_INTERPRET"
TARGET, TILES = "TILEWISE_TARGET", "TILEWISE_TILES"
BEFORE_TRITON = "it to be set before Python starts, or above all imports (torch.compile, for one, imports Triton)"

# `os.environ.get` encodes the name and raises KeyError inside: 2.6 us for a variable that is not set. This is the dict
# in it, with encoded names: 0.04 us.
_variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_encoded = os.environ.encodekey if _variables is not os.environ else str
_CHECK, _KV_TILE, _NO_OVERLAP, _INTERPRET = map(_encoded, (CHECK, KV_TILE, NO_OVERLAP, INTERPRET))
_OFF = (None, "", "0", b"", b"0")


def checks_contents() -> bool:
    """TILEWISE_CHECK: whether calls check the contents of their tensors, which waits for a GPU."""
    return _variables.get(_CHECK) not in _OFF


def of_kernels() -> tuple[Any, Any]:
    """What the kernels of a call depend on, as part of its signature."""
    return _variables.get(_KV_TILE), _variables.get(_NO_OVERLAP)


def kv_tile() -> str | None:
    """TILEWISE_KV_TILE: the tile of the decode kernels, for measurements."""
    return os.environ.get(KV_TILE)


def allows_overlap() -> bool:
    """TILEWISE_NO_OVERLAP: whether a kernel may start before the one ahead of it has ended (pdl.py)."""
    return _variables.get(_NO_OVERLAP) in _OFF


def interprets() -> bool:
    """TRITON_INTERPRET: whether Triton's kernels run in its interpreter, so that a CPU acts as a GPU.

    Raises:
        AttentionError: the variable was set after Triton was imported. Triton reads it when a kernel is defined, so
            the kernels that are there cannot be interpreted.
    """
    value = os.environ.get(INTERPRET)
    if value is None or value.lower() not in ("1", "true", "yes", "on", "y"):  # as Triton reads it
        return False
    language = sys.modules.get("triton.language")
    if type(getattr(language, "sum", None)).__name__ == "JITFunction":
        raise AttentionError(INTERPRET, f"{value}, set after Triton was imported", BEFORE_TRITON)
    return True


def may_interpret() -> bool:
    """Whether TRITON_INTERPRET has a value, which `interprets` reads."""
    return _variables.get(_INTERPRET) is not None


def target() -> str:
    """TILEWISE_TARGET: an older architecture, such as sm_80, whose code runs on this GPU; "" for the GPU's own."""
    return os.environ.get(TARGET, "")


def tiles_file() -> str:
    """TILEWISE_TILES: the name of a file with tiles that were measured on the user's own GPU; "" for none."""
    return os.environ.get(TILES, "")


def batch_invariant() -> bool:
    """VLLM_BATCH_INVARIANT, vLLM's: whether results must not depend on the rest of the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT") not in _OFF


def of_child(folder: str) -> dict[str, str]:
    """The environment of a child process that imports tilewise from a folder."""
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths}
