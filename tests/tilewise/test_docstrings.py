"""Every parameter of every public function is explained, with what the function returns and raises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module, util
from typing import Any

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


ALL = {f"{name}.{key}": x for name in installed() for key, x in public(import_module(name))}


def test_every_parameter_is_explained():
    found = [f"{name}: {fault}" for name, x in ALL.items() if (fault := unexplained(x))]
    assert not found, "\n".join(found)


def unexplained(x: Any) -> str:
    """What the docstring lacks, or explains although it is no parameter; "" if neither."""
    if not x.__doc__:
        return "no docstring"
    if isinstance(x, type) and issubclass(x, Exception):
        return ""
    shown = {name for name in inspect.signature(x).parameters if name != "self"}
    own = set(re.findall(r"^    (\w+): ", inspect.getdoc(x).partition("Args:\n")[2].partition("\n\n")[0], re.M))
    lacking, extra = shown - described(x).keys(), own - shown - {"options", "others"}
    return f"lacks {sorted(lacking)}, has {sorted(extra)} besides" if lacking or extra else ""


def test_results_and_errors_are_explained():
    found = [f"{name}: no {part}" for name, x in ALL.items() if not inspect.isclass(x) for part in lacking_parts(x)]
    assert not found, "\n".join(found)


def lacking_parts(x: Any) -> Iterator[str]:
    text, name = inspect.getdoc(x), x.__qualname__
    returns = isinstance(x, Modifier) or inspect.signature(x).return_annotation not in (None, "None")
    if returns and not re.search(r"^(Returns|Yields):\n    \S", text, re.M):
        yield "Returns or Yields"
    never = name in NEVER_RAISE or name.rpartition(".")[2] in NEVER_RAISE
    if not never and "Raises:\n    AttentionError: " not in text:
        yield "Raises: AttentionError"


def test_no_text_names_a_file_of_the_repository():
    """The pages show these texts to readers who have no clone."""
    assert {name: found for name, x in ALL.items() if (found := PATH.findall(x.__doc__))} == {}


def test_faults_are_seen():
    def f(a: int, b: int) -> int:
        """Returns a, as in docs/a.

        Args:
            a: a number.
            c: another.
            options: as in `tilewise.attention`.
        """
        return a

    assert described(f).keys() >= {"a", "causal", "backend"}
    assert unexplained(f) == "lacks ['b'], has ['c'] besides"
    assert list(lacking_parts(f)) == ["Returns or Yields", "Raises: AttentionError"]
    assert PATH.findall(f.__doc__) == ["docs/"]
    assert ALL.keys() >= {"tilewise.attention", "tilewise.mods.softcap", "tilewise.distributed.Plan.shard"}


def example_lines(text: str) -> Iterator[str]:
    """The lines of a docstring that pages show as code: examples, their output, and indented blocks."""
    is_example = False
    for line in re.split(r"^(?:Args|Attributes|Returns|Raises|Yields):$", text, flags=re.M)[0].splitlines():
        is_example = line.startswith(">>>") or (is_example and bool(line.strip()))
        if is_example or line.startswith("    "):
            yield line


def test_examples_fit_80_columns():
    texts = ALL | {name: import_module(name) for name in installed()}
    wide = [f"{name}: {line}" for name, x in texts.items() for line in example_lines(inspect.getdoc(x) or "")]
    assert len(wide) > 100
    assert [line for line in wide if len(line.partition(": ")[2]) > 80] == []
