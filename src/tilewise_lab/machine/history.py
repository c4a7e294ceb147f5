"""Why machines look as they do: more transistors every year, and since about 2005 no faster ones.

>>> f"{years_to_double('transistors', CHIPS[0], CHIPS[-1]):.1f}"
'2.0'
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Chip(NamedTuple):
    name: str
    year: int
    transistors: float
    clock: float  # MHz


CHIPS = (  # as their makers state them
    Chip("Intel 4004", 1971, 2.3e3, 0.74),
    Chip("Intel 8086", 1978, 29e3, 5),
    Chip("Intel Pentium", 1993, 3.1e6, 66),
    Chip("Intel Pentium 4", 2000, 42e6, 1500),
    Chip("NVIDIA G80", 2006, 681e6, 1350),
    Chip("NVIDIA GP100", 2016, 15.3e9, 1480),
    Chip("NVIDIA GA100", 2020, 54.2e9, 1410),
    Chip("NVIDIA GH100", 2022, 80e9, 1830),
)

# Ten years of inference on one GPU, from the K20X to the H100, as Bill Dally accounts for them: a factor of 1000.
GAINS = {"number formats": 16.0, "instructions for matrices": 12.5, "process": 2.5, "sparsity": 2.0}


def years_to_double(what: str, first: Chip, last: Chip) -> float:
    """Of "transistors" or "clock", on the way from one chip to another."""
    doublings = math.log2(getattr(last, what) / getattr(first, what))
    return (last.year - first.year) / doublings
