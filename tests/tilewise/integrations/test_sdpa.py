"""torch's scaled_dot_product_attention beside ours: random calls, the ways in, the words of refusal."""

from __future__ import annotations

import random
import sys
import types
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

import tilewise
from tests.covering import cases
from tests.forks import python
from tests.tilewise.integrations.registry import active
from tilewise.adapters import torch_registry
from tilewise.adapters.bool_masks import recognised
from tilewise.adapters.sdpa import TORCHS

EPS = {torch.float32: 2e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def configuration(seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v (and a mask) of a random call, and its other arguments."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    dtype = dice.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    rank = dice.choice([2, 3, 4, 4, 4, 5])
    lead = [dice.choice([1, 2, 3]) for _ in range(max(rank - 3, 0))]
    n_q, n_k = dice.choice([1, 5, 17, 40]), dice.choice([1, 4, 17, 33])
    d, dv = dice.choice([1, 3, 8, 16]), dice.choice([1, 8, 16])
    gqa = rank > 2 and dice.random() < 0.3
    heads = dice.choice([2, 4]) if gqa else dice.choice([1, 3])
    kv_heads = dice.choice([1, 2]) if gqa else heads
    at_heads = [[heads], [kv_heads], [kv_heads]] if rank > 2 else [[], [], []]
    shapes = [[*lead, *h, n, e] for h, n, e in zip(at_heads, (n_q, n_k, n_k), (d, d, dv), strict=True)]
    if lead and dice.random() < 0.2:  # an axis that broadcasts
        shapes[dice.choice([0, 1])][0] = 1
    tensors = [stridden(torch.randn(s, dtype=dtype), dice) for s in shapes]
    options: dict[str, Any] = {"enable_gqa": True} if gqa else {}
    if dice.random() < 0.4:
        options["scale"] = dice.choice([0.0, -0.5, 1.7])
    kind = dice.choice(["none", "causal", "bool", "bool", "float", "float"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        whole = [*torch.broadcast_shapes(*(s[:-2] for s in shapes[: 1 if gqa else 3])), n_q, n_k]
        if gqa and lead:
            whole[: len(lead)] = torch.broadcast_shapes(*(s[: len(lead)] for s in shapes))
        shape = [1 if dice.random() < 0.3 else n for n in whole][dice.randrange(len(whole) - 1) :]
        seen = torch.rand(shape) < dice.choice([0.2, 0.6, 0.9])
        if kind == "bool":
            mask = seen
        else:
            mask = torch.randn(shape).masked_fill(~seen, -torch.inf if dice.random() < 0.5 else 0.0)
            mask = mask.to(dice.choice([dtype, torch.float32]))
        tensors.append(stridden(mask, dice))
    return tensors, options


def stridden(x: Tensor, dice: random.Random) -> Tensor:
    """The same numbers with other strides, sometimes."""
    if x.dim() > 2 and dice.random() < 0.5:
        x = x.transpose(0, -2).contiguous().transpose(0, -2)
    return x


def results(function: Any, tensors: list[Tensor], options: dict[str, Any], dtype: torch.dtype | None) -> list[Tensor]:
    """out, and the gradient of every tensor of floats."""
    leaves = [x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach() for x in tensors]
    leaves = [x.clone(memory_format=torch.preserve_format) for x in leaves]
    floats = [x.requires_grad_() for x in leaves if x.is_floating_point()]
    mask = {"attn_mask": leaves[3]} if len(leaves) > 3 else {}
    out = function(*leaves[:3], **mask, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, floats, weights)]


def check(seed: int) -> None:
    tensors, options = configuration(seed)

    def math(*args: Any, **kwargs: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return TORCHS(*args, **kwargs)

    exact = results(math, tensors, options, torch.float64)
    theirs = results(math, tensors, options, None)
    ours = results(tilewise.scaled_dot_product_attention, tensors, options, None)
    for n, (e, t, o) in enumerate(zip(exact, theirs, ours, strict=True)):
        assert o.shape == t.shape
        assert o.dtype == t.dtype
        assert o.isfinite().all(), f"seed {seed}, result {n}: not finite"
        e = e.nan_to_num(0.0)  # torch's own gradient of a row of -inf
        error, their_error = ((x.double() - e).abs().max().item() for x in (o, t.nan_to_num(0.0)))
        size = 4 * e.abs().max().item() + (noise(tensors, e, n) if n else 0.0)
        allowed = 2 * their_error + EPS[tensors[0].dtype] * size
        assert error <= allowed, f"seed {seed}, result {n}: {error:.1e}, torch's {their_error:.1e}"


def noise(tensors: list[Tensor], gradient: Tensor, n: int) -> float:
    """The size of the terms whose sum a gradient is: where they cancel, as of a single key, torch is exact by luck."""
    q, k, v, *_ = tensors
    pairs = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2] if q.dim() != k.dim() else ()).numel()
    pairs = max(pairs, k.shape[:-2].numel()) * q.shape[-2] * k.shape[-2]
    summed = pairs / max(1, gradient.numel() if n > 3 else gradient.shape[:-1].numel())
    largest = max(1.0, *(x.abs().max().item() for x in (q, k)))
    return max(1.0, summed) ** 0.5 * v.shape[-1] ** 0.5 * v.abs().max().item() * largest


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@cases("first", [0], range(0, 1000, 100))
def test_a_thousand_random_calls(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)


def test_rows_that_see_nothing() -> None:
    """As torch gives them: 0, with gradients of 0."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[2] = False
    for mask in (seen, torch.zeros(4, 4).masked_fill(~seen, -torch.inf)):
        with sdpa_kernel(SDPBackend.MATH):
            theirs = functional.scaled_dot_product_attention(q, k, v, mask)
        ours = tilewise.scaled_dot_product_attention(q, k, v, mask)
        assert torch.equal(ours[:, :, 2], theirs[:, :, 2])
        assert ours[:, :, 2].abs().max() == 0


def test_causality_is_top_left() -> None:
    for n_q, n_k in ((3, 7), (7, 3)):
        q, k, v = torch.randn(1, 2, n_q, 8), torch.randn(1, 2, n_k, 8), torch.randn(1, 2, n_k, 8)
        ours = tilewise.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(ours, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(("n_q", "n_k"), [(3, 7), (7, 7), (7, 3)])
def test_causal_biases_of_torch(n_q: int, n_k: int) -> None:
    """Tensors by type, with nothing in them: their numbers say what is seen. Rows that see nothing give 0."""
    q, k, v = (torch.randn(2, 4, n, 8) for n in (n_q, n_k, n_k))
    upper, lower = causal_upper_left(n_q, n_k), causal_lower_right(min(n_q, n_k), n_k)
    assert_close(
        tilewise.scaled_dot_product_attention(q, k, v, upper), functional.scaled_dot_product_attention(q, k, v, upper)
    )
    q = q[:, :, : lower.seq_len_q]
    with tilewise.replaces_sdpa():
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=lower)
    assert_close(found, functional.scaled_dot_product_attention(q, k, v, attn_mask=lower))
    with pytest.raises(tilewise.AttentionError, match="lengths of attn_mask"):
        tilewise.scaled_dot_product_attention(q, k, v, causal_upper_left(n_q + 1, n_k))


def test_nested() -> None:
    rows = [torch.randn(n, 4, 8) for n in (5, 3)]
    leaf = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    q, k = leaf.transpose(1, 2), torch.nested.nested_tensor([x[:4] for x in rows], layout=torch.jagged).transpose(1, 2)
    assert_close(
        tilewise.scaled_dot_product_attention(q, k, k).values(),
        functional.scaled_dot_product_attention(q, k, k).values(),
    )
    found = tilewise.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)
    alone = [functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3) for x in q.unbind()]
    assert_close([*found.unbind()], alone)
    found.values().sin().sum().backward()
    assert leaf.grad is not None
    with pytest.raises(tilewise.AttentionError, match="is_causal"):
        tilewise.scaled_dot_product_attention(q, k, k, is_causal=True)
    with pytest.raises(tilewise.AttentionError, match="attn_mask"):
        tilewise.scaled_dot_product_attention(q, q, q, torch.ones(1, 1))
    with pytest.raises(tilewise.AttentionError, match=r"query: found nested; .* jagged"):
        tilewise.scaled_dot_product_attention(*[torch.nested.nested_tensor(rows)] * 3)


def test_dropout_scales_what_it_keeps() -> None:
    q, k, v = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 256, 8), torch.ones(1, 1, 256, 8)
    torch.manual_seed(0)
    out = tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert abs(out.mean().item() - 1.0) < 0.05
    assert out.std() > 0.01


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool), "is_causal": True}, "one of the two"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.int32)}, "bools"),
        ({"attn_mask": torch.ones(3, 4, dtype=torch.bool)}, "broadcasts to"),
        ({"attn_mask": torch.ones(1, 1, 1, 4, 4, dtype=torch.bool)}, "broadcasts to"),
        ({"key": torch.ones(1, 3, 4, 8), "value": torch.ones(1, 3, 4, 8)}, "enable_gqa"),
        ({"key": torch.ones(1, 4, 4, 8), "value": torch.ones(1, 4, 4, 8), "enable_gqa": True}, "multiple"),
        ({"key": torch.ones(3, 2, 4, 8)}, "to match"),
        ({"query": [1.0]}, "a tensor"),
        ({"key": torch.ones(2, 2, 4, 8).to_sparse()}, "sparse_coo"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_says_so(change: dict[str, Any], words: str) -> None:
    given = {name: torch.ones(2, 2, 4, 8) for name in ("query", "key", "value")}
    with pytest.raises(tilewise.AttentionError, match=words):
        tilewise.scaled_dot_product_attention(**given | change)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (torch.ones(6, 6).tril(), (None, 0)),
        (torch.ones(4, 6).tril(2), (None, 0)),
        (torch.ones(6, 6).tril(1).triu(-2), (2, 1)),
        (torch.ones(6, 6), (None, None)),
        (torch.ones(6, 4).tril(), (None, 2)),
        (torch.ones(4, 6).tril(), None),  # its keys past the diagonal are seen by none: no window says so
        (torch.ones(6, 6).tril() * (torch.arange(6) != 2), None),
        (torch.zeros(6, 6), None),
        (torch.arange(6).expand(6, 6) < 4, None),
    ],
)
def test_masks_are_recognised_on_request(mask: Tensor, window: Any) -> None:
    n_q, n_k = mask.shape
    mask = mask.bool()[None, None]
    found = recognised(mask, n_q, n_k)
    assert found.get("window") == window
    q, k, v = (torch.randn(2, 3, n, 8) for n in (n_q, n_k, n_k))
    ours = tilewise.scaled_dot_product_attention(q, k, v, mask, recognise=True)
    torch.testing.assert_close(ours, tilewise.scaled_dot_product_attention(q, k, v, mask))


def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes every call of tilewise.attention made through the replacement."""
    from tilewise.adapters import sdpa

    seen: list[Any] = []
    inner = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda *a, **k: (seen.append(k), inner(*a, **k))[1])
    return seen


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 3), (3, 0)])
def test_nothing_is_recognised_of_nothing(n_q: int, n_k: int) -> None:
    q, k = torch.randn(2, 3, n_q, 8), torch.randn(2, 3, n_k, 8)
    seen = torch.ones(2, 1, 1, 1, dtype=torch.bool)  # which broadcasts to no pair at all
    out = tilewise.scaled_dot_product_attention(q, k, k, seen, recognise=True)
    assert_close(out, torch.zeros(2, 3, n_q, 8))


def test_modules_of_torch_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    torch.manual_seed(0)
    x, padding = torch.randn(2, 7, 32), torch.arange(7).expand(2, 7) >= torch.tensor([[5], [7]])
    attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    decoder = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(7)

    def run() -> list[Tensor]:
        return [
            attention(x, x, x, need_weights=False, key_padding_mask=padding)[0],
            encoder(x, mask=causal, is_causal=True),
            decoder(x, x, tgt_mask=causal),
        ]

    theirs = run()
    assert not seen
    with tilewise.replaces_sdpa():
        ours = run()
    assert len(seen) == 5
    assert functional.scaled_dot_product_attention is TORCHS
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(ours, theirs)


def test_names_imported_before_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    space = sys.modules[__name__]
    monkeypatch.setattr(space, "imported", functional.scaled_dot_product_attention, raising=False)
    q = torch.randn(1, 1, 4, 8)
    with tilewise.replaces_sdpa(recognise=True):
        space.imported(q, q, q, torch.ones(4, 4, dtype=torch.bool).tril())  # type: ignore[attr-defined]
    assert [call["window"] for call in seen] == [(None, 0)]
    assert space.imported is TORCHS  # type: ignore[attr-defined]


def test_names_imported_within_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is imported while the function is replaced gets torch's at the end, and the latest before."""
    module = types.ModuleType("imported_within")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with tilewise.replaces_sdpa():
        with tilewise.replaces_sdpa(recognise=True):
            exec(
                "from torch.nn.functional import scaled_dot_product_attention as theirs\n"
                "from tilewise import scaled_dot_product_attention as ours",
                module.__dict__,
            )
            assert module.theirs.__kwdefaults__ == {"recognise": True}
        assert module.theirs is functional.scaled_dot_product_attention
        assert module.theirs.__kwdefaults__ == {"recognise": False}
    assert module.theirs is TORCHS
    assert module.ours is tilewise.scaled_dot_product_attention


def test_replacements_nest_and_end() -> None:
    with tilewise.replaces_sdpa():
        with tilewise.replaces_sdpa(recognise=True):
            pass
        assert functional.scaled_dot_product_attention.__wrapped__ is tilewise.scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is TORCHS


def test_replacements_end_in_any_order() -> None:
    """As those of threads do: what was there returns with the last one, also torch's fused evaluation."""
    first, second = tilewise.replaces_sdpa(), tilewise.replaces_sdpa(recognise=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention.__kwdefaults__ == {"recognise": True}
    second.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is TORCHS
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_whole_program() -> None:
    script = (
        "import torch, tilewise; from torch.nn import functional; tilewise.replace_sdpa();"
        "q = torch.randn(1, 2, 5, 8); print(functional.scaled_dot_product_attention.__module__,"
        "functional.scaled_dot_product_attention(q, q, q, is_causal=True).shape)"
    )
    done = python("-c", script)
    assert done.stdout.strip() == "tilewise.integrations.sdpa torch.Size([1, 2, 5, 8])"


def test_compiled_whole() -> None:
    torch.compiler.reset()
    seen = torch.rand(2, 1, 6, 6) < 0.7

    def run(q: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, backend = torch.randn(2, 4, 6, 8), EagerAndRecordGraphs()
    with tilewise.replaces_sdpa():
        compiled = torch.compile(run, fullgraph=True, backend=backend)(q, seen)
    assert "tilewise.forward" in str(backend.graphs[0].graph)
    torch.testing.assert_close(compiled, run(q, seen).masked_fill(~seen.any(-1, keepdim=True), 0.0))


def varlen_of_torch(*args: Any, **options: Any) -> Any:
    """varlen_attn, whose options came one by one: torch 2.10 has none of these, 2.11 windows, 2.13 all."""
    from torch.nn.attention.varlen import varlen_attn

    unknown = options.keys() - signature(varlen_attn).parameters.keys()
    if unknown and torch.__version__ < (2, 13):
        pytest.skip(f"varlen_attn of torch {torch.__version__} has no {' nor '.join(sorted(unknown))}")
    return varlen_attn(*args, **options)


class TestRegistry:
    @pytest.fixture(autouse=True)
    def ours(self) -> Any:
        with active():
            yield

    @pytest.mark.parametrize(("n_q", "n_k"), [(6, 6), (3, 7), (7, 3)])
    @pytest.mark.parametrize("kind", ["full", "causal", "mask"])
    def test_torchs_flash_is_ours(self, monkeypatch: pytest.MonkeyPatch, n_q: int, n_k: int, kind: str) -> None:
        seen = []
        inner = torch_registry.attention
        monkeypatch.setattr(torch_registry, "attention", lambda *a, **k: (seen.append(k), inner(*a, **k))[1])
        leaves = [torch.randn(2, 2, n, 8, requires_grad=True) for n in (n_q, n_k, n_k)]
        mask = torch.randn(n_q, n_k) if kind == "mask" else None
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                out = TORCHS(*leaves, attn_mask=mask, is_causal=kind == "causal")
            found = [out, *torch.autograd.grad(out.sin().sum(), leaves)]
            if backend == SDPBackend.MATH:
                expected = found
        assert len(seen) == 1
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        ("kv_heads", "options"),
        [(4, {}), (4, {"window_size": (2, 0)}), (2, {"window_size": (2, 0), "enable_gqa": True})],
        ids=["plain", "window", "window-gqa"],
    )
    def test_packed_sequences(self, kv_heads: int, options: dict[str, Any]) -> None:
        leaves = [torch.randn(10, heads, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
        cu = torch.tensor([0, 4, 10], dtype=torch.int32)
        theirs = varlen_of_torch(*leaves, cu, cu, 6, 6, **options)
        ours = tilewise.attention_varlen(*leaves, cu, cu, window=options.get("window_size"))
        torch.testing.assert_close(theirs, ours)
        grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (theirs, ours)]
        torch.testing.assert_close(*grads)

    def test_lengths_are_refused(self) -> None:
        x, cu, lengths = torch.randn(4, 2, 8), torch.tensor([0, 4]).int(), torch.tensor([3]).int()
        with pytest.raises(Exception, match="attention_kv"):
            varlen_of_torch(x, x, x, cu, cu, 4, 4, seqused_k=lengths)

    @pytest.mark.parametrize("num_splits", [None, 0, 1, 3])
    @pytest.mark.parametrize("packed", [True, False])
    def test_splits(self, packed: bool, num_splits: int | None) -> None:
        """Keys of packed sequences are never split; of others a number cannot be honoured."""
        x, cu = torch.randn(2, 4, 2, 16), torch.tensor([0, 4, 8], dtype=torch.int32)
        x, offsets = (x.flatten(0, 1), cu) if packed else (x, None)

        def call() -> Tensor:
            args = x, x, x, offsets, offsets, 4, 4, 0.0, False, False
            return torch_registry.flash_forward(*args, num_splits=num_splits)[0]  # type: ignore[no-any-return]

        if not num_splits or (packed and num_splits == 1):
            assert call().shape == x.shape
            return
        with pytest.raises(tilewise.AttentionError, match=f"num_splits .*: found {num_splits}; expected None"):
            call()

    def test_lengths_of_the_op_are_refused(self) -> None:
        x, cu, lengths = torch.randn(4, 2, 8), torch.tensor([0, 4]).int(), torch.tensor([3]).int()
        with pytest.raises(Exception, match="attention_kv"):
            torch.ops.aten._flash_attention_forward(x, x, x, cu, cu, 4, 4, 0.0, False, False, seqused_k=lengths)

    def test_dropout_of_the_op(self) -> None:
        """The seed travels in torch's state of randomness: the backward drops what the forward dropped."""
        q, k, v, d = (torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(4))
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 6, 6, 0.5, False, False, scale=0.5
        )
        seed = state.view(torch.int64)[0]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ours = tilewise.attention(*leaves, scale=0.5, dropout_p=0.5, seed=seed)
        torch.testing.assert_close(out, ours)
        none = torch.empty(0, dtype=torch.int32)
        grads = torch.ops.aten._flash_attention_backward(
            d, q, k, v, out, lse, none, none, 6, 6, 0.5, False, state, unused, scale=0.5
        )
        torch.testing.assert_close(grads, torch.autograd.grad(ours, leaves, d))
