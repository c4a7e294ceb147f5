"""The emulator against the Hopper forward: right where the kernel is right, and not silent where it is broken."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.covering import cases
from tests.oracle import naive
from tilewise.request import Request, Spec
from tilewise_lab.emulator import DeadlockError, RaceError, language, launch

pytest.importorskip("triton")

CASES = {
    "full": {"n_q": 256, "n_k": 256},
    "causal": {"n_q": 256, "n_k": 256, "after": 0},
    "more keys than queries": {"n_q": 100, "n_k": 333, "after": 0},
    "queries that see nothing": {"n_q": 333, "n_k": 150, "after": 0},
    "heads as queries": {"n_q": 1, "n_k": 300, "after": 0, "heads": 6},
    "window": {"n_q": 300, "n_k": 420, "before": 70, "after": 30, "d": 64},
    "three warpgroups": {"n_q": 333, "n_k": 2100, "after": 0, "d": 64, "heads": 1},
    "window of three warpgroups": {"n_q": 260, "n_k": 1500, "before": 1400, "after": 3, "d": 64, "heads": 1},
    "window before the end": {"n_q": 260, "n_k": 260, "before": 40, "after": 0, "d": 64},
    "wide heads": {"n_q": 200, "n_k": 180, "after": 0, "d": 256},
    "heads in two parts": {"n_q": 130, "n_k": 200, "d": 96},
    "wide heads in two parts": {"n_q": 130, "n_k": 150, "d": 192, "after": 0},
    "padded heads": {"n_q": 130, "n_k": 200, "d": 136, "dv": 120},
    "values narrower than keys": {"n_q": 130, "n_k": 200, "d": 192, "dv": 128},
    "columns of two warpgroups": {"n_q": 130, "n_k": 150, "d": 512, "after": 0},
    "few columns of two warpgroups": {"n_q": 70, "n_k": 200, "d": 320, "dv": 72, "before": 90, "after": 20},
    "packed columns of two warpgroups": {"lengths": ((70, 70), (0, 7), (65, 0), (1, 100)), "d": 384, "after": 0},
    "negative scale": {"n_q": 130, "n_k": 200, "scale": -0.3},
    "half": {"n_q": 130, "n_k": 200, "after": 0, "dtype": torch.float16},
    "packed": {"lengths": ((130, 130), (0, 7), (65, 0), (1, 200), (300, 60)), "after": 0},
    "packed wide heads": {"lengths": ((70, 70), (0, 7), (65, 0), (1, 100)), "after": 0, "d": 256},
    "packed window": {"lengths": ((130, 130), (0, 7), (65, 0), (1, 200)), "before": 50, "after": 10, "d": 64},
}


def run(
    *,
    n_q: int = 0,
    n_k: int = 0,
    d: int = 128,
    dv: int | None = None,
    heads: int = 2,
    before: int | None = None,
    after: int | None = None,
    scale: float | None = None,
    lengths: Any = None,
    dtype: Any = torch.bfloat16,
    programs: int = 2,
    seed: int = 0,
    replace: dict[str, Any] | None = None,
    poison: int | None = None,
) -> tuple[Any, ...]:
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.launches import forward_launches, new_state

    torch.manual_seed(1)
    dv = dv or d
    spec = Spec(scale or d**-0.5, before, after)
    cu: list[Any] = [None, None]
    outer = (1,)
    if lengths:
        cu = [
            torch.tensor([0, *torch.tensor(side).cumsum(0)], dtype=torch.int32) for side in zip(*lengths, strict=True)
        ]
        (n_q, n_k), outer = (int(x[-1]) for x in cu), ()
    q, k, v = (torch.randn(*outer, n, h, x).to(dtype) for n, h, x in ((n_q, heads, d), (n_k, 1, d), (n_k, 1, dv)))
    if poison is not None:
        v[:, poison] = torch.nan
    out = torch.full((*outer, n_q, heads, dv), torch.nan, dtype=dtype)
    lse = torch.full((*outer, heads, n_q), torch.nan)
    request = Request(q, k, v, spec, cu_q=cu[0], cu_k=cu[1])
    state = new_state(DeviceMemory(q.device), request)
    job = forward_launches(request, out, lse, state, programs)[0]
    machine = launch(job.kernel, job.programs, job.args, job.options, seed=seed, replace=replace)
    return out, lse, naive(q, k, v, spec, *cu), state, machine


@cases(
    "name, seed",
    [
        *(
            (name, 0)
            for name in (
                "full",
                "window of three warpgroups",
                "heads in two parts",
                "padded heads",
                "packed window",
                "columns of two warpgroups",
            )
        ),
        *(
            (name, 1)
            for name in (
                "causal",
                "more keys than queries",
                "heads as queries",
                "wide heads in two parts",
                "packed columns of two warpgroups",
                "half",
            )
        ),
    ],
    product(CASES, [0, 1]),
)
def test_right_in_every_interleaving(name, seed):
    out, lse, (expected, expected_lse), state, _ = run(**CASES[name], seed=seed)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=0)
    assert not state.counter.any()  # ready for the next launch


def test_a_run_can_be_repeated_and_a_seed_changes_it():
    spans = [run(**CASES["causal"], seed=seed)[-1].timeline for seed in (3, 3, 4)]
    assert spans[0] == spans[1] != spans[2]


def test_one_program_or_many():
    alone, many = (run(**CASES["causal"], programs=n)[0] for n in (1, 4))
    assert torch.equal(alone, many)


def test_a_warpgroup_without_queries_visits_one_block():
    timeline = run(n_q=64, n_k=2100, after=0, d=64, heads=1)[-1].timeline
    products = Counter(span.what for span in timeline if span.unit == "tensor cores")
    assert [products[f"consume {n} S"] for n in range(3)] == [17, 1, 1]


def changed(**words: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(language.mbarrier), **words})


def finished_early(num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    if num_outstanding == 0:
        return language.warpgroup_mma_wait(0, deps)
    return language.Value(deps[0].value)


def nothing(*_: Any, **__: Any) -> None: ...


BUGS = {
    "nobody waits for a copy": ({"wait_full": nothing}, RaceError),
    "a stage is released before its product is done": ({"warpgroup_mma_wait": finished_early}, RaceError),
    "a stage is never released": ({"release": nothing}, DeadlockError),
    "a stage is released twice": (
        {"release": lambda pipe, n, stages: pipe.empty.index(n % stages).arrive(2)},
        RaceError,
    ),
    "the producer does not wait for an empty stage": (
        {
            "mbarrier": changed(
                wait=lambda bar, phase, pred=True: None if bar.count != 1 else language._wait(bar, phase, pred)
            )
        },
        RaceError,
    ),
    "a phase is the wrong way round": ({"phase": lambda n, stages: 1 - (n // stages) % 2}, (RaceError, DeadlockError)),
    "more bytes are announced than come": (
        {"mbarrier": changed(expect=lambda bar, size, pred=True: bar.arrive(1, size + 16 * (size > 0)))},
        DeadlockError,
    ),
    "no fence before a tile leaves": ({"fence_async_shared": nothing}, RaceError),
    "no wait for a tile to leave": ({"tma": SimpleNamespace(store_wait=nothing)}, RaceError),
    "the tile info is never released": ({"release_tile_info": nothing}, DeadlockError),
    "the ping-pong barrier is never arrived at": ({"bar_arrive": nothing}, DeadlockError),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name):
    replace, error = BUGS[name]

    def runs():
        for seed in range(4):
            run(n_q=1300, n_k=700, after=0, heads=1, d=128, programs=1, seed=seed, replace=replace)

    with pytest.raises(error):
        runs()
