from tilewise_lab.learn import compare
from tilewise_lab.machine.pipeline import pipelined
from tilewise_lab.machine.pipeline import slots as count


def slots(answer):
    compare(
        "slots(7, 4)",
        answer.slots(7, 4),
        count(pipelined(7)),
        (
            28,
            "nothing overlaps: an iteration may enter a stage while the one before is in the next",
            "毫无重叠：前一个迭代进入下一阶段时，后一个就可以进入这一阶段",
        ),
        (
            11,
            "one slot too many: the first iteration takes `stages` slots, each further one adds one",
            "多了一个时隙：第一个迭代要 `stages` 个时隙，之后每个迭代加一个",
        ),
        (
            7,
            "this is the steady state alone: filling the pipeline takes stages - 1 slots more",
            "这只是稳定阶段：填满流水线还要 stages - 1 个时隙",
        ),
    )
    for n, stages in ((1, 4), (3, 1), (100, 5)):
        compare(
            f"slots({n}, {stages})", answer.slots(n, stages), n + stages - 1
        )


def most_stages(answer):
    kib = 1024
    for tile, kept, shared in (
        (16 * kib, 32 * kib, 227 * kib),
        (32 * kib, 32 * kib, 227 * kib),
        (64 * kib, 120 * kib, 227 * kib),
        (16 * kib, 16 * kib, 48 * kib),
        (16 * kib, 60 * kib, 48 * kib),
    ):
        compare(
            f"most_stages({tile}, {kept}, {shared})",
            answer.most_stages(tile, kept, shared),
            max(0, (shared - kept) // (2 * tile)),
            (
                (shared - kept) // (2 * tile),
                "a negative number of stages: if Q alone does not fit, the answer is 0",
                "阶段数是负的：如果光 Q 就放不下，答案是 0",
            ),
            (
                shared // (2 * tile),
                "the tile of Q is missing: `kept` bytes are not free",
                "漏了 Q 的一块：`kept` 字节不能用",
            ),
            (
                max(0, (shared - kept) // tile),
                "a stage holds two tiles, one of K and one of V",
                "一个阶段放两块：K 一块，V 一块",
            ),
            (
                -(-(shared - kept) // (2 * tile)),
                "rounded up: a part of a stage does not fit",
                "向上取整了：放不下不完整的阶段",
            ),
        )


def finish(answer):
    for n, durations in (
        (1, [1, 2, 1]),
        (7, [1, 1, 1, 1]),
        (5, [1, 3, 1]),
        (4, [2, 5, 1, 3]),
        (3, [4]),
        (10, [1, 2, 3, 4]),
    ):
        total, slowest = sum(durations), max(durations)
        compare(
            f"finish({n}, {durations})",
            answer.finish(n, durations),
            total + (n - 1) * slowest,
            (
                n * total,
                "nothing overlaps: an iteration may enter a stage while the one before is in the next",
                "毫无重叠：前一个迭代进入下一阶段时，后一个就可以进入这一阶段",
            ),
            (
                n * slowest,
                "this is the slowest stage alone: the first and the last iteration pass the other stages too",
                "这只是最慢的阶段：第一个和最后一个迭代还要经过其他阶段",
            ),
            (
                total,
                "all iterations are in a stage at once: a stage serves one at a time",
                "所有迭代同时在一个阶段里：一个阶段一次只服务一个",
            ),
            (
                total + n - 1,
                "the slowest stage sets the pace: iterations leave it max(durations) apart",
                "最慢的阶段决定节奏：迭代每隔 max(durations) 离开一个",
            ),
        )


EXERCISES = (slots, most_stages, finish)
