def phases(iteration: int, buffers: int) -> tuple[int, int, int]:
    full = iteration // buffers % 2
    return iteration % buffers, full, 1 - full
