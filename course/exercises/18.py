"""Lesson 18: attention in Triton, forward and backward, in six steps.

Fill them in from top to bottom; steps 1 and 2 are exercise 1, step 3 is
exercise 2, and steps 4 to 6 are exercise 3. After each step
`tilewise learn --check 18 exercise_18.py` says how far you are.

One head, no batch: q, k, v, o, do, dq, dk, dv are contiguous (n, D) matrices
of float32, lse and delta (n,) vectors; all are pointers here. D and the
blocks are powers of two from 16 on; n is any number. i counts queries, j
keys; with CAUSAL a query sees the keys j <= i.
`tl.dot(a, b, input_precision="ieee")` multiplies float32 exactly. To run on a
GPU, take the line with TRITON_INTERPRET away.

---

第 18 课：用 Triton 写注意力，前向和反向，分六步。

从上到下逐个填写；第 1、2 步是练习 1，第 3 步是练习 2，第 4 到 6 步是练习 3。
每写完一步，`tilewise learn --check 18 exercise_18.py` 会告诉你做到了哪里。

一个头，没有 batch：q、k、v、o、do、dq、dk、dv 是连续的 (n, D) float32 矩阵，
lse 和 delta 是 (n,) 向量；在这里都是指针。D 和块大小是从 16 起的 2 的幂；
n 任意。i 数查询，j 数键；有 CAUSAL 时，查询看得到 j <= i 的键。
`tl.dot(a, b, input_precision="ieee")` 精确地做 float32 乘法。要在 GPU 上
运行，去掉带 TRITON_INTERPRET 的那一行。
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl


@triton.jit
def load_tile(x, first, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """Exercise 1, step 1: rows first to first + BLOCK of the (n, D) matrix at
    x, as a (BLOCK, D) tile; zeros past row n.

    ---
    练习 1，第 1 步：x 处 (n, D) 矩阵的第 first 到 first + BLOCK 行，取成
    (BLOCK, D) 的块；超出第 n 行的填零。
    """
    raise NotImplementedError


@triton.jit
def online_step(m, l, acc, s, v_tile):
    """Exercise 1, step 2: (m, l, acc) after one more block of scores s
    (M, N), some of them -inf, with the values v_tile (N, D). A row that has
    seen nothing stays (-inf, 0, 0).

    ---
    练习 1，第 2 步：再看一块分数 s (M, N)（有些是 -inf）和值 v_tile (N, D)
    之后的 (m, l, acc)。什么都没看到的行保持 (-inf, 0, 0)。
    """
    raise NotImplementedError


@triton.jit
def forward(
    q, k, v, o, lse, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Exercise 2, step 3: program p owns queries p · BLOCK_M and on. Keys past
    n, and those after the query if CAUSAL, have score -inf. Store o and
    lse = m + log l.

    ---
    练习 2，第 3 步：程序 p 负责从 p · BLOCK_M 起的查询。超出 n 的键，以及
    CAUSAL 时查询之后的键，分数为 -inf。写出 o 和 lse = m + log l。
    """
    raise NotImplementedError


@triton.jit
def block_gradient(s, lse, do_tile, v_tile, delta):
    """Exercise 3, step 4: (P, dS) of a block, by lesson 13: P = exp(S - L),
    dS = P ∘ (dO Vᵀ - δ).

    ---
    练习 3，第 4 步：按第 13 课求一块的 (P, dS)：P = exp(S - L)，
    dS = P ∘ (dO Vᵀ - δ)。
    """
    raise NotImplementedError


@triton.jit
def backward_keys(
    q, k, v, do, lse, delta, dk, dv, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Exercise 3, step 5: program p owns keys p · BLOCK_N and on, walks over
    the queries that see them, and stores dk and dv.

    ---
    练习 3，第 5 步：程序 p 负责从 p · BLOCK_N 起的键，走过看得到它们的查询，
    写出 dk 和 dv。
    """
    raise NotImplementedError


@triton.jit
def backward_queries(
    q, k, v, do, lse, delta, dq, n, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Exercise 3, step 6: program p owns queries p · BLOCK_M and on, walks over
    the keys they see, and stores dq.

    ---
    练习 3，第 6 步：程序 p 负责从 p · BLOCK_M 起的查询，走过它们看得到的键，
    写出 dq。
    """
    raise NotImplementedError
