def attainable(flops: float, moved: float, peak: float, rate: float) -> float:
    return min(peak, flops / moved * rate)


def best_batch(
    tokens: int, heads: int, tile: int, slots: int, limit: int
) -> int:
    busy = []
    for batch in range(1, limit + 1):
        blocks = -(-tokens // tile) * heads * batch
        waves = -(-blocks // slots)
        busy.append(blocks / (waves * slots))
    return 1 + busy.index(max(busy))


def makespan(work: list[int], slots: int) -> int:
    free = [0] * slots
    for one in work:
        first = free.index(min(free))
        free[first] += one
    return max(free)
