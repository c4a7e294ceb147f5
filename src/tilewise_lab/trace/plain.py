"""Tensors as JSON."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def plain(x: Any) -> Any:
    """Lists of numbers; an infinity or a NaN, which JSON lacks, becomes its name.

    >>> import torch
    >>> plain({"m": torch.tensor([1.0, -torch.inf]), "j": (0, 1)})
    {'m': [1.0, '-inf'], 'j': [0, 1]}
    """
    if isinstance(x, Tensor):
        return plain(x.tolist())
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
