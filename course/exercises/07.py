"""Lesson 7: coalescing.

A row-major matrix starts at address 0. At one instant, lane t of a warp reads element (0, t) if lane_axis is 1, and element
(t, 0) if it is 0, for t = 0 .. 31. Memory comes in lines of 128 bytes.
"""


def lines(columns: int, itemsize: int, lane_axis: int) -> int:
    """How many lines the warp touches."""
    raise NotImplementedError
