def lines(columns: int, itemsize: int, lane_axis: int) -> int:
    step = itemsize if lane_axis == 1 else columns * itemsize
    touched = set()
    for lane in range(32):
        first = lane * step
        touched |= {first // 128, (first + itemsize - 1) // 128}
    return len(touched)
