"""The tables of options: what is generated from them is up to date, and each value is checked by itself."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.call.fields import ATTENTION, CACHE
from tilewise_lab import generate

BAD = {  # of each option with a check: values that are not accepted
    "causal": [1, None, "True"],
    "return_lse": [1, None],
    "return_max_logit": [0],
    "deterministic": [1, "yes"],
    "scale": ["1", float("nan"), True, torch.ones(())],
    "softcap": [0.0, -1.0, float("inf")],
    "dropout_p": [1.0, -0.1, "0"],
    "precision": ["fp4", 8],
    "backend": [None, 1],
    "score_mod": [3, "x"],
    "mask_mod": [3, torch.ones(4, 4, dtype=torch.bool)],
    "plan": ["plan"],
    "split": [100, -128, 1.5],
    "max_seqlen_q": [-1, 2.0],
}


def test_generated_files_are_up_to_date():
    stale = [path.name for path, content in generate.generated().items() if Path(path).read_text() != content]
    assert not stale, "run python -m tilewise_lab.generate"


def test_every_checked_option_has_bad_values():
    assert {*ATTENTION.checks, *CACHE.checks} == BAD.keys()


@pytest.mark.parametrize("table", [ATTENTION, CACHE], ids=lambda table: table.function)
def test_bad_values_raise_with_the_name_of_the_option(table):
    q, lengths = torch.randn(1, 4, 2, 8), torch.tensor([4], dtype=torch.int32)
    tensors = {"attention": (q, q, q), "attention_kv": (q, q, q, lengths)}[table.function]
    call = partial(getattr(tilewise, table.function), *tensors)
    for name in table.checks:
        for value in BAD[name]:
            options = {name: value, "seed": 1} if name == "dropout_p" else {name: value}
            with pytest.raises(tilewise.AttentionError, match=name.removesuffix("_mod")):
                call(**options)


@pytest.mark.parametrize(
    ("table", "function"), [(ATTENTION, tilewise.attention), (CACHE, tilewise.attention_kv)], ids=["attention", "kv"]
)
def test_help_shows_every_option_with_its_default(table, function):
    parameters = inspect.signature(function).parameters
    for name, field in table.fields.items():
        assert parameters[name].default == field.default
        assert parameters[name].annotation is not inspect.Parameter.empty


@pytest.mark.parametrize("table", [ATTENTION, CACHE], ids=lambda table: table.function)
def test_names_of_other_libraries_are_explained(table):
    for name in table.elsewhere:
        if name in table.fields:
            continue
        with pytest.raises(tilewise.AttentionError, match=f"{name}=.*expected ."):
            table.completed({name: 4})
