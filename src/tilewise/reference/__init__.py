"""The derivation, in torch only, rung by rung: `softmax`, `matmul`, `attention`, `gradient`, `tiled`.

Every rung equals the one before it (or says that it is wrong). `tiled` is the last: the CPU backend, and in float64
the oracle of every kernel; its `forward` and `backward` are the package's own.
"""

from tilewise.reference import attention, gradient, matmul, softmax, tiled
from tilewise.reference.tiled import backward, forward

__all__ = ["attention", "backward", "forward", "gradient", "matmul", "softmax", "tiled"]
