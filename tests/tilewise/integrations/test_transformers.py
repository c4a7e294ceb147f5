"""Models of transformers on tilewise beside "eager": logits, gradients, tokens; padding, packing, caches, masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.testing import assert_close

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install tilewise[hf]")

from transformers import masking_utils  # noqa: E402
from transformers.cache_utils import QuantizedLayer  # noqa: E402

import tilewise  # noqa: E402
import tilewise.integrations.transformers as integration  # noqa: E402
from tests.covering import cases  # noqa: E402
from tests.tilewise.integrations.hf_models import BOS, MODELS, PAD, TOKENS, VOCABULARY, WINDOW, build, inputs  # noqa: E402
from tilewise.adapters import transformers as adapter  # noqa: E402
from tilewise.adapters.transformers_masks import Mask, make_mask  # noqa: E402

QUICK = ("llama", "mistral", "gemma2", "gpt_oss", "bert", "modernbert", "t5", "vit")


def ranked(names: Any, quick: Any, slow: Any) -> list[Any]:
    """Parameters that run always, those that run with --slow, and the others, which run with --slow --all."""

    def marked(name: Any) -> Any:
        marks = () if name in quick else (pytest.mark.slow,) if name in slow else (pytest.mark.slow, pytest.mark.full)
        return pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=marks)

    return [marked(name) for name in names]


PADDED = [name for name in MODELS if name not in ("vit", "whisper")]


@pytest.fixture(autouse=True)
def calm() -> Any:
    transformers.logging.set_verbosity_error()
    torch.compiler.reset()
    with torch.random.fork_rng():
        yield


def run(name: str, implementation: str, dtype: torch.dtype, padding: str | None = None) -> list[Tensor]:
    """The logits, and the gradient of every weight."""
    model = build(name, implementation).to(dtype)
    given, look = inputs(name, padding)
    given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in given.items()}
    found = look(model(**given))
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape).to(dtype)
    (found * weights).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    return [found.detach(), *grads]


@contextmanager
def softmax_of_its_dtype() -> Iterator[None]:
    """Eager attention takes its softmax in float32, also of float64."""
    softmax = functional.softmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        yield


def judge(name: str, padding: str | None) -> None:
    """Each result at most twice as far from float64 as eager's, or within a rounding of its size."""
    with softmax_of_its_dtype():
        exact = run(name, "eager", torch.float64, padding)
    theirs, ours = (run(name, x, torch.float32, padding) for x in ("eager", "tilewise"))
    largest = max(x.abs().max().item() for x in exact[1:])
    for n, (e, t, o) in enumerate(zip(exact, theirs, ours, strict=True)):
        size = e.abs().max().item() if n == 0 else max(e.abs().max().item(), 0.1 * largest)
        error, their_error = ((x.double() - e).abs().max().item() for x in (o, t))
        assert error <= 2 * their_error + 2e-6 * size, f"{name}, result {n}: {error:.1e}, eager's {their_error:.1e}"
    assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5 * exact[0].abs().max().item())


@pytest.mark.parametrize("name", ranked(MODELS, QUICK, ["gemma3", "whisper"]))
def test_logits_and_gradients(name: str) -> None:
    judge(name, None)


@pytest.mark.parametrize("name", ranked(MODELS, QUICK[:2], ["gpt_oss"]))
def test_bfloat16(name: str) -> None:
    """The logits, and all gradients together: of one of them, a ReLU that falls the other way decides."""
    with softmax_of_its_dtype():
        exact = run(name, "eager", torch.float64)
    found = [run(name, x, torch.bfloat16) for x in ("eager", "tilewise")]
    for part in (slice(1), slice(1, None)):
        e, t, o = (torch.cat([x.double().flatten() for x in each[part]]) for each in (exact, *found))
        error, their_error = (o - e).norm() / e.norm(), (t - e).norm() / e.norm()
        assert error <= 2 * their_error + 0.02, f"{name}: {error:.1e}, eager's {their_error:.1e}"


QUICKLY_PADDED = [("llama", "left"), ("mistral", "right"), ("bert", "right"), ("t5", "left"), ("bart", "left")]


SLOWLY_PADDED = [("gpt_oss", "left"), ("gemma3", "right")]


@pytest.mark.parametrize(("name", "padding"), ranked(product(PADDED, ["left", "right"]), QUICKLY_PADDED, SLOWLY_PADDED))
def test_padding(name: str, padding: str) -> None:
    judge(name, padding)


def generated(name: str, implementation: str, padding: str | None, **words: Any) -> Tensor:
    model = build(name, implementation)
    given, _ = inputs(name, padding)
    given = {k: x for k, x in given.items() if not k.startswith("decoder")}
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model.generate(**given, do_sample=False, max_new_tokens=12, **words)


GENERATORS = [name for name, made in MODELS.items() if made.generates]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ranked(GENERATORS, QUICK[:4], ["bart"]))
def test_greedy_tokens(name: str, padding: str | None, cache: str) -> None:
    if name == "whisper" and padding:
        pytest.skip("whisper's inputs are not padded")
    words = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    ours, theirs = (generated(name, x, padding, **words) for x in ("tilewise", "eager"))
    assert torch.equal(ours, theirs)


class EightBits(QuantizedLayer):
    """A layer of a quantised cache that needs no package; its last tokens are kept as they are."""

    def __init__(self) -> None:
        super().__init__(nbits=8, residual_length=4)

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        step = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / step).round().to(torch.int8), step

    def _dequantize(self, q_tensor: tuple[Tensor, Tensor]) -> Tensor:
        return q_tensor[0] * q_tensor[1]


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_quantised_cache(name: str, padding: str | None) -> None:
    """What the cache gives back differs from what went in: the steps after the first show whose keys were used."""
    logits = {}
    for implementation in ("eager", "tilewise", "exact"):
        model = build(name, implementation.replace("exact", "eager"))
        cache = transformers.DynamicCache(config=model.config)
        if implementation != "exact":
            cache.layers = [EightBits() for _ in cache.layers or range(2)]
        found = model.generate(
            **inputs(name, padding)[0], max_new_tokens=9, do_sample=False, past_key_values=cache, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True, pad_token_id=PAD,
        )  # fmt: skip
        logits[implementation] = torch.stack(found.logits[:4])
    # A key between two steps may be rounded to either, by the last bit of a sum: 1e-3. Other keys give 3e-2 and more.
    assert_close(logits["tilewise"], logits["eager"], rtol=0, atol=4e-3)
    assert (logits["eager"][1:] - logits["exact"][1:]).abs().amax((1, 2)).min() > 1e-2


@pytest.mark.parametrize("words", [{"num_beams": 3}, {"use_cache": False}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_other_ways_to_generate(name: str, words: dict[str, Any]) -> None:
    if name == "t5" and "prefill_chunk_size" in words:
        pytest.skip("of decoders alone")
    ours, theirs = (generated(name, x, "left", **words) for x in ("tilewise", "eager"))
    assert torch.equal(ours, theirs)


def packed(name: str, implementation: str, how: str, **others: Any) -> Tensor:
    """Documents of 5, 9 and 7 tokens one after the other, in one row."""
    model = build(name, implementation)
    given, _ = inputs(name)
    lengths = (5, 9, 7)
    place = torch.cat([torch.arange(n) for n in lengths])[None]
    words: dict[str, Any] = {"position_ids": place, "use_cache": False}
    words |= others
    if how == "cu_seq_lens":
        cu = torch.tensor([0, 5, 14, 21], dtype=torch.int32)
        words |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    if how == "alone":
        parts = given["input_ids"][:1].split(lengths, 1)
        return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], 1)
    return model(input_ids=given["input_ids"][:1], **words).logits


@pytest.mark.parametrize(
    ("name", "how"),
    [("llama", "position_ids"), ("mistral", "position_ids"), ("llama", "cu_seq_lens"), ("gpt_oss", "cu_seq_lens")],
)
def test_packed_sequences(name: str, how: str) -> None:
    assert_close(packed(name, "tilewise", how), packed(name, "eager", "alone"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}], ids=["", "mask"])
def test_packed_sequences_with_a_cache_warn(given: dict[str, Tensor]) -> None:
    """transformers packs by positions only without a cache; eager attention is as wrong, and silent."""
    with pytest.warns(UserWarning, match="position_ids: found some that go back, with use_cache=True") as found:
        whole = packed("llama", "tilewise", "position_ids", use_cache=True, **given)
    assert len(found) == 1  # not one for each layer
    assert_close(whole, packed("llama", "eager", "position_ids", use_cache=True, **given), rtol=1e-4, atol=1e-5)
    alone = packed("llama", "eager", "alone")
    assert (whole - alone).abs().max() > 10 * (packed("llama", "tilewise", "position_ids") - alone).abs().max()


def test_positions_that_go_on_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    model, (given, _) = build("llama", "tilewise"), inputs("llama")
    ids = given["input_ids"]
    model(input_ids=ids, position_ids=torch.arange(3, 3 + ids.shape[1])[None], use_cache=True)
    padding = (torch.arange(ids.shape[1]) > 2).long().expand(ids.shape)  # whose positions go back, rightly
    model(input_ids=ids, attention_mask=padding, position_ids=padding.cumsum(1) - 1, use_cache=True)
    assert [x for x in recwarn if "position_ids" in str(x.message)] == []


def test_packed_sequences_beside_padding_are_refused() -> None:
    with pytest.raises(tilewise.AttentionError, match="one of the two"):
        packed("llama", "tilewise", "cu_seq_lens", attention_mask=(torch.arange(TOKENS)[None] > 2).long())


@pytest.mark.parametrize("given", ranked(["nothing", "left", "packed"], ["left", "packed"], ["nothing"]))
@pytest.mark.parametrize("name", ranked(["llama", "gemma3"], ["llama"], []))
def test_compiled_whole(name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph, forward and backward, with and without padding."""
    if not torch.cuda.is_available():  # transformers asks, and tests/wheel/torches.py has no CUDA to answer
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = build(name, "tilewise")
    eager = build(name, "eager")
    words, look = inputs(name, "left" if given == "left" else None)
    words = dict(words, use_cache=False)
    if given == "packed":
        words["position_ids"] = torch.cat([torch.arange(8), torch.arange(TOKENS - 8)])[None].expand(3, -1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = look(compiled(**words)), look(eager(**words))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
    ours.sum().backward()
    theirs.sum().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * max(1.0, b.grad.abs().max().item()))


@pytest.mark.slow
@cases("name", ["gpt_oss"], ["llama", "gemma2"])
def test_compiled_decoding(name: str) -> None:
    """A static cache, each step by one compiled graph."""
    model = build(name, "tilewise")
    model.config._experts_implementation = "grouped_mm"  # eager's loop over experts is not for torch.compile
    given, _ = inputs(name, "left")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=graphs)
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 12)
    eager = generated(name, "eager", "left")
    ids, mask = given["input_ids"], given["attention_mask"]
    for n in range(12):
        new = model.prepare_inputs_for_generation(
            ids, next_sequence_length=None if n == 0 else 1, past_key_values=cache, attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True, is_first_iteration=n == 0,
        )  # fmt: skip
        with torch.no_grad():
            out = (model if n == 0 else step)(**new, return_dict=True)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    assert torch.equal(ids, eager)
    assert graphs.frame_count <= (1 if name == "llama" else 2)  # as with eager: sliding layers count in Python


@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    grads = []
    for checkpointed in (False, True):
        model = build(name, "tilewise").train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        given, look = inputs(name, "left")
        if reentrant:
            model.enable_input_require_grads()
        torch.manual_seed(0)
        look(model(**given, use_cache=False)).sin().sum().backward()
        grads.append([x.grad for x in model.parameters()])
    assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_autocast() -> None:
    model, given = build("llama", "tilewise"), inputs("llama", "left")[0]
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(**given).logits
    assert_close(ours.float()[:, -1], model(**given).logits[:, -1], rtol=0.1, atol=0.3)


@pytest.mark.parametrize("kind", ["bool", "float", "float per head"])
def test_masks_of_the_users_own(kind: str) -> None:
    given, _ = inputs("llama")
    seen = (torch.rand(3, 1, TOKENS, TOKENS) < 0.5) | torch.eye(TOKENS, dtype=torch.bool)
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    if kind == "float per head":
        mask = mask + torch.randn(1, 4, TOKENS, TOKENS)
    eager = mask if kind != "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    ours = build("llama", "tilewise")(**given, attention_mask=mask).logits
    theirs = build("llama", "eager")(**given, attention_mask=eager).logits
    assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_honoured_raises() -> None:
    model, (given, _) = build("llama", "tilewise"), inputs("llama")
    with pytest.raises(tilewise.AttentionError, match="attention_mask"):
        model(**given, attention_mask=torch.ones(3, 1, TOKENS, TOKENS, dtype=torch.int64))
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(tilewise.AttentionError, match="output_attentions"):
        integration.attention_forward(model, q, q, q, None, output_attentions=True)
    for computed in (lambda mask: q + mask, lambda mask: mask + q, lambda mask: q.masked_fill(mask, 0.0)):
        with pytest.raises(tilewise.AttentionError, match="computes with its mask itself"):
            computed(Mask((1, 1, 3, 4)))
    with pytest.raises(AttributeError, match="computes its own attention"):
        Mask((1, 1, 3, 4)).size()
    with pytest.raises(tilewise.AttentionError, match="queries and keys"):
        integration.attention_forward(model, q, q, q, Mask((1, 1, 3, 4)))
    with pytest.raises(tilewise.AttentionError, match="attention_mask"):
        integration.attention_forward(model, q, q, q, torch.ones(1, 3, dtype=torch.bool))


# Every mask function there is, against transformers' own table of pairs.


def mask_functions() -> dict[str, Any]:
    ids = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 12])
    packed = masking_utils.packed_sequence_mask_function(ids)
    window = masking_utils.sliding_window_causal_mask_function(WINDOW)
    causal = masking_utils.causal_mask_function
    places = torch.tensor([[*range(5), *range(4), *range(3)], [*range(12)]])
    remapped = getattr(masking_utils, "packed_sequence_compatibility_function", None)  # transformers 5.23
    remap = remapped or (lambda mask, positions, ids: masking_utils.and_masks(mask, packed))
    return {
        "causal": causal,
        "bidirectional": masking_utils.bidirectional_mask_function,
        "window": window,
        "window both ways": masking_utils.sliding_window_bidirectional_mask_function(3),
        "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([1, 0])),
        "packed": masking_utils.and_masks(causal, packed),
        "packed window": masking_utils.and_masks(window, packed),
        "packed by positions": remap(causal, places, ids),
        "packed window by positions": remap(window, places, ids),
        "blocks": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(ids)),
        "the user's": masking_utils.and_masks(causal, lambda b, h, q, k: (q + k) % 3 > 0),
    }


def seen_by(mask: Mask | None, shape: tuple[int, int, int, int], causal: bool) -> Tensor:
    """The pairs that the attention function shows, from attention itself: v is the identity, scores are equal."""
    batch, _, n_q, n_k = shape
    q, k = torch.zeros(batch, 1, n_q, 4), torch.zeros(batch, 1, n_k, 4)
    v = torch.eye(n_k).expand(batch, 1, n_k, n_k)
    module = type("Layer", (), {"is_causal": causal})()
    out, _ = integration.attention_forward(module, q, k, v, mask)
    return out.transpose(1, 2) > 0


PLACES = {"start": (12, 12, 0), "cached": (3, 12, 9), "static start": (5, 12, 0), "static": (1, 12, 7)}


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("padding", [None, "none", "left", "right", "holes"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", mask_functions())
def test_masks_show_what_transformers_shows(kind: str, place: str, padding: str | None, look: bool) -> None:
    n_q, n_k, offset = {"start": (12, 12, 0), "cached": (3, 12, 9), "static start": (5, 12, 0), "static": (1, 12, 7)}[
        place
    ]
    if "packed" in kind and (place != "start" or padding):
        pytest.skip("transformers packs without a cache and without padding")
    written = offset + n_q
    j = torch.arange(written).expand(2, -1)
    pad = {
        "none": j >= 0, "left": j >= torch.tensor([[2], [0]]), "right": j < written - torch.tensor([[2], [0]]),
        "holes": j != torch.tensor([[2], [1]]),
    }.get(padding or "")  # fmt: skip
    words: dict[str, Any] = {
        "batch_size": 2, "q_length": n_q, "kv_length": n_k, "kv_offset": 0, "attention_mask": pad,
        "mask_function": mask_functions()[kind], "device": torch.device("cpu"),
        "q_offset": torch.tensor(offset) if "static" in place else offset,
    }  # fmt: skip
    expected = masking_utils.sdpa_mask(**words, allow_is_causal_skip=False)
    found = make_mask(**words, look=look, dtype=torch.float32)
    causal = "bidirectional" not in kind and "both" not in kind
    shown = seen_by(found, (2, 1, n_q, n_k), causal=causal)
    rows = expected.any(-1)
    if causal and found is not None and found.segments is not None:  # rows of padding see nothing
        rows = rows & pad[:, None]  # type: ignore[index]
    assert torch.equal(shown[rows], expected.expand_as(shown)[rows])


@pytest.mark.parametrize(
    ("kind", "padding", "short"),
    [("causal", None, True), ("window", None, True), ("window", "left", True), ("packed", None, True),
     ("packed by positions", None, True), ("packed window by positions", None, True),
     ("causal", "holes", True), ("blocks", None, False), ("the user's", None, False)],
)  # fmt: skip
def test_no_table_where_numbers_say_it(kind: str, padding: str | None, short: bool) -> None:
    place = torch.arange(12).expand(2, -1)
    pad = {"left": place > 2, "holes": place != 3}.get(padding or "")
    mask = make_mask(
        2, 12, 12, mask_function=mask_functions()[kind], attention_mask=pad, device=torch.device("cpu")
    )  # fmt: skip
    assert mask is not None
    largest = max((x.numel() for x in mask.mod.tensors), default=0) if mask.mod is not None else 0
    assert (largest <= 2 * 12) is short


@pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="transformers 5.23 remaps positions"
)
def test_positions_without_packed_sequences_need_the_table() -> None:
    """Positions that jump are no indices, unless the mask of packed sequences hides what lies before the jump."""
    places = torch.tensor([[0, 1, 2, 7, 8, 9]])
    causal = masking_utils.sliding_window_causal_mask_function(3)
    words: dict[str, Any] = {
        "batch_size": 1, "q_length": 6, "kv_length": 6, "device": torch.device("cpu"),
        "mask_function": masking_utils.remap_positions_for_packed_sequence(causal, places),
    }  # fmt: skip
    found = make_mask(**words)
    assert isinstance(found, Mask)
    expected = masking_utils.sdpa_mask(**words, allow_is_causal_skip=False)
    assert torch.equal(seen_by(found, (1, 1, 6, 6), causal=True), expected)


def test_a_looked_at_mask_without_padding_is_left_out() -> None:
    ones = torch.ones(2, 12, dtype=torch.bool)
    looked, not_looked = (make_mask(2, 12, 12, attention_mask=ones, look=x, device="cpu") for x in (True, False))
    assert looked is not None
    assert looked.mod is None
    assert looked.window == (None, 0)
    assert not_looked is not None
    assert not_looked.mod is not None


def test_a_mask_moves_to_another_device() -> None:
    """As accelerate moves what it passes to the layers of a model that lies on several."""
    valid = torch.arange(12) >= torch.tensor([[3], [0]])
    mask = make_mask(2, 12, 12, attention_mask=valid, device="cpu")
    assert isinstance(mask, Mask)
    moved = mask.to("meta", non_blocking=True)
    assert moved.mod is not None
    assert moved.segments is not None
    assert {x.device.type for x in (*moved.mod.tensors, *moved.segments)} == {"meta"}
    assert (moved.sizes, moved.window, mask.mod.tensors[0].device.type) == (mask.sizes, mask.window, "cpu")


def test_another_version_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "7.0.1")
    with pytest.warns(UserWarning, match=r"tested with transformers 5.17 to .* this is 7.0.1"):
        integration.register()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_continuous_batching(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of `generate`, prompt by prompt; layers without a window gather nothing once something is cached."""
    pytest.importorskip("psutil", reason="transformers measures memory with psutil")
    in_place, select = [], torch.index_select
    monkeypatch.setattr(
        adapter,
        "attend_in_pages",
        lambda *a, _f=adapter.attend_in_pages, **k: in_place.append(_f(*a, **k)) or in_place[-1],
    )
    gathers: list[int] = []
    monkeypatch.setattr(torch, "index_select", lambda *a, **k: gathers.append(1) or select(*a, **k))
    model = integration.serve(build(name, "eager"))
    words = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": VOCABULARY, "pad_token_id": PAD}
    prompts = [[BOS, 5, 6, 7], [BOS, 9], [BOS, *range(10, 22)]]
    config = transformers.ContinuousBatchingConfig(**{PAGE: 16}, num_blocks=16, max_batch_tokens=64)
    out = model.generate_batch(prompts, transformers.GenerationConfig(**words), config)
    found = {tuple(x.prompt_ids): list(x.generated_tokens) for x in out.values()}
    assert sum(x is not None for x in in_place) == 4 * sum(kind == "full" for kind in kinds(model))
    assert bool(gathers) == ("sliding" in kinds(model))
    model.set_attn_implementation("eager")
    for prompt in prompts:
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **words)[0, len(prompt) :]
        assert found[tuple(prompt)] == alone.tolist()


def test_a_table_of_blocks_decodes_as_indices_do() -> None:
    """transformers passes a table instead of indices if all sequences have one query; those that pad have none."""
    torch.manual_seed(0)
    page, lengths, blocks = 4, [6, 1, 0], [[3, 1], [4, -1], [-1, -1]]
    pools = [adapter.Pool(*torch.randn(2, 6, page, 2, 16).unbind(0), group=0)]
    pools.append(adapter.Pool(pools[0].k.clone(), pools[0].v.clone(), group=0))
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    offsets = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 6, 7, 7])
    slots = [[blocks[b][i // page] * page + i % page for i in range(n)] for b, n in enumerate(lengths)]
    read = torch.tensor([x for row in slots for x in row])
    by_index = {"read_index": [read], "max_seqlen_q": 1, "max_seqlen_k": 6}
    by_table = {"read_index": [read[:0]], "block_table": torch.tensor([blocks]).int()}
    found = [
        adapter.attend_in_pages(SimpleNamespace(max_batch_tokens=8), pool, (q, k, v), offsets, named)
        for pool, named in zip(pools, (by_index, by_table), strict=True)
    ]
    for a, b in (found, [x.k for x in pools], [x.v for x in pools]):
        assert torch.equal(a, b)
    assert torch.equal(pools[0].k[1, 1], k[0, :, 0])


def test_indices_that_are_written_again_are_another_step() -> None:
    """One list of indices, whose numbers change in place between two steps: the page table is made again."""
    page, offsets = 4, (torch.tensor([0, 1]), torch.tensor([0, 5]))
    pool = adapter.Pool(*torch.randn(2, 6, page, 2, 16).unbind(0), group=0)
    read = [torch.tensor([0, 1, 2, 3, 4])]
    named = {"read_index": read, "max_seqlen_q": 1, "max_seqlen_k": 5}
    steps = adapter.Steps(8)
    first = steps.of(pool, offsets, named)
    assert steps.of(pool, offsets, named) is first
    read[0].copy_(torch.tensor([12, 13, 14, 15, 20]))
    second = steps.of(pool, offsets, named)
    assert first.options["page_table"].tolist() == [[0, 1]]
    assert second.options["page_table"].tolist() == [[3, 5]]
    with torch.inference_mode():  # tensors without a version
        named["read_index"] = [read[0].clone()]
        third = steps.of(pool, offsets, named)
        assert steps.of(pool, offsets, named) is third


PAGE = "page_size" if "page_size" in vars(transformers.ContinuousBatchingConfig()) else "block_size"


def kinds(model: Any) -> list[str]:
    return [kind.partition("_")[0] for kind in getattr(model.config, "layer_types", None) or ["full"] * 2]
