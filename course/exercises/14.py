"""Lesson 14: a ring of buffers and the phases of its barriers.

A barrier starts in phase 0 and flips each time it completes. A wait names a phase and returns once that phase has
completed; waiting for the phase *before* the first (phase 1) returns at once. Iteration i uses a buffer of the ring; `full`
completes once per fill, `empty` once per release. The producer's first wait for `empty` must return at once.
"""


def phases(iteration: int, buffers: int) -> tuple[int, int, int]:
    """(buffer, phase of the consumer's wait for full, phase of the producer's wait for empty)."""
    raise NotImplementedError
