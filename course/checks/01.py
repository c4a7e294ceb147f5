import torch

from tilewise_lab.learn import compare


def attention(answer):
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 4, dtype=torch.float64) for _ in range(3))
    s = q @ k.T
    compare(
        "attention(q, k, v)",
        answer.attention(q, k, v),
        torch.softmax(s / 2, -1) @ v,
        (
            torch.softmax(s, -1) @ v,
            "your output equals the result without the factor 1/√d",
            "你的输出等于漏掉因子 1/√d 的结果",
        ),
        (
            torch.softmax(s / 4, -1) @ v,
            "your output equals the result with 1/d; the factor is 1/√d",
            "你的输出等于用 1/d 的结果；因子是 1/√d",
        ),
        (
            torch.softmax(s / 2, 0) @ v,
            "your softmax runs along the queries: each row, over its keys, must add up to 1",
            "你的 softmax 沿着查询做；每一行（沿着键）的和必须为 1",
        ),
        (
            s / 2 @ v,
            "your output equals (Q Kᵀ / √d) V: the softmax is missing",
            "你的输出等于 (Q Kᵀ / √d) V：漏了 softmax",
        ),
    )


def intensity(answer):
    for n, d, itemsize in ((1024, 64, 2), (4096, 128, 2), (64, 64, 4)):
        flops, rows, square = 4 * n * n * d, 4 * n * d, n * n
        compare(
            f"intensity({n}, {d}, {itemsize})",
            float(answer.intensity(n, d, itemsize)),
            flops / itemsize / (rows + 4 * square),
            (
                flops / 2 / itemsize / (rows + 4 * square),
                "half of the FLOPs are missing: a multiply-add is 2 FLOPs, and there are two products",
                "少了一半 FLOP：一次乘加是 2 FLOP，而且有两个矩阵乘法",
            ),
            (
                flops / itemsize / (rows + 2 * square),
                "two passes over (n, n) are missing: S is written and read, and so is P, four passes",
                "少了两遍 (n, n)：S 要写一次、读一次，P 也一样，一共四遍",
            ),
            (
                flops / itemsize / rows,
                "S and P are missing in the bytes: they are written to memory and read again",
                "字节数里漏了 S 和 P：它们要写到内存里，再读出来",
            ),
            (
                flops / (rows + 4 * square),
                "that is FLOPs per element: multiply the elements by itemsize",
                "这是每个元素的 FLOP：元素个数要乘以 itemsize",
            ),
        )


def seconds(answer):
    for n, d, itemsize, peak, rate in (
        (4096, 128, 2, 1e15, 4.8e12),
        (64, 512, 4, 1e12, 2e12),
        (512, 300, 2, 1e12, 2e12),
    ):
        flops, product = (
            2 * n * n * d / peak,
            (2 * n * d + n * n) * itemsize / rate,
        )
        softmax = 2 * n * n * itemsize / rate
        compare(
            f"seconds({n}, {d}, {itemsize}, {peak:g}, {rate:g})",
            float(answer.seconds(n, d, itemsize, peak, rate)),
            2 * max(flops, product) + softmax,
            (
                max(2 * flops, 2 * product + softmax),
                "you took the maximum of the totals; the kernels run one after the other: take it for each, then add",
                "你对总和取了最大值；三个 kernel 依次运行：先对每个取最大值，再相加",
            ),
            (
                2 * (flops + product) + softmax,
                "you added the time of the FLOPs and the time of the bytes; they overlap: take the longer",
                "你把 FLOP 的时间和搬运的时间相加了；它们同时进行：取较长的一个",
            ),
            (
                2 * max(flops, product),
                "the softmax kernel is missing: it reads S and writes P",
                "漏了 softmax 的 kernel：它读 S，写 P",
            ),
        )


EXERCISES = (attention, intensity, seconds)
