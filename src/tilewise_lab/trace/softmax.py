"""Online softmax, element by element, beside the version that forgets to correct.

>>> trace = softmax([3, 2, 5, 1])
>>> [round(step["l"], 6) for step in trace["right"]["steps"]]
[1.0, 1.367879, 1.185122, 1.203438]
>>> [round(step["l"], 6) for step in trace["wrong"]["steps"]]
[1.0, 1.367879, 2.367879, 2.386195]

The JSON:

    kind   "softmax";  x: the input
    right  steps: [{i, x, m, factor, kept, term, l, ok}], i counting from 1: the
           correction factor exp(m_old - m), what it leaves of the old sum
           (kept = factor · l_old), the new term exp(x - m), and l = kept + term
           out: the softmax;  lse: m + log l
    wrong  the same without the factor; ok says whether l is still the sum over
           the elements so far
    loads  how often each version reads an element: {"safe", "online"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise_lab.derivation import softmax as rungs
from tilewise_lab.trace.plain import plain


def softmax(x: Sequence[float] | Tensor) -> dict[str, Any]:
    x = torch.as_tensor(x, dtype=torch.float64)
    return {
        "kind": "softmax",
        "x": plain(x),
        "right": _run(x, rungs.online_states(x), corrected=True) | {"lse": plain(rungs.logsumexp(x))},
        "wrong": _run(x, rungs.wrong_local_max_states(x), corrected=False),
        "loads": {name: loads(getattr(rungs, name), x) for name in ("safe", "online")},
    }


def _run(x: Tensor, states: Iterable[rungs.State], *, corrected: bool) -> dict[str, Any]:
    steps = []
    old = rungs.nothing(x)
    for i, state in enumerate(states):
        factor = rungs.correction(old.m, state.m) if corrected else torch.ones_like(state.l)
        exact = torch.exp(x[: i + 1] - x[: i + 1].max()).sum()
        steps.append(
            {
                "i": i + 1,
                "x": x[i],
                "m": state.m,
                "factor": factor,
                "kept": factor * old.l,
                "term": rungs.correction(x[i], state.m),
                "l": state.l,
                "ok": bool(torch.isclose(state.l, exact, rtol=1e-12)),
            }
        )
        old = state
    out: dict[str, Any] = plain({"steps": steps, "out": rungs.correction(x, old.m) / old.l})
    return out


def loads(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """How often a function reads each element of a vector.

    >>> x = torch.rand(10)
    >>> loads(rungs.safe, x), loads(rungs.online, x)
    (3.0, 2.0)
    """

    class Counter(TorchFunctionMode):
        elements = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__ and args[0] is x:
                self.elements += result.numel()
            return result

    with Counter() as counter:
        function(x)
    return float(counter.elements / x.numel())
