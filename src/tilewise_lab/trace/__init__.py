"""What the reference does, step by step, as data: the course prints it, the explorer animates it, tests count it.

    softmax    online softmax beside its wrong twin, element by element
    attention  a head tile by tile, forward and backward, with every load and
               store between the two memories
    graph      reverse-mode differentiation of a small expression, node by node

Every function returns plain lists, dicts, numbers and strings (infinities are "-inf" and "inf"): JSON as it stands.
The numbers come from `tilewise.backends.reference`; nothing is computed twice.
"""

from tilewise_lab.trace.attention import attention
from tilewise_lab.trace.graph import notes_example
from tilewise_lab.trace.softmax import softmax

__all__ = ["attention", "notes_example", "softmax"]
