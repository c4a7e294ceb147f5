"""The backend and the stubs of its other tests against the SGLang that is installed."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.tilewise.integrations import sglang_stub as stub
from tilewise.integrations import sglang as plugin

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
ATTENTION = "sglang.srt.layers.attention"


def backend_class() -> Any:
    return import_module("tilewise.adapters.sglang").TilewiseBackend


def overridden(cls: type, base: type) -> list[str]:
    return [name for name in vars(cls) if hasattr(base, name) and not name.startswith("__")]


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(inspect.unwrap(function)).parameters.values())


def accepts(function: Any, base: Any) -> bool:
    """Whether a call that the base accepts is accepted: the same names in the same order; more only with defaults."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ours, theirs = ([p for p in parameters(f) if p.kind not in kinds] for f in (function, base))
    same = [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    return same and all(p.default is not inspect.Parameter.empty for p in ours[len(theirs) :])


def test_the_backend_has_the_signatures_of_the_base() -> None:
    base, cls = import_module(f"{ATTENTION}.base_attn_backend").AttentionBackend, backend_class()
    assert issubclass(cls, base)
    names = overridden(cls, base)
    needed = {"init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state"}
    needed |= {"get_cuda_graph_seq_len_fill_value", "forward_decode", "forward_extend", "needs_cpu_seq_lens"}
    assert needed <= set(names)
    own = [name for name in vars(cls) if not name.startswith("_") and not name.startswith("needs")]
    assert set(own) <= set(names), "a method that SGLang never calls"
    for name in names:
        ours, theirs = getattr(cls, name), getattr(base, name)
        assert not callable(theirs) or accepts(ours, theirs), name


def test_sglang_gets_the_backend() -> None:
    plugin.register()
    registry = import_module(f"{ATTENTION}.attention_registry").ATTENTION_BACKENDS
    assert registry[plugin.NAME] is plugin.create
    assert plugin.NAME in import_module("sglang.srt.server_args").ATTENTION_BACKEND_CHOICES


def test_the_stubs_have_the_names_of_sglang() -> None:
    batch = import_module("sglang.srt.model_executor.forward_batch_info")
    assert {x.name for x in fields(stub.ForwardBatch)} <= {x.name for x in fields(batch.ForwardBatch)}
    assert {mode.name for mode in stub.ForwardMode} <= {mode.name for mode in batch.ForwardMode}
    for name in ("is_idle", "is_decode", "is_target_verify"):
        for mode in stub.ForwardMode:
            assert getattr(mode, name)() == getattr(batch.ForwardMode[mode.name], name)(), (mode, name)
    radix = import_module("sglang.srt.layers.radix_attention")
    assert {x.value for x in stub.AttentionType} <= {x.value for x in radix.AttentionType}
    theirs = {p.name for p in parameters(radix.RadixAttention.__init__)}
    assert {p.name for p in parameters(stub.RadixAttention.__init__)} <= theirs
    pool = import_module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
    for name in ("get_kv_buffer", "set_kv_buffer"):
        assert accepts(getattr(pool, name), getattr(stub.MHATokenToKVPool, name)), name
    base = import_module(f"{ATTENTION}.base_attn_backend").AttentionBackend
    for name in overridden(stub.AttentionBackend, base):
        ours = getattr(stub.AttentionBackend, name)
        assert not callable(ours) or accepts(ours, getattr(base, name)), name
