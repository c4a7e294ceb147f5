"""Other libraries on a GPU: nothing waits for it unless asked to, and answers agree where kernels compute them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import tilewise
from tests.tilewise.compat.test_flex import MASKS, SCORES, naive
from tests.tilewise.integrations.registry import active
from tilewise.compat import flash_attn, flex_attention

HALF = {"rtol": 3e-2, "atol": 3e-2}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def qkv(
    n_q: int = 300, n_k: int = 300, heads: int = 8, kv_heads: int = 8, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads, n_q, 64), (2, kv_heads, n_k, 64), (2, kv_heads, n_k, 64)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "padding", "rows hidden"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sdpa(kind: str, dtype: torch.dtype) -> None:
    leaves = qkv(kv_heads=2, dtype=dtype)
    masks = {
        "bool": torch.rand(2, 8, 300, 300, device="cuda") < 0.5,
        "float": torch.randn(8, 300, 300, device="cuda", dtype=dtype),
        "padding": (torch.arange(300, device="cuda") < torch.tensor([[200], [300]], device="cuda"))[:, None, None],
        "rows hidden": torch.arange(300, device="cuda")[:, None].expand(300, 300) > 50,
    }
    words: dict[str, Any] = {"is_causal": kind == "causal", "attn_mask": masks.get(kind), "enable_gqa": True}
    with no_waiting():
        ours = tilewise.scaled_dot_product_attention(*leaves, **words)
        grads = torch.autograd.grad(ours, leaves, torch.ones_like(ours))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = functional.scaled_dot_product_attention(*leaves, **words)
    tolerance = HALF if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    assert_close(ours, theirs, **tolerance)
    assert_close(grads, torch.autograd.grad(theirs, leaves, torch.ones_like(theirs)), **tolerance)


def test_torchs_flash_is_ours() -> None:
    leaves = qkv()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = functional.scaled_dot_product_attention(*leaves, is_causal=True)
        theirs = torch.autograd.grad(expected.sum(), leaves)
        with active():
            with torch.profiler.profile() as profile:
                found = functional.scaled_dot_product_attention(*leaves, is_causal=True)
                grads = torch.autograd.grad(found.sum(), leaves)
            compiled = torch.compile(functional.scaled_dot_product_attention)(*leaves, is_causal=True)
    assert "tilewise::forward" in {event.key for event in profile.key_averages()}
    assert_close(found, expected, **HALF)
    assert_close(compiled, expected, **HALF)
    assert_close(grads, theirs, **HALF)


def test_flash_attn_does_not_wait() -> None:
    q, k, v = (x.transpose(1, 2).detach() for x in qkv(kv_heads=2))
    cu = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
    flat = [x.flatten(0, 1).contiguous() for x in (q, k, v)]
    with no_waiting():
        dense = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(40, -1))
        packed = flash_attn.flash_attn_varlen_func(*flat, cu, cu, 300, 300, causal=True, window_size=(40, -1))
    assert_close(packed.view_as(dense), dense, **HALF)


ON_CPU = (
    "bias", "bias, index by index", "paths", "documents", "causal documents", "padding", "images", "noop", "a module",
    "a method", "a partial", "an object", "a method of an object", "top k", "new zeros", "aten's index",
    "from the end",
)  # fmt: skip


@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_flex(name: str) -> None:
    """With float32 inputs, so that the sums of the formula are no worse than ours."""
    from torch.nn.attention.flex_attention import create_block_mask

    if name in ON_CPU:
        pytest.skip("its tensors are on the CPU, or the formula has none")
    leaves = [x.float().detach().requires_grad_() for x in qkv(200, 200, 4, 4)]
    words: dict[str, Any] = {"score_mod": SCORES[name]} if name in SCORES else {}
    if name in MASKS:
        mod, batch, _ = MASKS[name]
        words["block_mask"] = create_block_mask(mod, batch, None, 200, 200, device="cuda")
    with torch.device("cuda"):
        expected = naive(*leaves, **words)
    ours = flex_attention(*leaves, **words)
    assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, expected)]
    assert_close(*grads, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", ["bart", "bert", "doge", "gemma2", "gpt_oss"])
def test_padded_models(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import tilewise.integrations.transformers  # noqa: F401
    from tests.tilewise.integrations.hf_models import build, inputs

    given, look = inputs(name, "left")
    given = {key: x.to("cuda") for key, x in given.items()}
    ours, theirs = (look(build(name, x).to("cuda")(**given)) for x in ("tilewise", "eager"))
    assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


class TestTransformers:
    """A small Llama of a real head dim, in bfloat16."""

    @pytest.fixture
    def model(self) -> Any:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        import tilewise.integrations.transformers  # noqa: F401

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)

    def inputs(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        mask = torch.arange(200, device="cuda").expand(3, -1) >= torch.tensor([[0], [70], [150]], device="cuda")
        return torch.randint(1, 512, (3, 200), device="cuda").masked_fill(~mask, 0), mask.long()

    @pytest.mark.parametrize("padded", [False, True])
    def test_training(self, model: Any, padded: bool) -> None:
        ids, mask = self.inputs()
        words = {"attention_mask": mask} if padded else {}
        found = []
        for implementation in ("tilewise", "eager"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            logits = model(ids, use_cache=False, **words).logits
            logits = logits[mask.bool()] if padded else logits
            logits.float().square().mean().backward()
            found.append((logits, model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
        for a, b in zip(*found, strict=True):
            assert (a - b).float().norm() <= 0.03 * b.float().norm()

    @pytest.mark.parametrize("static", [False, True])
    def test_generating(self, model: Any, static: bool) -> None:
        """With a static cache transformers compiles the steps, and captures them as a graph."""
        ids, mask = self.inputs()
        words = {"cache_implementation": "static"} if static else {}
        found = {}
        for implementation in ("tilewise", "eager"):
            model.set_attn_implementation(implementation)
            torch.compiler.reset()
            found[implementation] = model.generate(
                ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
                output_logits=True, **words,
            )  # fmt: skip
        ours, theirs = (torch.stack(found[x].logits).float() for x in ("tilewise", "eager"))
        assert (ours[0] - theirs[0]).norm() <= 0.03 * theirs[0].norm()
        agree = (found["tilewise"].sequences == found["eager"].sequences).float().mean()
        assert agree > 0.97  # ties of bfloat16 may fall otherwise

    def test_nothing_waits_where_nothing_is_looked_at(self, model: Any) -> None:
        import tilewise.integrations.transformers as integration

        ids, mask = self.inputs()
        model.set_attn_implementation("tilewise")
        integration.register(look=False)
        try:
            words = {"attention_mask": mask, "use_cache": False, "position_ids": torch.arange(200, device="cuda")[None]}
            expected = model(ids, **words).logits
            with no_waiting():
                found = model(ids, **words).logits
        finally:
            integration.register()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("blocks", [0, 8], ids=["indices", "table of blocks"])
def test_continuous_batching(blocks: int) -> None:
    """transformers' CUDA graphs; decoding from slots of all keys, or from its table of blocks: tokens of `generate`.
    Without its asynchronous batching, whose first step is wrong now and then with any attention: docs/upstream.md."""
    transformers = pytest.importorskip("transformers")
    from tilewise.integrations.transformers import serve

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=500, head_dim=32,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    words = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 500, "pad_token_id": 0}
    prompts = [torch.randint(3, 500, (n,)).tolist() for n in (5, 40, 300, 17)]
    alone = [
        model.generate(torch.tensor([p], device="cuda"), **words)[0, len(p) :].tolist() for p in prompts
    ]  # with transformers' own attention
    page = "page_size" if "page_size" in vars(transformers.ContinuousBatchingConfig()) else "block_size"
    batching = transformers.ContinuousBatchingConfig(
        **{page: 64}, num_blocks=64, max_batch_tokens=256, max_blocks_per_request=blocks, use_cuda_graph=True,
        use_async_batching=False,
    )  # fmt: skip
    found = serve(model).generate_batch(prompts, transformers.GenerationConfig(**words), batching)
    assert [list(x.generated_tokens) for x in found.values()] == alone
