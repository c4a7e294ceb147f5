from tilewise_lab.costs.waves import waves
from tilewise_lab.learn import compare, expect


def attainable(answer):
    for flops, moved, peak, rate in (
        (1e12, 1e12, 1e15, 4e12),
        (1e12, 1e9, 1e15, 4e12),
        (6e9, 2e9, 1e13, 2e12),
    ):
        compare(
            f"attainable({flops:g}, {moved:g}, {peak:g}, {rate:g})",
            float(answer.attainable(flops, moved, peak, rate)),
            min(peak, flops / moved * rate),
            (
                flops / moved * rate,
                "the flat roof is missing: never more than peak",
                "漏了平顶：不会超过 peak",
            ),
            (
                max(peak, flops / moved * rate),
                "this is the higher of the two roofs: the lower one limits",
                "这是两个屋顶中较高的：起限制作用的是较低的",
            ),
            (
                min(peak, moved / flops * rate),
                "the intensity is upside down: FLOPs per byte",
                "算术强度颠倒了：应为每字节多少 FLOP",
            ),
            (
                min(peak, rate),
                "rate is in bytes/s: multiply it by the FLOPs per byte",
                "rate 的单位是字节/秒：要乘以每字节的 FLOP",
            ),
        )


def best_batch(answer):
    for tokens, heads, tile, slots, limit in (
        (1000, 12, 128, 132, 16),
        (2048, 8, 128, 108, 32),
        (77, 5, 64, 132, 40),
    ):
        tiles = -(-tokens // tile)
        busy = {
            b: waves(tiles * heads * b, slots).efficiency
            for b in range(1, limit + 1)
        }
        cut = {
            b: waves(max(1, tokens // tile) * heads * b, slots).efficiency
            for b in busy
        }
        got = answer.best_batch(tokens, heads, tile, slots, limit)
        expect(
            got in busy,
            f"{got} is not in 1 .. {limit}",
            f"{got} 不在 1 .. {limit} 之内",
        )
        best = min(busy, key=lambda b: (-busy[b], b))
        compare(
            f"best_batch({tokens}, {heads}, {tile}, {slots}, {limit})",
            got,
            best,
            (
                max(busy, key=lambda b: (busy[b], b)),
                "this batch is as good, but not the smallest",
                "这个 batch 一样好，但不是最小的",
            ),
            (
                max(cut, key=lambda b: (cut[b], -b)),
                "the last, partial tile of the tokens is left out: ⌈tokens / tile⌉",
                "漏了最后不满的一块 token：⌈tokens / tile⌉",
            ),
            (
                limit,
                "the largest batch is not the best one: look at the last wave",
                "最大的 batch 不是最好的：看最后一波",
            ),
            (
                1,
                "a batch of 1 leaves most slots idle",
                "batch 为 1 时大部分 slot 空闲",
            ),
        )


def makespan(answer):
    for work, slots in (
        ([1, 2, 3, 4, 5, 6, 7, 8], 3),
        ([8, 7, 6, 5, 4, 3, 2, 1], 3),
        ([5, 1, 1, 1, 1, 1], 2),
        ([4], 3),
        ([2, 2, 2, 2], 2),
    ):
        free = [0] * slots
        for one in work:
            free[free.index(min(free))] += one
        in_waves = sum(
            max(work[first : first + slots])
            for first in range(0, len(work), slots)
        )
        in_turn = max(sum(work[slot::slots]) for slot in range(slots))
        longest = [0] * slots
        for one in sorted(work, reverse=True):
            longest[longest.index(min(longest))] += one
        compare(
            f"makespan({work}, {slots})",
            answer.makespan(list(work), slots),
            max(free),
            (
                in_waves,
                "you wait for a whole wave: a slot that is free takes the next block at once",
                "你等到了整波结束：slot 一空闲就应接下一个块",
            ),
            (
                in_turn,
                "blocks go to the slots in turn: the next block goes to the slot that is free first",
                "块轮流分给了各个 slot：下一个块应放到最先空闲的 slot",
            ),
            (
                -(-sum(work) // slots),
                "this is the work divided by the slots: a block cannot be divided",
                "这是总工作量除以 slot 数：一个块不能拆开",
            ),
            (
                max(longest),
                "the blocks were sorted: start them in the order of the list",
                "你把块排了序：应按列表的顺序开始",
            ),
        )


EXERCISES = (attainable, best_batch, makespan)
