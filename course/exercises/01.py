"""Lesson 1: the arithmetic intensity of naive attention.

Three kernels: S = Q Kᵀ, P = softmax(S), O = P V. Q, K, V, O are (n, d); S, P are (n, n). Count the FLOPs of the two
products (2 per multiply-add; softmax's few are not counted) and the bytes that each kernel reads and writes.
"""


def intensity(n: int, d: int, itemsize: int) -> float:
    """FLOPs per byte of one head's naive forward pass."""
    raise NotImplementedError
