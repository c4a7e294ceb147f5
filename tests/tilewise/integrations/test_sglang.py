"""The backend of SGLang, driven as SGLang drives it, on stubs of its interface."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tilewise
from tests.kv_cases import KvCase, KvInputs, inputs
from tests.tilewise.integrations import sglang_stub as stub
from tests.tilewise.integrations.engine_stub import engine
from tilewise.integrations import sglang as plugin


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with engine(monkeypatch, stub, "0.5.23", "tilewise.adapters.sglang"):
        plugin.register()
        assert "tilewise" in stub.CHOICES
        yield stub.ATTENTION_BACKENDS["tilewise"]


REQUESTS = (4, 1, 6, 2)  # which row of the pool of requests is whose


def runner_of(x: KvInputs, context: int = 96) -> SimpleNamespace:
    """A model runner with the contents of a case: slots of tokens instead of pages."""
    page, table = x.case.page, x.options["page_table"].clamp(0, x.k.shape[0] - 1)
    req_to_token = torch.full((8, context), 7, dtype=torch.int32)
    for b, request in enumerate(REQUESTS):
        slots = (table[b].long()[:, None] * page + torch.arange(page)).flatten()[:context]
        req_to_token[request, : slots.shape[0]] = slots.int()
    pool = stub.MHATokenToKVPool([x.k.flatten(0, 1).clone()], [x.v.flatten(0, 1).clone()])
    return SimpleNamespace(
        token_to_kv_pool=pool, page_size=page, req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
        use_mla_backend=False,
    )  # fmt: skip


def batch_of(x: KvInputs, runner: Any, mode: stub.ForwardMode) -> stub.ForwardBatch:
    case = x.case
    gained = case.each(case.new)
    totals = [a + b for a, b in zip(case.lengths, gained, strict=True)]
    rows = runner.req_to_token_pool.req_to_token
    slots = torch.cat([rows[REQUESTS[b], case.lengths[b] : n] for b, n in enumerate(totals)]).long()
    lengths, extend = torch.tensor(totals), torch.tensor(gained, dtype=torch.int32)
    return stub.ForwardBatch(mode, len(totals), torch.tensor(REQUESTS), lengths, slots, lengths, extend, gained)


def run(create: Any, x: KvInputs, mode: stub.ForwardMode, layer: Any, known: bool = True, **words: Any) -> Any:
    runner = runner_of(x)
    backend = create(runner)
    batch = batch_of(x, runner, mode)
    if not known:
        batch.seq_lens_cpu = None
    backend.init_forward_metadata(batch)
    q = x.q.flatten(0, 1) if x.q.dim() == 4 else x.q
    k, v = (x.options[name].reshape(-1, *cache.shape[-2:]) for name, cache in (("k_new", x.k), ("v_new", x.v)))
    return backend.forward(q.flatten(1), k, v, layer, batch, **words)


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("known", [True, False])
def test_decoding(create: Any, page: int, known: bool) -> None:
    x = inputs(KvCase((20, 3, 0, 33), new=1, dim=16, dim_v=24, page=page))
    layer = stub.RadixAttention(4, 16, 0.3, 2, 0, v_head_dim=24, logit_cap=2.0)
    out = run(create, x, stub.ForwardMode.DECODE, layer, known)
    expected = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, scale=0.3, softcap=2.0)
    assert_close(out, expected.flatten(0, 1).flatten(1))


@pytest.mark.parametrize("window", [-1, 5])
def test_prefill_in_pieces(create: Any, window: int) -> None:
    """SGLang's window counts the keys before a query."""
    x = inputs(KvCase((20, 3, 0, 33), queries=(3, 9, 4, 1), new=(3, 9, 4, 1), dim=16, page=16))
    sinks = torch.randn(4)
    layer = stub.RadixAttention(4, 16, 0.25, 2, 0, sliding_window_size=window)
    out = run(create, x, stub.ForwardMode.EXTEND, layer, sinks=sinks)
    band = None if window < 0 else (window, 0)
    expected = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, scale=0.25, window=band, sinks=sinks)
    assert_close(out, expected.flatten(1))


def test_a_graph_finds_new_numbers_in_old_places(create: Any) -> None:
    """A replay reads the tensors of the capture. They are written before it, not in it: SGLang 0.5.17 may change
    req_to_token for the next batch as soon as the replay has started."""
    x = inputs(KvCase((20, 3, 0, 33), new=1, dim=16, page=8))
    runner = runner_of(x)
    backend = create(runner)
    backend.init_cuda_graph_state(6, 6)
    captured = batch_of(x, runner, stub.ForwardMode.DECODE)
    now = captured.seq_lens.clone(), captured.req_pool_indices.clone()
    captured.seq_lens.fill_(backend.get_cuda_graph_seq_len_fill_value())
    captured.req_pool_indices.fill_(0)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    step = backend.forward_metadata  # what the graph reads
    assert (step.lengths == 0).all()
    backend.init_forward_metadata_in_graph(captured)
    eager = batch_of(x, runner, stub.ForwardMode.DECODE)
    backend.init_forward_metadata(eager)  # between two replays; has its own memory
    assert (step.lengths == 0).all()
    captured.seq_lens.copy_(now[0]), captured.req_pool_indices.copy_(now[1])
    captured.seq_lens_cpu = None
    backend.init_forward_metadata_out_graph(captured)
    runner.req_to_token_pool.req_to_token.fill_(0)  # the scheduler's
    backend.init_forward_metadata_in_graph(captured)
    for name in ("cu_seqlens_q", "page_table"):
        assert step.options[name].data_ptr() == backend.forward_metadata.options[name].data_ptr()
    backend.forward_metadata = step
    layer = stub.RadixAttention(4, 16, 0.25, 2, 0)
    k, v = (x.options[name].flatten(0, 1) for name in ("k_new", "v_new"))
    out = backend.forward(x.q.flatten(0, 1).flatten(1), k, v, layer, captured)
    expected = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, scale=0.25)
    assert_close(out, expected.flatten(0, 1).flatten(1))


def test_a_graph_of_prefill(create: Any) -> None:
    x = inputs(KvCase((20, 3, 0, 33), queries=(3, 9, 4, 1), new=(3, 9, 4, 1), dim=16, page=16))
    runner = runner_of(x)
    backend = create(runner)
    backend.init_cuda_graph_state(6, 6)
    with pytest.raises(tilewise.AttentionError, match="EXTEND"):
        backend.init_forward_metadata_out_graph(batch_of(x, runner, stub.ForwardMode.EXTEND), in_capture=True)


def test_refusals(create: Any) -> None:
    x = inputs(KvCase((20, 3, 0, 33), new=1, dim=16, page=8))
    error = tilewise.AttentionError
    with pytest.raises(error, match="verifies drafts"):
        run(create, x, stub.ForwardMode.TARGET_VERIFY, stub.RadixAttention(4, 16, 0.25, 2, 0))
    layer = stub.RadixAttention(4, 16, 0.25, 2, 0, attn_type=stub.AttentionType.ENCODER_ONLY)
    with pytest.raises(error, match="of an encoder"):
        run(create, x, stub.ForwardMode.DECODE, layer)
    with pytest.raises(error, match="k_rope"):
        run(create, x, stub.ForwardMode.DECODE, stub.RadixAttention(4, 16, 0.25, 2, 0), k_rope=x.q)
    runner = runner_of(x)
    runner.use_mla_backend = True
    with pytest.raises(error, match="MLA"):
        create(runner)
    runner = runner_of(x)
    runner.token_to_kv_pool.translate_loc_from_full_to_swa = None
    with pytest.raises(error, match="disable-hybrid"):
        create(runner)


def test_an_idle_step(create: Any) -> None:
    x = inputs(KvCase((20, 3, 0, 33), new=1, dim=16, page=8))
    out = run(create, x, stub.ForwardMode.IDLE, stub.RadixAttention(4, 16, 0.25, 2, 0))
    assert out.shape == (4, 64)


def test_another_version_warns(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.1")
    with pytest.warns(UserWarning, match=r"sglang 0.5.15 to 0.5.23; this is 0.6.1"):
        plugin.register()


def test_sglang_finds_it() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["tilewise"].partition(":")
    assert getattr(import_module(module), name) is plugin.register
