def registers(consumers: int, producer: int) -> int:
    rest = 65536 - 128 * producer
    return rest // (128 * consumers) // 8 * 8


def phases(iteration: int, buffers: int) -> tuple[int, int, int]:
    full = iteration // buffers % 2
    return iteration % buffers, full, 1 - full


def ring_time(n: int, buffers: int, load: int, compute: int) -> int:
    loaded, done = 0, []
    for i in range(n):
        free = done[i - buffers] if i >= buffers else 0
        loaded = max(loaded, free) + load
        done.append(max(loaded, done[-1] if done else 0) + compute)
    return done[-1]
