"""All ranks in one process: every strategy, layout and feature, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.tilewise.distributed.cases import CASES, alone, along_queries, faults, make, planned, run
from tilewise import AttentionError
from tilewise.distributed import cluster, plan, rehearse
from tilewise.distributed.cluster import Exchange
from tilewise.distributed.layout import LAYOUTS

WAYS = [(s, layout) for s in ("ring", "allgather", "halo", "ulysses", "two-level") for layout in LAYOUTS]


def check(case, ranks, tokens=37, dtype=torch.float32, seed=0, **words):
    inputs = make(case, tokens, dtype, seed)
    made = planned(case, ranks, tokens, **words)
    ours = run(case, inputs, lambda q, k, v, **o: rehearse(q, k, v, plan=made, **o))
    assert not (found := faults(ours, case, inputs)), (made, found)


# every case and every way, in turn: all ways of all cases are for 4 processes
TURNS = [(name, *WAYS[7 * n % len(WAYS)]) for n, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "strategy", "layout"), [*TURNS, ("bias", "ulysses", "zigzag")])
def test_four_ranks(name, strategy, layout):
    case = CASES[name]
    if along_queries(case) and strategy in ("ulysses", "two-level"):
        with pytest.raises(AttentionError, match="a bias along queries"):
            check(case, 4, strategy=strategy, layout=layout, node=2)
    else:
        check(case, 4, strategy=strategy, layout=layout, node=2)


@pytest.mark.parametrize("strategy", ["ring", "allgather", "halo", "ulysses", "two-level"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 5])
def test_fewer_tokens_than_ranks(strategy, tokens):
    for name in ("causal", "sinks", "dropout"):
        check(CASES[name], 4, tokens, strategy=strategy, node=2)


@pytest.mark.parametrize(
    ("ranks", "name"), [*((8, name) for name in CASES), *((32, name) for name in ("window", "documents", "sinks"))]
)
def test_larger_clusters(ranks, name):
    """Nodes of 4, and windows and documents by halo."""
    case = CASES[name]
    check(case, ranks, 67, node=4, strategy="ring" if along_queries(case) else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "alibi"])
def test_a_ring_of_32(name):
    check(CASES[name], 32, 131, strategy="ring")


@pytest.mark.parametrize(
    ("strategy", "dtype"), [("ring", torch.bfloat16), ("allgather", torch.float16), ("two-level", torch.bfloat16)]
)
def test_half_precision_rounds_once(strategy, dtype):
    """However many ranks: partial results are float32."""
    for ranks in (2, 16):
        check(CASES["causal"], ranks, 200, dtype, strategy=strategy, node=2)


@pytest.mark.parametrize("strategy", ["ring", "allgather"])
def test_scores_far_out(strategy):
    """An lse of hundreds: a part's weights come from the lse of the whole, never from its own maximum and sum."""
    case, inputs = CASES["causal"], make(CASES["causal"], dtype=torch.float64)
    inputs = inputs._replace(q=100 * inputs.q)
    made = planned(case, 4, strategy=strategy)
    ours = run(case, inputs, lambda q, k, v, **o: rehearse(q, k, v, plan=made, **o))
    for x, y in zip(ours, alone(case, inputs), strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_tree_of_ranks_decodes(ranks, queries):
    torch.manual_seed(ranks)
    q, k, v = torch.randn(2, queries, 6, 8), torch.randn(2, 29, 2, 8), torch.randn(2, 29, 2, 5)
    for words in ({"causal": True}, {"window": (4, 0)}, {}):
        layout = "striped" if ranks == 3 else "zigzag" if ranks == 5 else "auto"
        made = plan(ranks, seqlen=29, strategy="tree", queries=queries, layout=layout, **words)
        sinks = torch.randn(6)
        terms = {"sinks": sinks, "alibi_slopes": torch.rand(6), "dropout_p": 0.2, "seed": 9}
        for options in ({}, terms):
            out, lse = rehearse(q, k, v, plan=made, return_lse=True, **options)
            expected = tilewise.attention(q, k, v, return_lse=True, **words, **options)
            torch.testing.assert_close((out, lse), expected, atol=2e-6, rtol=1e-5)
    with pytest.raises(AttentionError, match="a gradient with strategy='tree'"):
        rehearse(q.requires_grad_(), k, v, plan=made)


def test_the_same_bits_in_every_run():
    case = CASES["documents, all"]
    inputs, made = make(case), planned(case, 4, strategy="ring")
    runs = [run(case, inputs, lambda q, k, v, **o: rehearse(q, k, v, plan=made, **o)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_nothing_leaks_from_keys_that_are_not_seen():
    """NaN in a key of the future, and in another document."""
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    k[:, 30:] = torch.nan
    v[:, 30:] = torch.inf
    for strategy, layout in WAYS:
        out = rehearse(q, k, v, plan=plan(4, seqlen=40, causal=True, strategy=strategy, layout=layout, node=2))
        assert out[:, :30].isfinite().all(), (strategy, layout)
        assert not out[:, 30:].isfinite().any(), (strategy, layout)
        packed = plan(4, cu_seqlens=[0, 30, 40], strategy=strategy, layout=layout, node=2)
        out = rehearse(q, k, v, plan=packed)
        assert out[:, :30].isfinite().all()


def test_float64_and_gradcheck():
    case = CASES["sinks"]
    inputs = make(case, 9, torch.float64)
    made = planned(case, 3, 9)
    torch.autograd.gradcheck(
        lambda q, k, v, s: rehearse(q, k, v, plan=made, sinks=s, return_lse=True),
        [x.double().requires_grad_() for x in (*inputs[:3], inputs.terms["sinks"])],
        fast_mode=True,
    )


def test_what_a_plan_cannot_honour_is_said():
    q = torch.randn(1, 8, 2, 8)
    made = plan(2, seqlen=8, causal=True)
    with pytest.raises(AttentionError, match="causal and window"):
        rehearse(q, q, q, plan=made, window=(3, 0))
    mod = tilewise.mods.block_diagonal(4)
    mask = tilewise.block_mask(mod, 8, 8, block=(16, 16))
    with pytest.raises(AttentionError, match="a block mask"):
        rehearse(q, q, q, plan=made, mask_mod=mask)
    with pytest.raises(AttentionError, match="tokens of k"):
        rehearse(q, q[:, :5], q[:, :5], plan=made)
    with pytest.raises(AttentionError, match="Sk of bias"):
        rehearse(q, q, q, plan=made, bias=torch.zeros(8, 4))
    masked = plan(2, seqlen=8, mask=mod)
    with pytest.raises(AttentionError, match="one of the two"):
        rehearse(q, q, q, plan=masked, mask_mod=mod)


def test_the_mask_of_a_plan_is_that_of_its_calls():
    q, mod = torch.randn(1, 8, 2, 8), tilewise.mods.block_diagonal(4)
    ours = rehearse(q, q, q, plan=plan(2, seqlen=8, mask=mod))
    torch.testing.assert_close(ours, tilewise.attention(q, q, q, mask_mod=mod))


def test_ranks_that_wait_for_one_another_are_found_out():
    def waits(peer):
        yield Exchange(0, [], [(peer, torch.zeros(1))])
        yield 0

    with pytest.raises(RuntimeError, match="wait for one another"):
        cluster.rehearse([waits(1), waits(0)])


def test_a_single_rank_is_attention_itself():
    case = CASES["causal"]
    inputs = make(case)
    made = planned(case, 1)
    ours = run(case, inputs, lambda q, k, v, **o: tilewise.distributed.attention(q, k, v, plan=made, **o))
    for x, y in zip(ours, alone(case, inputs), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_a_group_that_sends_nothing_from_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")

    class Group:
        pass

    with pytest.raises(AttentionError, match="gloo, which sends nothing from a GPU"):
        cluster.run(Group(), iter(()), torch.device("cuda"))


@pytest.mark.parametrize(("strategy", "layout"), WAYS)
def test_the_largest_score_is_that_of_all_ranks(strategy, layout):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 37, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    made = plan(4, seqlen=37, causal=True, strategy=strategy, layout=layout, node=2)
    options = {"softcap": 3.0, "sinks": torch.full((6,), 9.0), "return_max_logit": True}
    out, found = rehearse(q, k, v, plan=made, **options)
    alone_out, expected = tilewise.attention(q, k, v, causal=True, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(out, alone_out)
    torch.autograd.grad(out.sum(), (q, k, v))
    packed = [x[0].detach() for x in (q, k, v)]
    made = plan(4, cu_seqlens=[0, 9, 30, 37], causal=True, strategy=strategy, layout=layout, node=2)
    cu = torch.tensor([0, 9, 30, 37], dtype=torch.int32)
    _, _, found = rehearse(*packed, plan=made, return_lse=True, return_max_logit=True)
    _, expected = tilewise.attention_varlen(*packed, cu, cu, causal=True, return_max_logit=True)
    torch.testing.assert_close(found, expected)
