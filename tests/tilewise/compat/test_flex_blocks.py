"""torch's BlockMasks: what their lists say, what is read of them, and when."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch.testing import assert_close

import tilewise
from tests.covering import cases, each_once
from tests.tilewise.compat.test_flex import MASKS, B, D, H, S, causal, qkv, quiet, results
from tilewise.adapters.flex import _converted
from tilewise.compat import flex_attention

__all__ = ["quiet"]  # a fixture of all tests here


def test_a_block_mask_is_believed() -> None:
    """One that lists fewer tiles than its mask_mod would show: those that it lists."""
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, mask_mod=causal, seq_lengths=(256, 256))
    leaves = qkv(256, 256)
    i = torch.arange(256)
    seen = (i[:, None] >= i) & (i[:, None] // 128 == i // 128)
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, seen)
    assert_close(flex_attention(*leaves, block_mask=mask), expected, rtol=1e-4, atol=1e-5)


def textbook_of_lists(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Tile by tile: one that is listed is asked about, one that is listed as full is not, others do not exist. (torch
    does so when it is compiled; uncompiled it asks the mask_mod alone.)"""
    height, width = mask.BLOCK_SIZE
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    asked, seen = mask.mask_mod(b, h, i, j).expand(b.shape), torch.zeros(b.shape, dtype=torch.bool)
    lists = [(mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True)]
    for counts, indices, full in lists:
        for x, y, row in torch.cartesian_prod(*map(torch.arange, (B, H, counts.shape[2]))).tolist():
            one = x % counts.shape[0], y % counts.shape[1], row
            for tile in indices[one][: int(counts[one])].tolist():
                at = x, y, slice(row * height, (row + 1) * height), slice(tile * width, (tile + 1) * width)
                seen[at] = True if full else asked[at]
    s = (q.double() @ k.double().mT * D**-0.5 + bias.double()).masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    out = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0) @ v.double()
    return out.float(), s.logsumexp(-1).float()


@each_once(block=[(16, 32), (128, 128), (4, 4), (24, 40)], lines=[(1, 1), (1, H), (B, 1), (B, H)], ids=str)
def test_lists_say_what_no_mask_mod_does(block: tuple[int, int], lines: tuple[int, int]) -> None:
    """Chosen at random for each head, against a mask_mod that knows nothing of them; rows without any, tails that list
    tiles that do not count, lengths that are no multiple of a tile."""
    n_q, n_k = 150, 200
    rows, columns = -(-n_q // block[0]), -(-n_k // block[1])
    order = torch.rand(*lines, rows, columns).argsort(-1).int()
    partial = torch.randint(0, columns // 2 + 1, (*lines, rows), dtype=torch.int32)
    full = torch.randint(0, columns // 3 + 2, (*lines, rows), dtype=torch.int32).clamp(max=columns - partial)
    partial[..., 0] = full[..., 0] = 0
    mask = BlockMask.from_kv_blocks(
        partial, order, full, order.flip(-1), BLOCK_SIZE=block, mask_mod=causal, seq_lengths=(n_q, n_k)
    )

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, return_lse: bool) -> Any:
        def biased(score, b, h, q_idx, kv_idx):
            return score + bias[kv_idx]

        return flex_attention(q, k, v, score_mod=biased, block_mask=mask, return_lse=return_lse)

    def expected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, return_lse: bool) -> Any:
        return textbook_of_lists(q, k, v, mask, bias)

    leaves = [*qkv(n_q, n_k), torch.randn(n_k)]
    assert_close(results(ours, leaves), results(expected, leaves), rtol=1e-4, atol=1e-5)


def test_lists_that_are_too_short() -> None:
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, mask_mod=causal, seq_lengths=(S, S))
    with pytest.raises(tilewise.AttentionError, match="lists of the block mask"):
        flex_attention(*qkv(), block_mask=mask)


def test_the_band_of_a_mask_is_computed_as_one() -> None:
    """Its other part is left to ask, unless a tile that the band cuts is listed as full."""
    causal_documents = MASKS["causal documents"][0]
    found = _converted(create_block_mask(causal_documents, None, None, S, S, device="cpu"), S, S)
    assert found.window == (None, 0) == found.mask.band
    assert found.mask.mod.program.root.op == "eq"
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    full = BlockMask.from_kv_blocks(
        0 * counts, indices, counts, indices, BLOCK_SIZE=128, mask_mod=causal_documents, seq_lengths=(128, 128)
    )
    assert _converted(full, 128, 128).window is None


def test_lists_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.adapters import flex

    calls = []
    inner = flex._convert
    monkeypatch.setattr(flex, "_convert", lambda *a: (calls.append(a), inner(*a))[1])
    mask = create_block_mask(causal, None, None, S, S, device="cpu")
    for _ in range(3):
        flex_attention(*qkv(), block_mask=mask)
    assert len(calls) == 1


@pytest.mark.parametrize("change", ["mask_mod", "a number of it", "a list"])
def test_a_block_mask_that_changes(change: str) -> None:
    """As programs that decode do it: another mask_mod for a mask that is there, or other lists in the same memory."""
    keys = 150

    def first_keys(b, h, q_idx, kv_idx):
        return kv_idx < keys

    mask, leaves = create_block_mask(first_keys, None, None, 256, 256, device="cpu"), qkv(256, 256)
    before = flex_attention(*leaves, block_mask=mask)
    seen = torch.arange(256) < (128 if change == "a list" else 140)
    if change == "mask_mod":
        mask.mask_mod = and_masks(first_keys, lambda b, h, q_idx, kv_idx: kv_idx < 140)
    elif change == "a number of it":
        keys = 140
    else:
        mask.kv_num_blocks.zero_()  # leaves the tiles that are listed as full
    after = flex_attention(*leaves, block_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, seen.expand(256, 256))
    assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


this = sys.modules[__name__]
KEYS, LIMITS, BOX = 150, torch.tensor([150]), SimpleNamespace(keys=150, deep=SimpleNamespace(keys=150))


def by_number(b, h, q_idx, kv_idx):
    return kv_idx < KEYS


def by_tensor(b, h, q_idx, kv_idx):
    return kv_idx < LIMITS[0]


def limited(x):
    return x < KEYS


def by_helper(b, h, q_idx, kv_idx):
    return limited(kv_idx)


def by_namespace(b, h, q_idx, kv_idx):
    return kv_idx < BOX.deep.keys


def in_a_loop(b, h, q_idx, kv_idx):
    (found,) = [limited(x) for x in (kv_idx,)]
    return found


class Configured:
    def __init__(self) -> None:
        self.cfg = SimpleNamespace(keys=150)

    def seen(self, b, h, q_idx, kv_idx):
        return kv_idx < self.cfg.keys

    __call__ = seen


def with_a_dict() -> tuple[Any, Any]:
    config = {"keys": 150}
    return (lambda b, h, q_idx, kv_idx: kv_idx < config["keys"]), lambda: config.update(keys=140)


def with_a_list() -> tuple[Any, Any]:
    config = [150]
    return (lambda b, h, q_idx, kv_idx: kv_idx < config[0]), lambda: config.__setitem__(0, 140)


def with_a_namespace() -> tuple[Any, Any]:
    config = SimpleNamespace(keys=150)
    return (lambda b, h, q_idx, kv_idx: kv_idx < config.keys), lambda: setattr(config, "keys", 140)


def with_a_class() -> tuple[Any, Any]:
    class Config:
        keys = 150

    return (lambda b, h, q_idx, kv_idx: kv_idx < Config.keys), lambda: setattr(Config, "keys", 140)


def with_a_method() -> tuple[Any, Any]:
    one = Configured()
    return and_masks(one.seen), lambda: setattr(one.cfg, "keys", 140)


def with_an_object() -> tuple[Any, Any]:
    one = Configured()
    return one, lambda: setattr(one.cfg, "keys", 140)


def with_a_helper_of_an_object() -> tuple[Any, Any]:
    """The object is reached twice: for its function, and by that function for a number."""
    one = SimpleNamespace(keys=150)
    one.seen = lambda x: x < one.keys
    return (lambda b, h, q_idx, kv_idx: one.seen(kv_idx)), lambda: setattr(one, "keys", 140)


CHANGES: dict[str, Any] = {
    "a global": lambda: (by_number, lambda: setattr(this, "KEYS", 140)),
    "a global, rebound": lambda: (by_tensor, lambda: setattr(this, "LIMITS", torch.tensor([140]))),
    "a global's contents": lambda: (by_tensor, lambda: LIMITS.fill_(140)),
    "a global of a helper": lambda: (by_helper, lambda: setattr(this, "KEYS", 140)),
    "a helper": lambda: (by_helper, lambda: setattr(this, "limited", lambda x: x < 140)),
    "a helper's code": lambda: (by_helper, lambda: setattr(limited, "__code__", (lambda x: x < 140).__code__)),
    "a helper in a comprehension": lambda: (in_a_loop, lambda: setattr(this, "KEYS", 140)),
    "a namespace": lambda: (by_namespace, lambda: setattr(BOX.deep, "keys", 140)),
    "joined": lambda: (and_masks(causal, by_helper), lambda: setattr(this, "KEYS", 140)),
    "a dict in a closure": with_a_dict,
    "a list in a closure": with_a_list,
    "a namespace in a closure": with_a_namespace,
    "a class": with_a_class,
    "self.cfg.keys": with_a_method,
    "an object that is called": with_an_object,
    "a helper of an object": with_a_helper_of_an_object,
}


@cases(
    "change",
    ["a global", "a global, rebound", "a helper's code", "a dict in a closure", "a class", "self.cfg.keys"],
    CHANGES,
)
def test_whatever_a_mask_reads_is_read_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks the function at each call; so must we, and not answer from a conversion of before."""
    for name, value in (("KEYS", 150), ("LIMITS", torch.tensor([150])), ("limited", limited)):
        monkeypatch.setattr(this, name, value)
    monkeypatch.setattr(limited, "__code__", limited.__code__)
    monkeypatch.setattr(BOX.deep, "keys", 150)
    function, happens = CHANGES[change]()
    mask, leaves = create_block_mask(function, None, None, 256, 256, device="cpu"), qkv(256, 256)
    i = torch.arange(256)

    def expected(keys: int) -> Tensor:
        seen = (i < keys).expand(256, 256) & ((i[:, None] >= i) | (change != "joined"))
        return torch.nn.functional.scaled_dot_product_attention(*leaves, seen)

    for _ in range(2):
        assert_close(flex_attention(*leaves, block_mask=mask), expected(150), rtol=1e-4, atol=1e-5)
    happens()
    for _ in range(2):
        assert_close(flex_attention(*leaves, block_mask=mask), expected(140), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["in inference mode", "through .data", "through numpy", "by giving .data"])
def test_lists_written_without_a_version(how: str) -> None:
    """torch's version counters do not count these writes."""
    with torch.inference_mode(how == "in inference mode"):
        keys = torch.tensor([150])

        def first_keys(b, h, q_idx, kv_idx):
            return kv_idx < keys[0]

        mask, leaves = create_block_mask(first_keys, None, None, 256, 256, device="cpu"), qkv(256, 256)
        before = flex_attention(*leaves, block_mask=mask)
        if how == "in inference mode":
            mask.kv_num_blocks.zero_()
        elif how == "through .data":
            mask.kv_num_blocks.data.zero_()
        elif how == "through numpy":
            mask.kv_num_blocks.numpy()[:] = 0
        else:
            mask.kv_num_blocks.data = torch.zeros_like(mask.kv_num_blocks)
        after = flex_attention(*leaves, block_mask=mask)
        seen = (torch.arange(256) < 128).expand(256, 256)  # the tiles that are listed as full
        expected = torch.nn.functional.scaled_dot_product_attention(*leaves, seen)
        assert_close(after, expected, rtol=1e-4, atol=1e-5)
        assert (after - before).abs().max() > 1e-3


def test_a_mask_first_used_in_inference_mode_has_gradients_later() -> None:
    mask = create_block_mask(by_number, None, None, 256, 256, device="cpu")
    leaves = qkv(256, 256)
    with torch.inference_mode():
        expected = flex_attention(*leaves, block_mask=mask)
    leaves = [x.requires_grad_() for x in leaves]
    out = flex_attention(*leaves, block_mask=mask)
    out.sum().backward()
    assert_close(out, expected.clone())
    assert leaves[0].grad is not None


def test_a_conversion_keeps_no_tensor_of_the_function() -> None:
    """Those of the call are given to it each time."""
    keys = torch.tensor([150])
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < keys[0], None, None, 256, 256, device="cpu")
    flex_attention(*qkv(256, 256), block_mask=mask)
    assert vars(mask)["_tilewise"].converted.mask.mod.tensors == ()
