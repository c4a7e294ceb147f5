"""Calls that are parts of a larger one: mods and dropout go by where they lie in it, and results are float32."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import DEVICE
from tests.covering import cases
from tests.tilewise.distributed.cases import CASES, Inputs, faults, make, planned, run
from tilewise.distributed import rehearse


def to_device(inputs: Inputs) -> Inputs:
    def moved(x):
        return [y.to(DEVICE) for y in x] if isinstance(x, list) else x.to(DEVICE)

    terms = {name: moved(x) for name, x in inputs.terms.items()}
    cu = None if inputs.cu is None else inputs.cu.to(DEVICE)
    return Inputs(*(x.to(DEVICE) for x in inputs[:5]), terms, cu)


# the others take minutes in the interpreter
@cases(
    "name, layout",
    [("alibi", "zigzag")],
    [("dropout", "striped"), ("score mod", "striped"), ("documents, all", "zigzag"), ("bias", "zigzag")],
)
def test_parts_make_the_whole(name, layout):
    case = CASES[name]
    inputs = to_device(make(case, 19))
    strategy = "two-level" if layout == "zigzag" and name != "bias" else "ring"
    made = planned(case, 2, 19, strategy=strategy, layout=layout, node=2)
    ours = run(case, inputs, lambda q, k, v, **o: rehearse(q, k, v, plan=made, backend="triton", **o))
    assert not (found := faults(ours, case, inputs)), found


@pytest.mark.slow
def test_half_precision_is_rounded_once():
    case = CASES["causal"]
    inputs = to_device(make(case, 24, torch.float16))
    made = planned(case, 3, 24, strategy="ring")
    ours = run(case, inputs, lambda q, k, v, **o: rehearse(q, k, v, plan=made, backend="triton", **o))
    assert not (found := faults(ours, case, inputs)), found
