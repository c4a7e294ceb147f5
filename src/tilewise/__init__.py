"""Exact attention for PyTorch, computed tile by tile."""

from .api import attention, attention_varlen
from .merge import merge
from .spec import AttentionError

__all__ = ["AttentionError", "attention", "attention_varlen", "merge"]
__version__ = "0.1.0"
