"""tilewise.compat and tilewise.integrations are the names of what stands in tilewise.adapters."""

from __future__ import annotations

import inspect
import pickle
import sys
from importlib import import_module, util
from typing import Any

import pytest

NEEDS = {"transformers": "transformers", "diffusers": "diffusers"}
MODULES = [
    *(
        f"tilewise.compat.{x}"
        for x in ("bert_padding", "flash_attn", "flash_attn_3", "flash_mla", "rotary", "xformers")
    ),
    *(f"tilewise.integrations.{x}" for x in ("sdpa", *NEEDS)),
]


@pytest.mark.parametrize("name", MODULES)
def test_names_belong_to_the_public_module(name: str) -> None:
    """help() and pickle name it, and pickle finds them there."""
    needed = NEEDS.get(name.rpartition(".")[2])
    if needed and util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    module: Any = import_module(name)
    public = {each: getattr(module, each) for each in module.__all__}
    assert {each: x.__module__ for each, x in public.items()} == dict.fromkeys(public, name)
    plain = [x for x in public.values() if inspect.isfunction(x) or inspect.isclass(x)]
    assert plain
    for x in plain:
        assert pickle.loads(pickle.dumps(x)) is x
        assert name.encode() in pickle.dumps(x)


def test_objects_are_pickled_by_the_public_name() -> None:
    from tilewise.compat.xformers import BlockDiagonalMask

    made = BlockDiagonalMask.from_seqlens([3, 4])
    data = pickle.dumps(made)
    assert b"tilewise.compat.xformers" in data
    assert b"adapters" not in data
    assert pickle.loads(data).q_seqinfo.seqstart_py == [0, 3, 7]


def test_modules_are_found_by_their_package() -> None:
    """`tilewise.compat.flash_attn` without an import of that module."""
    import tilewise

    for name in MODULES:
        if name.startswith("tilewise.compat."):
            assert getattr(tilewise.compat, name.rpartition(".")[2]) is sys.modules[name]
