"""torch.set_default_device and `with torch.device(...)` do not reach into the library: it names the device of every
tensor that it makes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise

SOURCES = Path(tilewise.__file__).parent
# functions of torch that make a tensor on the default device, unless device= is given
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
ALLOWED = {  # "file: code" -> why the default device is right there
    "adapters/vllm.py: torch.tensor(alibi_slopes, dtype=torch.float32)": "as a vLLM layer's weights",
}


def factory_calls(tree: ast.AST) -> list[ast.Call]:
    """The calls torch.NAME(...) of factories, without device=. A `**name` does not count as one."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(word.arg == "device" for word in node.keywords)
    ]


def test_every_factory_call_names_a_device() -> None:
    assert len(factory_calls(ast.parse("torch.ones(2)\ntorch.ones(2, **a)\ntorch.ones(2, device=d)\nx.ones(2)"))) == 2
    found = {}
    for file in sorted(SOURCES.rglob("*.py")):
        text = file.read_text()
        assert "from torch import " not in text or not FACTORIES & imported(ast.parse(text)), file
        for call in factory_calls(ast.parse(text)):
            found[f"{file.relative_to(SOURCES)}: {ast.unparse(call)}"] = call.lineno
    assert set(found) == set(ALLOWED), "name the device, or list the call in ALLOWED with the reason"


def imported(tree: ast.AST) -> set[str]:
    return {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for name in node.names
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.5, "seed": 3, "causal": True},
    "softcap, sinks, bias": {"softcap": 3.0, "sinks": torch.zeros(2), "bias": torch.randn(1, 2, 40, 40)},
    "ALiBi": {"alibi_slopes": torch.rand(2), "window": (5, 3)},
    "document": {"mask_mod": tilewise.mods.document(ids=(torch.arange(40) // 7).int())},
    "fp8": {"precision": "fp8", "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_calls_under_another_default_device(name: str) -> None:
    q = torch.randn(1, 40, 2, 16)
    expected = run(q, OPTIONS[name])
    with torch.device("meta"):
        found = run(q, OPTIONS[name])
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def run(q: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    if "precision" in options:
        return tilewise.attention(q, q, q, return_lse=True, **options)
    leaf = q.detach().clone().requires_grad_()
    out, lse = tilewise.attention(leaf, q, q, return_lse=True, backend="reference", **options)
    return out, lse, *torch.autograd.grad(out.sum(), leaf)
