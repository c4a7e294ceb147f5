"""Lesson 1: the arithmetic intensity of naive attention.

Three kernels: S = Q Kᵀ, P = softmax(S), O = P V. Q, K, V, O are (n, d); S, P are (n, n). Count the FLOPs of the two
products (2 per multiply-add; softmax's few are not counted) and the bytes that each kernel reads and writes.

---

第 1 课：朴素注意力的算术强度。

三个 kernel：S = Q Kᵀ，P = softmax(S)，O = P V。Q、K、V、O 是 (n, d)；S、P 是 (n, n)。数出两个矩阵乘法的 FLOP（一次乘加算 2；
softmax 的那一点不计），以及每个 kernel 读写的字节数。
"""


def intensity(n: int, d: int, itemsize: int) -> float:
    """FLOPs per byte of one head's naive forward pass. --- 单个头的朴素前向：每字节多少 FLOP。"""
    raise NotImplementedError
