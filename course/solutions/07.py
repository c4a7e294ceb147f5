def launch(n: int, block: int) -> tuple[int, int]:
    blocks = -(-n // block)
    return blocks, blocks * block - n


def lines(columns: int, itemsize: int, lane_axis: int) -> int:
    step = itemsize if lane_axis == 1 else columns * itemsize
    touched = set()
    for lane in range(32):
        first = lane * step
        touched |= {first // 128, (first + itemsize - 1) // 128}
    return len(touched)


def branch_cycles(taken: list[bool], then: int, other: int) -> int:
    total = 0
    for first in range(0, len(taken), 32):
        warp = taken[first : first + 32]
        total += then * any(warp) + other * (not all(warp))
    return total
