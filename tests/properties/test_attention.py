"""Properties of `attention` and `attention_varlen`, for the rows of tables in which every pair of options occurs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests import budget, covering, features, features_budget
from tests.cases import make, run
from tests.covering import Row
from tests.features import Call
from tests.properties import calls


@covering.rows("attention")
def test_results_and_gradients(row: Row, backend: str, device: str) -> None:
    """Each is within the error budget of float64."""
    features_budget.check(calls.attention(row, device), backend)


@covering.rows("layouts")
def test_strides(row: Row, backend: str, device: str) -> None:
    """q, k, v and dout with strides of any order, and of 0."""
    inputs = make(calls.strided(row, device), device)
    budget.check(run(inputs, backend), inputs)


@covering.every_value("attention")
def test_compiled(row: Row, device: str) -> None:
    """One graph, with its gradients, returns the same as the call."""
    call = calls.attention(row, device)
    expected, found = (features.run(call, "auto", compiled) for compiled in (False, True))
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, msg=lambda m, name=name: f"{name}: {m}")


@covering.rows("nan")
def test_a_token_that_is_not_finite(row: Row, backend: str, device: str) -> None:
    """It reaches the rows that see it, and no other; what they get is NaN."""
    call = calls.attention(row, device)
    clean = features.run(call, backend)
    bad, reached = poisoned(call, row["where"], float(row["value"]))
    found = features.run(bad, backend)
    limit = 8 * torch.finfo(call.dout.dtype).eps
    for name in ("out", "lse", *"qkv"):
        x, y = found[name], clean[name]
        x, y = (t.movedim(-2, -1) if name == "lse" else t for t in (x, y))
        torch.testing.assert_close(
            x[~reached[name]], y[~reached[name]], rtol=limit, atol=limit, msg=lambda m, name=name: f"{name}: {m}"
        )
    seen = reached["out"]
    if row["value"] == "nan" and (row["where"] in "qk" or (row["where"] == "v" and row["dropout"] == "no")):
        assert found["out"][seen].isnan().all()


def poisoned(call: Call, where: str, value: float) -> tuple[Call, dict[str, Tensor]]:
    """The call with a bad token in the last sequence that has keys and queries, in its first head; and for each result
    a mask (.., tokens, heads) of what the token may reach."""
    b = max(n for n, pair in enumerate(call.lengths) if all(pair))
    seq = next(x for x in features.sequences(call, call.leaves) if x.b == b)
    n_q, n_k = call.lengths[b]
    heads, kv_heads = call.features.heads
    seen = features_budget._masked(call, b, torch.zeros(heads, n_q, n_k, device=call.dout.device)).isfinite()
    group = heads // kv_heads
    reached = {name: torch.zeros(x.shape[:-1], dtype=torch.bool) for name, x in call.leaves.items() if name in "qkv"}
    reached |= {name: torch.zeros_like(reached["q"]) for name in ("out", "lse")}
    at = int(seen[0].any(0).nonzero()[-1]) if where in "kv" else int(seen[0].any(1).nonzero()[-1])
    rows = torch.zeros(heads, n_q, dtype=torch.bool)
    if where in "kv":
        rows[:group] = seen[:group, :, at].cpu()
    else:
        rows[0, at] = True
    keys = (rows[..., None] & seen.cpu()).any(1).unflatten(0, (kv_heads, group)).any(1)
    forward = {"q": ("out", "lse"), "k": ("out", "lse"), "v": ("out",), "dout": ()}[where]
    for name in (*forward, "q"):
        part = reached[name][seq.rows]
        part |= rows.mT
    for name in "kv":
        part = reached[name][seq.keys]
        part |= keys.mT
    reached = {name: x.to(call.dout.device) for name, x in reached.items()}
    if where == "dout":
        dout = call.dout.clone()
        dout[seq.rows][at, 0] = value
        return replace(call, dout=dout), reached
    x = call.leaves[where].clone()
    x[seq.keys if where in "kv" else seq.rows][at, 0] = value
    return replace(call, leaves=call.leaves | {where: x}), reached
