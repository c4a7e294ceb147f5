View = tuple[list[int], list[int]]


def split_heads(shape: list[int], strides: list[int], heads: int) -> View:
    *outer, width = shape
    *steps, step = strides
    d = width // heads
    return [*outer, heads, d], [*steps, d * step, step]


def swap(shape: list[int], strides: list[int], a: int, b: int) -> View:
    shape, strides = list(shape), list(strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return shape, strides
