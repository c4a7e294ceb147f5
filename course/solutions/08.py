View = tuple[list[int], list[int]]


def swap(shape: list[int], strides: list[int], a: int, b: int) -> View:
    shape, strides = list(shape), list(strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return shape, strides


def split_heads(shape: list[int], strides: list[int], heads: int) -> View:
    *outer, width = shape
    *steps, step = strides
    d = width // heads
    return [*outer, heads, d], [*steps, d * step, step]


def merge_axes(shape: list[int], strides: list[int]) -> int | None:
    axes = [x for x in zip(shape, strides, strict=True) if x[0] != 1]
    if not axes:
        return 1
    step = axes[-1][1]
    expected = step
    for size, stride in reversed(axes):
        if stride != expected:
            return None
        expected *= size
    return step
