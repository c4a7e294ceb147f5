"""What a plan remembers serves whoever asks next: in training after an evaluation, on another device, in another
process."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import embedding

import tilewise
from tilewise import AttentionError
from tilewise.distributed import attention, plan, rehearse

WAYS = ("ring", "allgather", "halo", "ulysses", "two-level")


def made(strategy: str, tokens: int, packed: bool = False):
    given = {"cu_seqlens": [0, 9, 9, tokens]} if packed else {"seqlen": tokens}
    return plan(4, **given, causal=True, strategy=strategy, node=2)


def leaves(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, heads, 8, requires_grad=True) for heads in (3, 3, 3)]


@pytest.mark.parametrize("strategy", WAYS)
def test_training_after_inference(strategy):
    for packed in (False, True):
        of = made(strategy, 41, packed)
        for options in ({}, {"dropout_p": 0.1, "seed": 3}):
            with torch.inference_mode():
                rehearse(*leaves(41), plan=of, **options)
            rehearse(*leaves(41), plan=of, **options).sum().backward()
    with torch.inference_mode():
        of.shard(torch.randn(1, 41, 3), rank=1)
        of.positions(rank=1)
    of.shard(leaves(41)[0], rank=1).sum().backward()
    embedding(of.positions(rank=1), torch.randn(41, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("strategy", WAYS)
def test_a_default_device_changes_nothing(strategy):
    q, k, v = leaves(43)
    with torch.device("meta"):
        for packed in (True, False):
            of = made(strategy, 43, packed)
            out = rehearse(q, k, v, plan=of)
            assert of.imbalance() >= 0
            assert of.simulate(backward=True).time > 0
            assert plan(16, cu_seqlens=[0, 9, 43]).index(1).device.type == "cpu"
    torch.testing.assert_close(out, tilewise.attention(q, k, v, causal=True), atol=1e-5, rtol=1e-5)


def test_a_plan_is_known_as_long_as_somebody_has_it():
    """And while its gradient may be asked for."""
    of = plan(1, seqlen=12, causal=True)
    q, k, v = leaves(12)
    out = attention(q, k, v, plan=of)
    for n in range(300):
        plan(2, seqlen=500 + n, causal=True)
    out.sum().backward()
    attention(q, k, v, plan=of).sum().backward()


def test_a_plan_that_nobody_has_is_gone():
    """With the tensors that calls have kept on it, once so many others were made."""
    of = made("halo", 53)
    rehearse(*leaves(53), plan=of)
    of.index(1)
    gone = weakref.ref(of)
    kept = weakref.ref(of.tensors)
    del of
    for n in range(300):
        plan(2, seqlen=1500 + n)
    gc.collect()
    assert gone() is None
    assert kept() is None


def test_a_copy_is_the_same_plan_and_one_from_elsewhere_a_new_one():
    of = made("two-level", 31, True)
    there = pickle.loads(pickle.dumps(of))
    assert copy.deepcopy(of) is of
    assert repr(there) == repr(of)
    assert there.number != of.number
    assert there.shards == of.shards


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"heads": 0}, "heads"),
        ({"heads": 8, "kv_heads": 3}, "KV heads"),
        ({"batch": 0}, "batch"),
        ({"dim": 0}, "head dim"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_are_not_simulated(words, what):
    with pytest.raises(AttentionError, match=what):
        plan(4, seqlen=64).simulate(**words)


@pytest.mark.parametrize("words", [{"node": -2}, {"node": 0}, {"heads": 0}], ids=str)
def test_words_of_a_plan_that_cannot_be(words):
    with pytest.raises(AttentionError, match="at least 1"):
        plan(8, seqlen=64, **words)


def test_a_plan_is_not_kept_for_a_later_group_of_the_same_name():
    groups = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            groups.append(dist.group.WORLD)
            assert plan(seqlen=13).group is plan(seqlen=13).group is groups[-1]
        finally:
            dist.destroy_process_group()
    assert groups[0].group_name == groups[1].group_name
