"""The course in a terminal: what its lessons import, and what lists, runs and grades them.

say       the one of two sentences that the reader reads
picture   draw with matplotlib into a file, or say kindly that it is not installed
measured  what a GPU says: this one, or else the one whose numbers are kept in the course
expect    one line of a checker
compare   an answer's result with the exact one, and with those of usual mistakes
step      of an exercise that is graded step by step
"""

from tilewise_lab.language import say
from tilewise_lab.learn.lab import measured
from tilewise_lab.learn.tools import compare, expect, has_triton, picture, show, step

__all__ = ["compare", "expect", "has_triton", "measured", "picture", "say", "show", "step"]
