def slots(iterations: int, stages: int) -> int:
    return stages + iterations - 1


def most_stages(tile: int, kept: int, shared: int) -> int:
    return max(0, (shared - kept) // (2 * tile))


def finish(iterations: int, durations: list[int]) -> int:
    free = [0] * len(durations)
    for _ in range(iterations):
        now = 0
        for stage, duration in enumerate(durations):
            now = max(now, free[stage]) + duration
            free[stage] = now
    return free[-1]
