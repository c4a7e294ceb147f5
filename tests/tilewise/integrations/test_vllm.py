"""The backend of vLLM, driven as vLLM drives it, on stubs of its interface."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.conftest import INTERPRETED
from tests.kv_cases import KvCase, KvInputs, compare, inputs
from tests.quantised_cases import E4M3, E5M2, quantised
from tests.tilewise.integrations import vllm_stub
from tests.tilewise.integrations.engine_stub import engine
from tilewise.adapters.steps import Plans
from tilewise.integrations import vllm as plugin
from tilewise.plan_cache import plans


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class that vLLM would make of the registered path."""
    with engine(monkeypatch, vllm_stub, "0.32.0", "tilewise.adapters.vllm"):
        vllm_stub.OVERRIDES.clear()
        plugin.register()
        path, _, name = vllm_stub.OVERRIDES[vllm_stub.AttentionBackendEnum.CUSTOM].rpartition(".")
        yield getattr(import_module(path), name)


CASE = KvCase((20, 3, 0, 33), queries=(1, 3, 2, 5), new=(1, 3, 2, 5), page=16, dim=16, padding=4)


def cache_of(x: KvInputs, layout: str) -> Tensor:
    """vLLM's cache with the contents of the case: 4 axes since 0.29, 5 before; heads or tokens outermost in memory."""
    if layout == "five":
        return torch.stack([x.k, x.v], 1)
    both = torch.cat([x.k, x.v], -1)  # (blocks, tokens, heads, 2 D)
    return both.transpose(1, 2).contiguous() if layout == "heads" else both.transpose(1, 2)


def told(x: KvInputs, **more: Any) -> vllm_stub.CommonAttentionMetadata:
    """What vLLM tells of the batch, and the slots of the new tokens; those of padding are -1."""
    case, table = x.case, x.options["page_table"]
    gained = case.each(case.new)
    totals = [a + b for a, b in zip(case.lengths, gained, strict=True)]
    slots = [
        int(table[b, j // case.page]) * case.page + j % case.page
        for b, (length, total) in enumerate(zip(case.lengths, totals, strict=True))
        for j in range(length, total)
    ]
    cu = x.options["cu_seqlens_q"]
    return vllm_stub.CommonAttentionMetadata(
        cu, cu, torch.tensor(totals, dtype=torch.int32, device=cu.device), len(totals), x.q.shape[0],
        max(case.each(case.queries)), 64, table,
        torch.tensor([*slots, *[-1] * case.padding], device=cu.device), **more,
    )  # fmt: skip


def builder_of(backend: Any) -> Any:
    return backend.get_builder_cls()(None, ["layer"], vllm_stub.vllm_config(), torch.device("cpu"))


def run(
    backend: Any,
    x: KvInputs,
    cache: Tensor,
    words: dict[str, Any],
    layers: int = 1,
    builder: Any = None,
    layer: Any = None,
    **more: Any,
) -> Tensor:
    """As vLLM does: write, then attend, in every layer."""
    case = x.case
    impl = backend.get_impl_cls()(case.heads, case.dim, case.dim**-0.5, case.kv_heads, **words)
    builder = builder or builder_of(backend)
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=told(x, **more))
    pad = x.q.new_full((case.padding, case.kv_heads, case.dim), torch.nan)
    k, v = (torch.cat([x.options[name], pad]) for name in ("k_new", "v_new"))
    output = x.q.new_full((x.q.shape[0], case.heads, case.dim), torch.nan)
    for _ in range(layers):
        impl.do_kv_cache_update(layer, k, v, cache, metadata.slots)
        found = impl.forward(
            layer, x.q, k, v, cache, metadata, output=output, output_scale=None, output_block_scale=None
        )
        assert found is output
    assert len(metadata.plans) == 1
    return output


@pytest.mark.parametrize("layout", ["five", "heads", "tokens"])
@pytest.mark.parametrize("window", [None, 7])
def test_a_mixed_batch(backend: Any, layout: str, window: int | None) -> None:
    """Prefill, decode, an empty sequence that begins, and padding, which is written 0."""
    x = inputs(CASE)
    sinks = torch.randn(4)
    words = {"sliding_window": window, "sinks": sinks}
    output = run(backend, x, cache_of(x, layout), words, layers=2)
    assert (output[-4:] == 0).all()
    band = {} if window is None else {"window": (window - 1, 0)}
    assert_close(output, tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, **band, sinks=sinks))


@pytest.mark.parametrize("layout", ["five", "heads"])
@pytest.mark.parametrize(("name", "dtype"), [("fp8", E4M3), ("fp8_e5m2", E5M2)])
def test_a_float8_cache(backend: Any, layout: str, name: str, dtype: torch.dtype) -> None:
    """vLLM allocates bytes; the layer has the scales."""
    x, wanted = quantised(inputs(CASE), (dtype, dtype), ("tensor", "tensor"))
    layer = SimpleNamespace(_k_scale=x.options["k_scale"], _v_scale=x.options["v_scale"].reshape(1))
    cache = cache_of(replace(x, k=x.k.view(torch.uint8), v=x.v.view(torch.uint8)), layout)
    output = run(backend, x, cache, {"kv_cache_dtype": name}, layers=2, layer=layer)
    k, v = sys.modules[backend.__module__].caches(cache, CASE.dim)
    assert torch.equal(k, wanted["k"])
    assert torch.equal(v, wanted["v"])
    lse = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, return_lse=True)[1]
    compare((output, lse), x)


def test_layers_with_other_caches_have_their_own_plans(backend: Any) -> None:
    plans = Plans()
    q, lengths = torch.zeros(2, 1, 4, 16), torch.tensor([5, 9], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16):
        cache = torch.zeros(2, 32, 2, 16, dtype=dtype)
        plans.of(q.to(dtype), cache, cache, lengths, {})
    assert len(plans) == 2


@pytest.mark.skipif(not INTERPRETED, reason="CPU tensors are taken for those of a GPU")
def test_steps_on_kernels(backend: Any, triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one builder one after another: other batches, the same batch again. Their plans share memory, and a
    known shape is not planned anew."""
    shapes = (CASE, CASE.but(queries=(1, 1, 1, 1), new=(1, 1, 1, 1)), CASE)
    expected = [inputs(case, torch.float16, seed=n) for n, case in enumerate(shapes)]
    expected = [tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options) for x in expected]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans.clear()
    builder = builder_of(backend)
    for n, case in enumerate(shapes):
        x = inputs(case, torch.float16, seed=n)
        known = len(plans)
        output = run(backend, x, cache_of(x, "five"), {}, 2, builder)
        assert_close(output, expected[n], atol=2e-3, rtol=2e-3)
        assert (len(plans) == known) == (n == 2)
    (memory,) = builder.memory.values()
    assert len(memory.blocks["workspace"]) == 1
    plans.clear()


def test_softcap_slopes_and_sequences_that_are_not_causal(backend: Any) -> None:
    x = inputs(CASE)
    slopes = torch.rand(4)
    words = {"logits_soft_cap": 0.7, "alibi_slopes": slopes.tolist()}
    causal = torch.tensor([True, False, True, False])
    output = run(backend, x, cache_of(x, "heads"), words, causal=causal)
    for alike in (True, False):
        options = {"softcap": 0.7, "alibi_slopes": slopes, "causal": alike}
        expected = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, **options)
        cu = x.options["cu_seqlens_q"].tolist()
        for b in torch.nonzero(causal == alike).flatten().tolist():
            assert_close(output[cu[b] : cu[b + 1]], expected[cu[b] : cu[b + 1]])


def test_against_brute_force(backend: Any) -> None:
    x = inputs(CASE)
    output = run(backend, x, cache_of(x, "tokens"), {})
    lse = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, return_lse=True)[1]
    compare((output, lse), x)


def test_other_blocks_share_the_plan(backend: Any) -> None:
    x = inputs(CASE)
    builder = builder_of(backend)
    one = builder.build(0, told(x))
    table, slots = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(15, dtype=torch.int64)
    other = builder.update_block_table(one, table, slots)
    assert other.options["page_table"] is table
    assert one.options["page_table"] is x.options["page_table"]
    assert other.slots is slots
    assert other.plans is one.plans


def test_views_of_a_cache_are_kept_while_it_stays(backend: Any) -> None:
    impl = backend.get_impl_cls()(4, 16, 0.25, 2)
    one, other = torch.zeros(3, 2, 8, 2, 16), torch.ones(3, 2, 8, 2, 16)
    assert impl.caches(one) is impl.caches(one)
    assert [x.data_ptr() for x in impl.caches(other)] == [x.data_ptr() for x in other.unbind(1)]
    first = impl.caches(one)
    one.set_(other.clone())  # type: ignore[arg-type]
    assert impl.caches(one) is not first
    assert (impl.caches(one)[1] == 1).all()


def test_what_it_says_of_itself(backend: Any) -> None:
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == vllm_stub.AttentionCGSupport.ALWAYS
    assert backend.get_name() == "CUSTOM"
    assert not backend.forward_includes_kv_cache_update
    assert backend.supports_kv_cache_dtype("bfloat16")
    assert backend.supports_kv_cache_dtype("fp8")
    assert not backend.supports_kv_cache_dtype("fp8_ds_mla")
    assert backend.supports_head_size(80)
    assert not backend.supports_head_size(576)
    assert not backend.supports_compute_capability(vllm_stub.DeviceCapability(7, 5))
    captured = told(inputs(CASE))
    assert (
        builder(None, [], vllm_stub.vllm_config(), torch.device("cpu"))
        .build_for_cudagraph_capture(captured)
        .lengths.eq(1)
        .all()
    )


def test_a_dry_run_and_refusals(backend: Any) -> None:
    impl = backend.get_impl_cls()
    layer = impl(4, 16, 0.25, 2)
    output = torch.full((3, 4, 16), torch.nan)
    assert (layer.forward(None, output, None, None, torch.empty(0), None, output=output) == 0).all()
    with pytest.raises(tilewise.AttentionError, match="a decoder"):
        impl(4, 16, 0.25, 2, attn_type="encoder_only")
    with pytest.raises(tilewise.AttentionError, match="use_alibi_sqrt"):
        impl(4, 16, 0.25, 2, use_alibi_sqrt=True)
    impl(4, 16, 0.25, 2, use_alibi_sqrt=False, chunk_lookback=-1)


def test_bits_that_do_not_depend_on_the_batch(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.supports_batch_invariance()
    assert backend.get_impl_cls()(4, 16, 0.25, 2).options["split"] is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert backend.get_impl_cls()(4, 16, 0.25, 2).options["split"] == 4096


def test_methods_take_what_vllm_gives(backend: Any) -> None:
    """Parameters in vLLM's order, by vLLM's names."""
    pairs = [
        (backend, vllm_stub.AttentionBackend), (backend.get_impl_cls(), vllm_stub.AttentionImpl),
        (backend.get_builder_cls(), vllm_stub.AttentionMetadataBuilder),
    ]  # fmt: skip
    for ours, theirs in pairs:
        for name, function in vars(theirs).items():
            if callable(getattr(theirs, name)) and (name == "__init__" or not name.startswith("_")):
                wanted = list(inspect.signature(getattr(theirs, name)).parameters)
                found = list(inspect.signature(getattr(ours, name)).parameters)
                assert found[: len(wanted)] == wanted, (name, function)


def test_another_version_warns_and_another_plugin_stays(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "1.4.0")
    vllm_stub.OVERRIDES.clear()
    with pytest.warns(UserWarning, match=r"vllm 0.23 to 0.32; this is 1.4.0"):
        plugin.register()
    custom = vllm_stub.AttentionBackendEnum.CUSTOM
    vllm_stub.OVERRIDES[custom] = "somebody.else"
    plugin.register()
    assert vllm_stub.OVERRIDES[custom] == "somebody.else"


def test_vllm_finds_it() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["tilewise"].partition(":")
    assert getattr(import_module(module), name) is plugin.register
