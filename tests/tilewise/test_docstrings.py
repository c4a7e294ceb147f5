"""Every parameter of every public function is explained, with what the function returns and raises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module, util
from typing import Any

import pytest

from tilewise.mods.modifier import Modifier
from tilewise_lab.docs.docstrings import described

COMPAT = ("flash_attn", "flash_attn_3", "bert_padding", "xformers")
INTEGRATIONS = ("sdpa", "sglang", "vllm", "transformers", "diffusers")
MODULES = [
    "tilewise",
    *(f"tilewise.{name}" for name in ("mods", "nn", "sparse", "distributed", "compat")),
    *(f"tilewise.compat.{name}" for name in COMPAT),
    *(f"tilewise.integrations.{name}" for name in INTEGRATIONS),
]
NEEDS = {"tilewise.integrations.transformers": "transformers", "tilewise.integrations.diffusers": "diffusers"}
NEVER_RAISE = {  # for any argument that has the type that they name
    "current", "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "get_scheduler_metadata",
    "register", "create", "serve", "replace_sdpa", "replaces_sdpa", "use", "selected_blocks", "mean_key_gate",
    "BlockMask.density", "BlockMask.to", "Mod.to", "Program.after", "add_bias", "make_causal",
    "make_causal_from_bottomright", "make_local_attention", "make_local_attention_from_bottomright",
}  # fmt: skip
PATH = re.compile(r"\b(?:docs|src|tests|bench|course|examples)/|\b\w+\.(?:py|md)\b")


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """Functions, mods and classes of a module, and the methods of its classes."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, x in vars(module).items()
            if not name.startswith("_") and getattr(x, "__module__", "") == module.__name__ and callable(x)
        ]
    for name in names:
        x = getattr(module, name)
        if inspect.ismodule(x) or not callable(x) or x.__module__.startswith("torch."):
            continue
        yield name, x
        if inspect.isclass(x):
            for key, y in vars(x).items():
                if not key.startswith("_") and (inspect.isfunction(y) or hasattr(y, "__func__")):
                    yield f"{name}.{key}", getattr(x, key)


def installed() -> list[str]:
    return [name for name in MODULES if name not in NEEDS or util.find_spec(NEEDS[name])]


ALL = [pytest.param(x, id=f"{name}.{key}") for name in installed() for key, x in public(import_module(name))]
FUNCTIONS = [x for x in ALL if not inspect.isclass(x.values[0])]


@pytest.mark.parametrize("x", ALL)
def test_every_parameter_is_explained(x):
    assert x.__doc__, "no docstring"
    if isinstance(x, type) and issubclass(x, Exception):
        return
    shown = {name for name in inspect.signature(x).parameters if name != "self"}
    found = described(x)
    assert shown - found.keys() == set()
    own = set(re.findall(r"^    (\w+): ", inspect.getdoc(x).partition("Args:\n")[2].partition("\n\n")[0], re.M))
    assert own <= shown | {"options", "others"}, "an argument that the function does not have"


@pytest.mark.parametrize("x", FUNCTIONS)
def test_results_and_errors_are_explained(x):
    text = inspect.getdoc(x)
    name = x.__qualname__
    if isinstance(x, Modifier) or inspect.signature(x).return_annotation not in (None, "None"):
        assert re.search(r"^(Returns|Yields):\n    \S", text, re.M)
    if name.rpartition(".")[2] not in NEVER_RAISE and name not in NEVER_RAISE:
        assert "Raises:\n    AttentionError: " in text


@pytest.mark.parametrize("x", ALL)
def test_no_text_names_a_file_of_the_repository(x):
    """The pages show these texts to readers who have no clone."""
    assert PATH.findall(x.__doc__) == []


def test_the_test_sees_what_is_missing():
    def f(a: int, b: int) -> int:
        """Returns a.

        Args:
            a: a number.
            options: as in `tilewise.attention`.
        """
        return a

    assert described(f).keys() >= {"a", "causal", "backend"}
    assert "b" not in described(f)
    assert {x.id for x in ALL} >= {"tilewise.attention", "tilewise.mods.softcap", "tilewise.distributed.Plan.shard"}


def example_lines(text: str) -> Iterator[str]:
    """The lines of a docstring that pages show as code: examples, their output, and indented blocks."""
    is_example = False
    for line in re.split(r"^(?:Args|Attributes|Returns|Raises|Yields):$", text, flags=re.M)[0].splitlines():
        is_example = line.startswith(">>>") or (is_example and bool(line.strip()))
        if is_example or line.startswith("    "):
            yield line


@pytest.mark.parametrize("x", [*ALL, *(pytest.param(import_module(name), id=name) for name in installed())])
def test_examples_fit_80_columns(x):
    assert [line for line in example_lines(inspect.getdoc(x) or "") if len(line) > 80] == []
