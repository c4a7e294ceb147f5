import random

from tilewise_lab.learn import compare
from tilewise_lab.machine.coalesce import strided, touched


def launch(answer):
    for n, block in ((8, 32), (1_000_000, 32), (1000, 128), (1, 1)):
        blocks = -(-n // block)
        compare(
            f"launch({n}, {block})",
            tuple(answer.launch(n, block)),
            (blocks, blocks * block - n),
            (
                (n // block, n % block),
                "n // block leaves out the last, partial block: round up",
                "n // block 漏了最后不满的一块：要向上取整",
            ),
            (
                (n // block + 1, (n // block + 1) * block - n),
                "one block too many where block divides n: round up, ⌈n / block⌉",
                "block 整除 n 时多了一块：应向上取整，⌈n / block⌉",
            ),
            (
                (blocks, n % block),
                "n % block are the threads of the last block that *have* an element",
                "n % block 是最后一块里*有*元素的线程数",
            ),
        )


def lines(answer):
    for columns in (4096, 1, 2, 8, 31, 32, 33, 100):
        for itemsize in (4, 1, 2, 8):
            for axis in (1, 0):
                step, across = (
                    (itemsize, columns * itemsize)
                    if axis
                    else (columns * itemsize, itemsize)
                )
                compare(
                    f"lines({columns}, {itemsize}, {axis})",
                    answer.lines(columns, itemsize, axis),
                    touched(strided(1 if axis else columns), itemsize).lines,
                    (
                        len({t * across // 128 for t in range(32)}),
                        "the axes are exchanged: along a row the addresses are itemsize apart, along a column columns · itemsize",
                        "两个方向弄反了：沿着行，地址相隔 itemsize；沿着列，相隔 columns · itemsize",
                    ),
                    (
                        32 * step // 128,
                        "this is the distance divided by 128: count the lines, at least 1, and those in between only if a lane reads there",
                        "这是距离除以 128：要数碰到的行，至少 1 行；没有 lane 读到的行不算",
                    ),
                    (
                        32 if axis == 0 else 1,
                        "this is right for 4096 floats a row; with short rows several lanes share a line, with 8-byte elements a row needs two",
                        "每行 4096 个浮点数时才是这样；行短时几个 lane 共用一行，元素为 8 字节时要两行",
                    ),
                )


def branch_cycles(answer):
    numbers = random.Random(0)
    cases = [
        [True] * 64,
        [False] * 64,
        [n % 2 == 0 for n in range(64)],
        [n < 32 for n in range(64)],
        [True] * 40,
    ]
    for taken in [*cases, [numbers.random() < 0.03 for _ in range(200)]]:
        warps = [
            taken[first : first + 32] for first in range(0, len(taken), 32)
        ]
        exact = sum(10 * any(warp) + 7 * (not all(warp)) for warp in warps)
        compare(
            f"branch_cycles(taken, 10, 7), sum(taken) = {sum(taken)}, len(taken) = {len(taken)}",
            answer.branch_cycles(taken, 10, 7),
            exact,
            (
                sum(
                    max(10 * any(warp), 7 * (not all(warp))) for warp in warps
                ),
                "a mixed warp takes the longer side only: it runs both sides, one after the other",
                "混合的 warp 只算了较长的一边：两边要依次运行",
            ),
            (
                10 * any(taken) + 7 * (not all(taken)),
                "all threads count as one warp: every 32 threads decide by themselves",
                "所有线程被当作一个 warp：每 32 个线程各自决定",
            ),
            (
                sum(10 if t else 7 for t in taken),
                "every thread is counted by itself: the lanes of a warp run together",
                "每个线程单独计算了：同一个 warp 的 lane 是一起运行的",
            ),
            (
                17 * len(warps),
                "every warp runs both sides here: one whose lanes agree runs only that side",
                "每个 warp 都算了两边：lane 走向一致时只运行那一边",
            ),
        )


EXERCISES = (launch, lines, branch_cycles)
