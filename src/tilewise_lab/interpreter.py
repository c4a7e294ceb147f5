"""What Triton's interpreter lacks for tests of kernels: bfloat16, and some of its time.

It keeps bfloat16 as raw bits: casts truncate, and a matrix product multiplies the bits. And it makes the language its
own again at every call of a helper, which takes half of its time.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits -> float32"""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, to nearest, ties to even"""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def teach_bfloat16() -> None:
    builder: Any = interpreter.InterpreterBuilder
    convert, create_dot = interpreter._convert_float, builder.create_dot

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return narrow(data)
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(data)
        return convert(data, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return create_dot(self, a, b, d, *rest)

    interpreter._convert_float, builder.create_dot = convert_float, dot


def patch_once_per_launch() -> None:
    """A kernel's launch patches the whole language, and its helpers leave it at that."""
    patch = interpreter._patch_lang
    whole = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: patch(whole)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
