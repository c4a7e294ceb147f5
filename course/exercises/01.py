"""Lesson 1: attention, and why it is slow.

Q, K, V and O of one head are (n, d); S = Q Kᵀ / √d and P = softmax(S) are
(n, n). The textbook runs three kernels: S = Q Kᵀ, P = softmax(S), O = P V.

---

第 1 课：注意力，以及它为什么慢。

单个头的 Q、K、V、O 是 (n, d)；S = Q Kᵀ / √d 和 P = softmax(S) 是 (n, n)。
教科书式的实现运行三个 kernel：S = Q Kᵀ，P = softmax(S)，O = P V。
"""

import torch  # noqa: F401
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exercise 1. softmax(Q Kᵀ / √d) V of one head.

    ---
    练习 1。单个头的 softmax(Q Kᵀ / √d) V。
    """
    raise NotImplementedError


def intensity(n: int, d: int, itemsize: int) -> float:
    """Exercise 2. FLOPs per byte of the naive forward.

    Count the FLOPs of the two products (2 per multiply-add; softmax's few are
    not counted), and the bytes that each of the three kernels reads and
    writes; an element has `itemsize` bytes.

    ---
    练习 2。朴素前向：每字节多少 FLOP。

    数出两个矩阵乘法的 FLOP（一次乘加算 2；softmax 的那一点不计），以及三个
    kernel 各自读写的字节数；每个元素 `itemsize` 字节。
    """
    raise NotImplementedError


def seconds(n: int, d: int, itemsize: int, peak: float, rate: float) -> float:
    """Exercise 3. The time of the naive forward, by the roofline.

    A kernel takes as long as its FLOPs at `peak` FLOP/s or as its bytes at
    `rate` bytes/s, whichever is longer. The three kernels run one after the
    other. Softmax's FLOPs are not counted.

    ---
    练习 3。用 roofline 算出朴素前向的时间。

    一个 kernel 的时间，是它的 FLOP 以 `peak` FLOP/s 计算的时间，或它的字节以
    `rate` 字节/秒搬运的时间，取较长的一个。三个 kernel 依次运行。softmax 的
    FLOP 不计。
    """
    raise NotImplementedError
