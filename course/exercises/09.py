"""Lesson 9: a pipeline whose stages take different times.

`durations[s]` is the time of stage s. Every stage is one unit: it serves one iteration at a time, in order. An iteration
enters a stage as soon as it has left the one before and the unit is free. All iterations are ready at time 0.
"""


def finish(iterations: int, durations: list[int]) -> int:
    """When the last iteration leaves the last stage."""
    raise NotImplementedError
