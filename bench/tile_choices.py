"""Times candidate tiles of the Hopper forward on shapes of `tilewise bench models-shapes`.

    python bench/tile_choices.py --fa3 DIR 3 17 42         these shapes, every candidate of their head dims
    python bench/tile_choices.py --fa3 DIR --seed 1 0 1    of another seed

Prints ratios for each shape: FlashAttention-3's time over ours, measured in turns; "table" is the tile of
`tilewise.backends.hopper.tile_table`. All candidates are compiled first, in several processes. Candidates that spill,
and results that are not those of the table's tile, are marked.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.common.kernel_call import new_results
from tilewise.backends.common.launch import (
    OFFLINE_PROCESSORS,
    DeviceMemory,
    compile_options,
    compute_cache_keys,
    target_of,
)
from tilewise.backends.hopper.launches import forward_launches, new_state
from tilewise.backends.hopper.tile_table import ForwardTile
from tilewise.call.fields import ATTENTION
from tilewise.request import Request
from tilewise.validation import dense as checks
from tilewise_lab.bench.cases import Case, Inputs
from tilewise_lab.bench.providers import roster
from tilewise_lab.bench.shapes import shapes
from tilewise_lab.bench.sweep import in_turns, request_of
from tilewise_lab.costs.compiled import compile_for

TABLE = "table"
# by the head dim that holds both
CANDIDATES: dict[int, tuple[ForwardTile, ...]] = {
    64: (
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False),
        ForwardTile(128, 2, ping_pong=True),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, stages=3),
        ForwardTile(128, 3, ping_pong=True, lazy_rescale=False, stages=3),
        ForwardTile(128, 3, ping_pong=True, stages=3),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, rescale_late=True),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, q_in_registers=True),
        ForwardTile(64, 2, ping_pong=True, lazy_rescale=False, stages=4),
    ),
    96: (
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False),
        ForwardTile(128, 2, ping_pong=True),
        ForwardTile(128, 2),
        ForwardTile(128, 2, lazy_rescale=False),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, rescale_late=True),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, q_in_registers=True),
        ForwardTile(128, 3, ping_pong=True, lazy_rescale=False),
        ForwardTile(64, 3, ping_pong=True, lazy_rescale=False, stages=4),
    ),
    128: (
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False),
        ForwardTile(128, 2, ping_pong=True),
        ForwardTile(128, 2),
        ForwardTile(128, 2, lazy_rescale=False),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, rescale_late=True),
        ForwardTile(64, 2, ping_pong=True, lazy_rescale=False, stages=4),
        ForwardTile(64, 2, lazy_rescale=False, stages=4),
    ),
    256: (
        ForwardTile(64, 2, o_stores=2),
        ForwardTile(64, 2, ping_pong=True, o_stores=2),
        ForwardTile(64, 2, ping_pong=True, lazy_rescale=False, o_stores=2),
        ForwardTile(64, 2, ping_pong=True, rescale_late=True, o_stores=2),
    ),
}


def name_of(tile: ForwardTile) -> str:
    """The fields that differ from the defaults."""
    flags = ("ping_pong", "q_in_registers", "rescale_late")
    words = [f"{64 * tile.warpgroups}x{tile.block_n}", *(flag for flag in flags if getattr(tile, flag))]
    return " ".join([*words, "lazy" if tile.lazy_rescale else "always", f"stages={tile.stages}"])


def overrides(tile: ForwardTile) -> dict[str, Any]:
    fields = {name.upper(): value for name, value in asdict(tile).items()}
    return fields | {"BLOCK_M": 64 * tile.warpgroups}


def candidates(case: Case) -> tuple[ForwardTile, ...]:
    widest = max(case.dim, case.dv)
    return next(tiles for dim, tiles in CANDIDATES.items() if widest <= dim)


def compile_candidate(case: Case, tile: ForwardTile) -> int | str:
    """Bytes of spills, or what went wrong."""
    request = request_of(case)
    memory = DeviceMemory(request.q.device)
    out, lse = new_results(request, memory)
    try:
        (made,) = forward_launches(request, out, lse, new_state(memory, request), OFFLINE_PROCESSORS, **overrides(tile))
        return compile_for(90, made.kernel, made.args, made.options).spills
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def request_with(case: Case, x: Inputs) -> Request:
    options = ATTENTION.completed({"causal": case.causal, "window": None if case.window is None else (case.window, 0)})
    if x.cu is None:
        return checks.dense(x.q, x.k, x.v, options)
    return checks.packed(x.q, x.k, x.v, x.cu, x.cu, (case.longest, case.longest), options)


def runner(request: Request, changed: dict[str, Any]) -> tuple[Callable[[], None], Tensor]:
    device = request.q.device
    memory = DeviceMemory(device)
    out, lse = new_results(request, memory)
    out.fill_(torch.nan)
    launches = forward_launches(request, out, lse, new_state(memory, request), target_of(device).num_sms, **changed)

    for launch in launches:
        compute_cache_keys(launch)  # to find what `compile_candidate` compiled

    def run() -> None:
        for launch in launches:
            launch._replace(options=compile_options(launch))()

    return run, out


def time_shape(number: int, case: Case, tiles: list[ForwardTile], fa3: Any) -> None:
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x = case.inputs(device, 0)
        request = request_with(case, x)
        works = {TABLE: runner(request, {})} | {name_of(tile): runner(request, overrides(tile)) for tile in tiles}
        for run, _ in works.values():
            run()
        expected = works[TABLE][1].float()
        away = {name: (out.float() - expected).abs().max().item() for name, (_, out) in works.items()}
        found = in_turns({name: run for name, (run, _) in works.items()} | {"fa3": fa3.forward(case, x)}, device)
        times = {name: statistics.median(each) for name, each in found.items()}
    print(f"{number} {case.key}: fa3 {1e6 * times['fa3']:.1f} us")
    for name in works:
        wrong = "" if away[name] < 0.05 else f" WRONG {away[name]}"
        print(f"    {times['fa3'] / times[name]:.3f} {name}{wrong}", flush=True)
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--fa3", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    drawn = shapes(max(options.numbers) + 1, options.seed)
    wanted = [(n, tile) for n in options.numbers for tile in candidates(drawn[n].case)]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=get_context("spawn")) as pool:
        spilled = pool.map(compile_candidate, [drawn[n].case for n, _ in wanted], [tile for _, tile in wanted])
        found = dict(zip(wanted, spilled, strict=True))
    fa3 = roster(torch.device("cuda"), None, options.fa3.resolve()).known["fa3"]
    for n in options.numbers:
        case = drawn[n].case
        tiles = [tile for tile in candidates(case) if isinstance(found[n, tile], int)]
        time_shape(n, case, tiles, fa3)
        for tile in candidates(case):
            if found[n, tile]:
                print(f"          {name_of(tile)}: {found[n, tile]} {'bytes spilled' if tile in tiles else ''}")


if __name__ == "__main__":
    main()
