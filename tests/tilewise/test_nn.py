"""tilewise.nn.MultiheadAttention beside torch's: outputs, weights and gradients of both, for every kind of mask."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tilewise
from tilewise.nn import MultiheadAttention


def pair(*args: Any, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Torch's module and ours with its parameters, biases that are not zero included."""
    theirs = nn.MultiheadAttention(*args, dtype=torch.float64, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiheadAttention(*args, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(module: nn.Module, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, weights, and the gradients of inputs, parameters and a float mask."""
    given = [x.detach().requires_grad_() for x in inputs]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask = mask.detach().requires_grad_()
    out, weights = module(*given, **options)
    learned = [*given, *module.parameters()]
    learned += [mask] if mask is not None and mask.requires_grad else []
    grads = torch.autograd.grad(out.sin().sum(), learned)
    return [out, *([] if weights is None else [weights]), *grads]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # of torch's module
@pytest.mark.parametrize("sizes", [{}, {"kdim": 12, "vdim": 20}, {"bias": False}], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_equals_torchs(sizes, batch_first):
    torch.manual_seed(0)
    theirs, ours = pair(24, 3, batch_first=batch_first, **sizes)
    query, key, value = torch.randn(2, 5, 24), torch.randn(2, 7, theirs.kdim), torch.randn(2, 7, theirs.vdim)
    inputs = [x.double() if batch_first else x.double().transpose(0, 1) for x in (query, key, value)]
    hidden, padding = torch.rand(5, 7) < 0.3, torch.rand(2, 7) < 0.3
    hidden[:, 0] = padding[:, 0] = False
    by_head = torch.rand(6, 5, 7) < 0.3
    by_head[..., 0] = False
    masks = (None, hidden, torch.randn(5, 7).double().masked_fill(hidden, -torch.inf), by_head)
    for mask, pads in product(masks, (None, padding, torch.randn(2, 7).double())):
        options = {"attn_mask": mask, "key_padding_mask": pads, "average_attn_weights": mask is None}
        assert_close(run(ours, inputs, **options), run(theirs, inputs, **options))


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_unbatched_and_causal(batch_first):
    torch.manual_seed(0)
    theirs, ours = pair(16, 2, batch_first=batch_first)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    for x in (torch.randn(6, 3, 16).double(), torch.randn(6, 16).double()):
        x = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
        for average in (True, False):
            a, b = (m(x, x, x, attn_mask=causal, is_causal=True, average_attn_weights=average) for m in (ours, theirs))
            assert_close(a, b)
        assert_close(ours(x, x, x, is_causal=True)[0], b[0])  # the mask is not needed
        found = ours(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
        assert found[1] is None
        assert_close(found[0], b[0])
    padding = torch.arange(6) >= 4
    assert_close(ours(x, x, x, key_padding_mask=padding), theirs(x, x, x, key_padding_mask=padding))


def test_grouped_heads_are_repeated_kv_heads():
    torch.manual_seed(0)
    ours = MultiheadAttention(24, 6, num_kv_heads=2, batch_first=True)
    assert {name: tuple(x.shape) for name, x in ours.state_dict().items()} == {
        "q_proj_weight": (24, 24), "k_proj_weight": (8, 24), "v_proj_weight": (8, 24), "in_proj_bias": (40,),
        "out_proj.weight": (24, 24), "out_proj.bias": (24,),
    }  # fmt: skip
    nn.init.normal_(ours.in_proj_bias)
    theirs = nn.MultiheadAttention(24, 6, batch_first=True)

    def repeated(x: Tensor) -> Tensor:
        return x.unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1)

    bias = ours.in_proj_bias.split([24, 8, 8])
    with torch.no_grad():
        whole = (ours.q_proj_weight, repeated(ours.k_proj_weight), repeated(ours.v_proj_weight))
        theirs.in_proj_weight.copy_(torch.cat(whole))
        theirs.in_proj_bias.copy_(torch.cat([bias[0], repeated(bias[1]), repeated(bias[2])]))
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(2, 5, 24)
    assert_close(ours(x, x, x), theirs(x, x, x))


def test_parameters_are_drawn_as_torchs_are():
    made = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(3)
        made.append(kind(16, 4, kdim=8).state_dict())
    assert_close(*made)
    ours = MultiheadAttention(16, 4)
    nn.init.zeros_(ours.in_proj_weight)
    ours._reset_parameters()
    assert ours.in_proj_weight.std() > 0.1


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch says that it sees it
def test_transformer_encoder_uses_it(monkeypatch):
    """Torch would otherwise skip the module in evaluation, and pack padded batches into nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    layer.self_attn = MultiheadAttention(16, 2, batch_first=True)
    ours = nn.TransformerEncoder(layer, 2).eval()  # it sees that the module cannot be skipped
    ours.load_state_dict(theirs.state_dict())
    calls: list[bool] = []
    run_one = tilewise.nn.attention
    monkeypatch.setattr(tilewise.nn, "attention", lambda *a, **o: calls.append(True) or run_one(*a, **o))
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        assert_close(ours(x, src_key_padding_mask=padding)[~padding], theirs(x, src_key_padding_mask=padding)[~padding])
    assert len(calls) == 2


def test_dropout_and_its_weights():
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    nn.init.eye_(layer.out_proj.weight)
    x = torch.randn(1, 32, 8)
    out, found = layer(x, x, x, average_attn_weights=False)
    assert 0.3 < (found == 0).float().mean() < 0.7
    v = nn.functional.linear(x, layer.in_proj_weight[16:]).view(1, 32, 2, 4)
    assert_close(out, torch.einsum("bhij,bjhd->bihd", found, v).flatten(2))  # the weights that were used
    assert (layer(x, x, x)[0] != out).any()
    layer.eval()
    assert_close(layer(x, x, x)[1].sum(-1), torch.ones(1, 32))


def test_a_query_without_keys_gets_the_bias():
    layer = MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(2, 3, 8)
    out, found = layer(x, x, x, key_padding_mask=torch.tensor([[True] * 3, [False] * 3]))
    assert_close(out[0], layer.out_proj.bias.expand(3, 8))
    assert (found[0] == 0).all()


def test_copies_pickles_and_compiles():
    layer = MultiheadAttention(8, 2, batch_first=True).half()
    x = torch.randn(2, 3, 8, dtype=torch.float16)
    want = layer(x, x, x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(other(x, x, x), want)
    padding = torch.tensor([[False, False, True]] * 2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    options = {"key_padding_mask": padding, "attn_mask": torch.zeros(3, 3), "need_weights": False}
    assert_close(compiled(x, x, x, **options), layer(x, x, x, **options))
