"""Plans as such, nothing is computed: every pair once, even work, bytes as formulas say, no deadlock, 1024 ranks."""

from __future__ import annotations

import itertools
import math
import random
import time
from importlib.util import find_spec

import pytest
import torch

import tilewise
from tilewise import AttentionError
from tilewise.distributed import plan
from tilewise.distributed.calls import needs_positions
from tilewise.distributed.layout import LAYOUTS, token_index
from tilewise.distributed.plans import Plan
from tilewise.distributed.schedule import Compute, Post, Wait, schedule
from tilewise.distributed.tiles import count, fuse, pieces, tiles
from tilewise.request import Request, Spec

WINDOWS = (None, (0, 0), (3, 2), (5, None), (None, 4), (0, 9))


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    strategy = rng.choice(("ring", "allgather", "halo", "ulysses", "two-level"))
    ranks = rng.choice((1, 2, 3, 4, 5, 8)) if strategy != "two-level" else rng.choice((2, 4, 6, 8))
    lengths = [rng.choice((0, 1, 2, 3, 7, 16, 33)) for _ in range(rng.randrange(1, 6))]
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    given = {"cu_seqlens": ends} if rng.random() < 0.5 else {"seqlen": ends[-1]}
    return plan(
        ranks, **given, causal=rng.random() < 0.5, window=rng.choice(WINDOWS), strategy=strategy,
        layout=rng.choice(list(LAYOUTS)), node=2,
    )  # fmt: skip


def sees(made: Plan) -> torch.Tensor:
    """(tokens, tokens): what the mask of the whole says."""
    document = torch.cat([torch.full((n,), d) for d, n in enumerate(made.lengths)])
    at = torch.cat([torch.arange(n) for n in made.lengths])
    away = at - at[:, None]
    before, after = made.band
    seen = document == document[:, None]
    if before is not None:
        seen &= away >= -before
    if after is not None:
        seen &= away <= after
    return seen


def computed(made: Plan, positions: bool, backward: bool = False) -> torch.Tensor:
    """How often each pair is computed, by all ring ranks together."""
    total = torch.zeros(made.tokens, made.tokens, dtype=torch.int64)
    for ring_rank in range(made.ring_size):
        rows = token_index(made.ring_shards[ring_rank], made.lengths)
        for step in schedule(made, ring_rank * made.ulysses_size, backward):
            if not isinstance(step, Compute):
                continue
            keys = token_index(tuple(run for _, _, run in made.key_runs(ring_rank, step.sources)), made.lengths)
            for call in made.calls(ring_rank, step.sources, positions, False):
                before, after = call[0].window
                assert min(x for x in (before, after, 0) if x is not None) == 0
                for tile in call:
                    i = torch.arange(tile.q1 - tile.q0)[:, None] + (tile.k1 - tile.k0) - (tile.q1 - tile.q0)
                    j = torch.arange(tile.k1 - tile.k0)
                    seen = torch.ones(len(i), len(j), dtype=torch.bool)
                    if before is not None:
                        seen &= j >= i - before
                    if after is not None:
                        seen &= j <= i + after
                    assert int(seen.sum()) == tile.pairs
                    total[rows[tile.q0 : tile.q1, None], keys[tile.k0 : tile.k1]] += seen
    return total


@pytest.mark.parametrize("seed", range(120))
def test_every_visible_pair_is_computed_once(seed):
    made = random_plan(seed)
    seen = sees(made).long()
    assert torch.equal(computed(made, positions=False), seen), made
    assert torch.equal(computed(made, positions=True, backward=True), seen), made
    assert int(made.pairs.sum()) == int(seen.sum())


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_dealt_once_and_come_back(seed):
    made = random_plan(seed)
    x = torch.arange(made.tokens)
    parts = [made.shard(x, dim=0, rank=r) for r in range(made.ranks)]
    assert [len(p) for p in parts] == made.counts()
    assert torch.equal(torch.cat(parts).sort().values, x)
    assert torch.equal(made.unshard(parts, dim=0), x)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_both_ends_of_a_message_agree_and_nobody_waits_forever(seed, backward):
    made = random_plan(seed)
    sent, received = [], []
    for rank in range(made.ranks):
        posted, numbers = [], []
        for step in schedule(made, rank, backward):
            if isinstance(step, Post):
                posted.append(step.number)
                sent += [(step.number, rank, m.peer, m.what, m.rows) for m in step.sends]
                received += [(step.number, m.peer, rank, m.what, m.rows) for m in step.receives]
            elif isinstance(step, Wait):
                assert step.number in posted, "waits for what was not posted"
                numbers.append(step.number)
        assert posted == sorted(set(posted)), "posts in rising order"
        needed = {n for n, _, to, *_ in received if to == rank}
        assert needed <= set(numbers), "all that comes is waited for"
    assert sorted(sent) == sorted(received)


def test_the_next_hop_is_under_way_while_a_tile_is_computed():
    steps = schedule(plan(4, seqlen=64, causal=True, strategy="ring"), 1)
    kinds = [type(step).__name__ for step in steps]
    assert kinds == ["Post", "Compute", "Wait"] * 3 + ["Compute"]


def sent_rows(made: Plan, backward: bool = False) -> dict[str, int]:
    total: dict[str, int] = {}
    for rank in range(made.ranks):
        for step in schedule(made, rank, backward):
            for move in step.sends if isinstance(step, Post) else ():
                total[move.what] = total.get(move.what, 0) + move.rows
    return total


def test_traffic_is_as_the_formulas_say():
    n, s = 8, 1024
    assert sent_rows(plan(n, seqlen=s, strategy="ring")) == {"kv": s * (n - 1)}
    # there the keys, back their gradients, which make one hop more: home
    assert sent_rows(plan(n, seqlen=s, strategy="ring"), True) == {"kv": s * (n - 1), "dkv": s * n}
    assert sent_rows(plan(n, seqlen=s, strategy="allgather"), True) == {"kv": s * (n - 1), "dkv": s * (n - 1)}
    assert sent_rows(plan(n, seqlen=s, strategy="ulysses")) == {"in": s * (n - 1), "out": s * (n - 1)}
    two = sent_rows(plan(n, seqlen=s, strategy="two-level", node=4))
    assert two == {"in": s * 3, "out": s * 3, "kv": 4 * s}  # both nodes' tokens, once, by each of 4 members
    assert sent_rows(plan(4, seqlen=s, strategy="tree")) == {"state": 4 * 2}


@pytest.mark.parametrize("s", [4096, 16384])
def test_a_windows_traffic_knows_the_window_and_not_the_length(s):
    window = (100, 0)
    rows = sent_rows(plan(8, seqlen=s, window=window))["kv"]
    assert plan(8, seqlen=s, window=window).strategy == "halo"
    assert rows == 7 * 100
    ring = sent_rows(plan(8, seqlen=s, window=window, strategy="ring", layout="contiguous"))["kv"]
    assert ring == 7 * s // 8  # one hop: nobody further on wants them


@pytest.mark.parametrize("ranks", [2, 8, 32, 1024])
def test_zigzag_and_stripes_are_even(ranks):
    for s in (ranks * 512, ranks * 512 + 37):
        assert plan(ranks, seqlen=s, causal=True, layout="zigzag", strategy="ring").imbalance() <= 0.01
        assert plan(ranks, seqlen=s, causal=True, layout="striped", strategy="ring").imbalance() <= 0.01
    assert plan(ranks, seqlen=ranks * 512, causal=True, layout="contiguous", strategy="ring").imbalance() > 0.3


def test_stripes_run_on_through_documents():
    """Short documents would all begin with rank 0 otherwise."""
    made = plan(4, cu_seqlens=[0, 1, 2, 3, 5, 8, 9, 10, 12], causal=True, strategy="ring", layout="striped")
    assert made.counts() == [3, 3, 3, 3]


@pytest.mark.parametrize("seed", range(12))
def test_packed_documents_are_even_in_work_and_in_tokens(seed):
    rng = random.Random(seed)
    ranks = rng.choice((2, 4, 8, 16, 32))
    lengths: list[int] = []
    while sum(lengths) < ranks * 2048:
        lengths.append(int(rng.lognormvariate(5.5, 1.5)) + 1)
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    made = plan(ranks, cu_seqlens=ends, causal=True)
    assert made.layout == "document"
    assert made.imbalance() <= 0.05
    counts = made.counts()
    assert max(counts) <= 1.05 * sum(counts) / ranks


def test_documents_are_cut_only_where_that_is_needed():
    """What fits stays whole, and costs no message; a long one is cut, and the short ones beside it are not."""
    assert sent_rows(plan(8, cu_seqlens=range(0, 32 * 512 + 1, 512), causal=True)) == {}
    lengths = [4096, *[512] * 240]
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    made = plan(16, cu_seqlens=ends, causal=True)
    assert made.imbalance() <= 0.05
    assert all(run.size == 512 for shard in made.shards for run in shard if run.document)
    every = sent_rows(plan(16, cu_seqlens=ends, causal=True, strategy="allgather"))["kv"]
    assert sent_rows(made)["kv"] < every / 10


def test_a_thousand_ranks_take_no_time():
    start = time.perf_counter()
    for strategy in ("ring", "two-level", "ulysses"):
        made = plan(1024, seqlen=1 << 20, causal=True, strategy=strategy)
        assert int(made.pairs.sum()) == (1 << 20) * ((1 << 20) + 1) // 2
        steps = schedule(made, 517)
        rows = sum(m.rows for step in steps if isinstance(step, Post) for m in step.sends if m.what == "kv")
        assert rows == {"ring": 1023 * 1024, "two-level": 127 * 8192, "ulysses": 0}[strategy]
    window = plan(1024, seqlen=1 << 20, window=(4096, 0), strategy="halo")
    steps = schedule(window, 517)
    assert sum(m.rows for m in steps[0].sends) == 4096
    assert time.perf_counter() - start < 20


def ends_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize(("mu", "sigma"), [(6.5, 1.0), pytest.param(8.0, 1.3, marks=pytest.mark.slow)])
def test_a_thousand_ranks_of_packed_documents(mu, sigma):
    """Even; every pair once, all counted and those of some ranks one by one; bytes by the formula; soon done."""
    start = time.process_time()
    rng = random.Random(5)
    lengths = [int(rng.lognormvariate(mu, sigma)) + 1 for _ in range(int(2**20 / math.exp(mu + sigma**2 / 2)))]
    made = plan(1024, cu_seqlens=ends_of(lengths), causal=True, strategy="halo")
    assert made.layout == "document"
    assert made.imbalance() <= 0.05
    assert max(made.counts()) <= 1.05 * made.tokens / 1024
    for shard, pairs in zip(made.shards, made.pairs.sum(1).tolist(), strict=True):
        assert pairs == sum(run.size * run.start + run.size * (run.size + 1) // 2 for run in shard)
    place = torch.cat([torch.arange(n) for n in lengths])
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for rank in (0, 517, int(made.pairs.sum(1).argmax())):
        own = token_index(made.shards[rank], made.lengths)
        count_of, came = torch.zeros(len(own), dtype=torch.int64), 0
        for step in schedule(made, rank):
            came += sum(m.rows for m in step.receives) if isinstance(step, Post) else 0
            if not isinstance(step, Compute):
                continue
            keys = token_index(tuple(run for _, _, run in made.key_runs(rank, step.sources)), made.lengths)
            done = torch.zeros(len(own), len(keys), dtype=torch.int8)
            for tile in (x for call in made.calls(rank, step.sources, True, False) for x in call):
                assert tile.window[0] is None
                some = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0, dtype=torch.int8)
                if tile.hi is not None:
                    some = some.tril(tile.hi + tile.q0 - tile.k0)
                done[tile.q0 : tile.q1, tile.k0 : tile.k1] += some
            sees = (document[keys] == document[own][:, None]) & (place[keys] <= place[own][:, None])
            assert torch.equal(done, sees.to(torch.int8))
            count_of += sees.sum(1)
        assert torch.equal(count_of, place[own] + 1)
        # of each document that a rank has some of: the keys up to its last query, but those it has
        of = {d: list(runs) for d, runs in itertools.groupby(made.shards[rank], lambda run: run.document)}
        assert came == sum(runs[-1].start + runs[-1].size - sum(x.size for x in runs) for runs in of.values())
    assert time.process_time() - start < 60


def test_fused_tiles_are_few():
    made = plan(4, seqlen=4096, causal=True, strategy="ring")
    for source in range(4):
        assert len(made.calls(1, (source,), False, False)) == 1
        assert len(made.calls(1, (source,), True, False)) == (2, 3, 2, 1)[source]
    assert len(pieces(made.ring_shards[2])) == 2
    own = tiles(made.query_pieces(2), pieces(made.ring_shards[2]), made.band)
    assert sum(x.pairs for x in fuse(own)) == sum(x.pairs for x in own)
    packed = plan(2, cu_seqlens=list(range(0, 6401, 16)), causal=True)
    assert packed.strategy == "halo"
    assert len(packed.calls(0, (0,), False, False)) == 1
    assert not any(isinstance(step, Post) for step in schedule(packed, 0)), "whole documents need nobody else"


def test_counting_pairs_of_tensors_and_of_ints_is_the_same():
    rng = random.Random(0)
    for _ in range(300):
        n, m = rng.randrange(1, 8), rng.randrange(1, 8)
        lo, hi = (rng.choice((None, *range(-9, 9))) for _ in range(2))
        brute = sum((lo is None or j - i >= lo) and (hi is None or j - i <= hi) for i in range(n) for j in range(m))
        made = [None if x is None else torch.tensor(x) for x in (n, m, lo, hi)]
        assert count(n, m, lo, hi) == int(count(*made)) == brute


def test_what_auto_chooses():
    assert repr(plan(8, seqlen=1 << 16, causal=True)) == "<plan: 65536 tokens on 8 ranks, causal, ring, zigzag>"
    assert plan(64, seqlen=1 << 20, causal=True).strategy == "two-level"
    assert plan(64, seqlen=1 << 20, causal=True, heads=4).strategy == "ring"
    assert plan(8, seqlen=1 << 16, window=(1024, 0)).layout == "contiguous"
    assert plan(8, seqlen=1 << 16, window=(1 << 15, 0)).strategy == "ring"
    assert plan(8, cu_seqlens=list(range(0, 9000, 1000)), causal=True).strategy == "halo"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "seqlen and cu_seqlens: found neither"),
        ({"seqlen": 4, "cu_seqlens": [0, 4]}, "found both"),
        ({"seqlen": -1}, "seqlen: found -1"),
        ({"cu_seqlens": [0, 5, 3]}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 3.5])}, "cu_seqlens: found .* expected whole numbers"),
        ({"seqlen": 8, "strategy": "rings"}, "strategy: found 'rings'; expected 'ring'"),
        ({"seqlen": 8, "layout": "diagonal"}, "layout: found 'diagonal'"),
        ({"seqlen": 8, "window": -1}, "window"),
        ({"seqlen": 8, "strategy": "two-level", "node": 3}, "ranks of a two-level plan: found 4"),
        ({"seqlen": 8, "mask": 3}, "mask of a plan"),
        ({"cu_seqlens": [0, 8], "strategy": "tree"}, "strategy='tree'"),
    ],
)
def test_what_cannot_be_planned_says_so(words, message):
    with pytest.raises(AttentionError, match=message.replace("(", r"\(")):
        plan(4, **words)


def test_a_plan_in_thought_has_no_rank_and_tensors_must_fit():
    made = plan(2, seqlen=8)
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(AttentionError, match="rank in this plan"):
        tilewise.distributed.attention(q, q, q, plan=made)
    with pytest.raises(AttentionError, match="shape of a tensor to shard"):
        made.shard(q)
    with pytest.raises(AttentionError, match="rank: found 2; expected 0 to 1"):
        made.positions(rank=2)
    with pytest.raises(AttentionError, match="init_process_group"):
        plan(seqlen=8)


def test_labels_are_shifted_before_they_are_dealt():
    made = plan(3, cu_seqlens=[0, 4, 4, 9], causal=True)
    tokens_ = torch.arange(9)[None]
    parts = [made.labels(tokens_, rank=r) for r in range(3)]
    assert made.unshard(parts).tolist() == [[1, 2, 3, -100, 5, 6, 7, 8, -100]]
    assert made.unshard([made.positions(r)[None] for r in range(3)]).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]


def _by_position(score, b, h, q_idx, kv_idx):
    return 1.0 + 0.0 * q_idx


@tilewise.score_mod(grad=_by_position)
def doubled(score, b, h, q_idx, kv_idx):
    return 2.0 * score


def test_a_derivative_that_reads_positions_gets_those_of_the_whole_sequence() -> None:
    """The mod itself reads none."""
    mod, q = doubled(), torch.zeros(1, 4, 1, 8)
    spec = Spec(1.0, score_mod=mod.key, score_numbers=mod.numbers)
    assert needs_positions(Request(q, q, q, spec), plan(2, seqlen=8))
    without = tilewise.mods.softcap(3.0)
    spec = Spec(1.0, score_mod=without.key, score_numbers=without.numbers)
    assert not needs_positions(Request(q, q, q, spec), plan(2, seqlen=8))


def test_no_module_has_the_name_of_a_function():
    """`from tilewise.distributed import name` would give the one or the other, by the order of imports."""
    assert [name for name in tilewise.distributed.__all__ if find_spec(f"tilewise.distributed.{name}")] == []
