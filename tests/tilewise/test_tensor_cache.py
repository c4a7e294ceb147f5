"""Tensors that are kept between calls: bounded in bytes, dropped with their owner, made alike in every context."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch

from tilewise.distributed import plan, rehearse
from tilewise.sparse import neighborhood
from tilewise.tensor_cache import TensorCache

CPU = torch.device("cpu")


def bytes_alive() -> int:
    """The bytes of all tensors of this process."""
    gc.collect()
    dense = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.device == CPU and not x.is_sparse]
    storages = [x.untyped_storage() for x in dense]
    return sum({x._cdata: x.nbytes() for x in storages}.values())  # some that torch.compile leaves have no address


def packed(tokens: int, seed: int) -> list[int]:
    """cu_seqlens of a batch."""
    cuts = random.Random(seed).sample(range(1, tokens), 12)
    return [0, *sorted(cuts), tokens]


def test_plans_of_many_batches_hold_few_bytes():
    """Each has 1 MB of indices; before, all of them stayed."""
    tokens, batches = 1 << 17, 100
    x = torch.zeros(tokens, dtype=torch.uint8)
    before = bytes_alive()
    for seed in range(batches):
        made = plan(4, cu_seqlens=packed(tokens, seed), causal=True, layout="striped", strategy="ring")
        for rank in range(4):
            made.shard(x, dim=0, rank=rank)
            made.positions(rank=rank)
    assert bytes_alive() - before < 48 << 20
    assert made.tensors.nbytes == 8 * tokens


@pytest.mark.parametrize("strategy", ["ring", "halo", "ulysses", "two-level"])
def test_a_dropped_plan_is_gone_with_its_tensors(strategy):
    tokens = 61 + len(strategy)
    made = plan(4, cu_seqlens=[0, 20, tokens], causal=True, strategy=strategy, node=2)
    q = torch.randn(1, tokens, 2, 8, requires_grad=True)
    rehearse(q, q, q, plan=made).sum().backward()
    made.shard(q, rank=1)
    assert made.tensors.nbytes > 0
    gone = weakref.ref(made)
    del made
    for n in range(257):  # as many as are kept for equal arguments, and one
        plan(2, seqlen=1000 + n)
    gc.collect()
    assert gone() is None


def test_the_oldest_entries_are_dropped():
    cache = TensorCache(max_bytes=100)
    for n in range(30):
        x = cache.get(n, CPU, lambda n=n: torch.full((10,), n, dtype=torch.int32))
        assert x.tolist() == [n] * 10
        assert cache.nbytes <= 100
    assert cache.get(29, CPU, lambda: pytest.fail("made again")) is x
    assert cache.get(0, CPU, lambda: "made again") == "made again"
    large = cache.get("large", CPU, lambda: torch.zeros(1000))
    assert cache.get("large", CPU, lambda: pytest.fail("one entry is kept, whatever its size")) is large
    assert (len(cache), cache.nbytes) == (1, 4000)


def test_a_storage_counts_once():
    cache = TensorCache(max_bytes=1000)
    x = torch.zeros(100, dtype=torch.uint8)
    cache.get(0, CPU, lambda: (x[:50], [x[50:], (x, 3)]))
    assert cache.nbytes == 100


def test_the_number_of_entries_is_bounded_too():
    cache = TensorCache(max_bytes=100, max_entries=3)
    for n in range(9):
        cache.get(n, CPU, lambda: ())
    assert len(cache) == 3


def test_tensors_are_made_outside_of_inference_mode_and_on_the_cpu():
    cache = TensorCache(max_bytes=100)
    with torch.inference_mode(), torch.device("meta"):
        x = cache.get(0, CPU, lambda: torch.arange(3))
    assert not x.is_inference()
    assert x.device == CPU


def test_fake_tensors_are_not_kept():
    from torch._subclasses import FakeTensorMode

    made = plan(2, seqlen=77)
    with FakeTensorMode() as mode:
        assert made.shard(mode.from_tensor(torch.zeros(77)), dim=0, rank=0).shape == (38,)
    assert made.shard(torch.arange(77), dim=0, rank=0).tolist() == list(range(38))
    with FakeTensorMode() as mode:
        assert made.shard(mode.from_tensor(torch.zeros(77)), dim=0, rank=0).shape == (38,)


def test_threads_get_one_tensor():
    cache = TensorCache(max_bytes=1000)
    barrier = threading.Barrier(4)
    found = []

    def run() -> None:
        barrier.wait()
        found.append(cache.get(0, CPU, lambda: torch.zeros(10)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(x) for x in found}) == 1
    assert cache.nbytes == 40


def test_a_layout_of_a_grid_is_made_once_for_training_and_inference():
    q = torch.randn(1, 12, 12, 1, 8, requires_grad=True)
    with torch.inference_mode():
        first = neighborhood(q, q, q, kernel_size=5)
    again = neighborhood(q, q, q, kernel_size=5)
    again.sum().backward()
    assert torch.equal(first, again)


def test_a_compiled_function_shards():
    made = plan(2, seqlen=10, causal=True)
    x = torch.arange(10)
    found = torch.compile(lambda x: made.shard(x, dim=0, rank=1), backend="eager")(x)
    assert torch.equal(found, made.shard(x, dim=0, rank=1))


def test_a_first_call_within_a_transform_keeps_plain_tensors():
    """Those made within torch.func.jvp are wrapped, and the wrapper is dead when it returns."""
    q = torch.randn(1, 7, 9, 1, 8)
    out, along = torch.func.jvp(lambda q: neighborhood(q, q, q, kernel_size=3), (q,), (torch.ones_like(q),))
    assert torch.equal(neighborhood(q, q, q, kernel_size=3), out)
    again = torch.func.jvp(lambda q: neighborhood(q, q, q, kernel_size=3), (q,), (torch.ones_like(q),))
    assert torch.equal(again[1], along)
