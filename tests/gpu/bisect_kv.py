"""Who of `bench kv` fails, and how far it gets: every caller in a process of its own, for a fault ends the process.

    python -m tests.gpu.bisect_kv [--serving .serving] [--group medium] [--case "B16 4k"] [--tiles table ..]

A line for each: the steps that it took (the answer checked; calls one behind the other; a CUDA graph replayed; rounds
on the clock of the bench, the cache emptied before each call), then "ok" or the error. Ours also without overlapping
launches (TILEWISE_NO_OVERLAP=1), and at last everybody together.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

from tilewise_lab.bench import kv
from tilewise_lab.bench.kv_cases import GROUPS, inputs
from tilewise_lab.bench.measure import rounds
from tilewise_lab.clock import clock_for

REPEATS = 50


def one(names: list[str], options: argparse.Namespace) -> None:
    """The steps of these callers, in this process."""
    device = torch.device("cuda")
    case = next(case for case in GROUPS[options.group]() if case.name == options.case)
    x = inputs(case, device, torch.bfloat16)
    tiles = ["" if tile == "table" else tile for tile in options.tiles]
    callers = kv._callers(case, x, tiles, kv._peers(Path(options.serving), device))
    recorded = {}
    for name in names or [*callers]:
        work = callers[name]()
        error = kv._error(case, x, work())
        step(f"{'checked' if error <= kv.TOLERANCE else 'WRONG'} ({error:.4f})")
        for _ in range(REPEATS):
            work()
        step("eager")
        recorded[name] = kv.graphed(work)
        for _ in range(REPEATS):
            recorded[name]()
        step("replayed")
        error = kv._error(case, x, work())
        step("checked again" if error <= kv.TOLERANCE else f"WRONG AFTERWARDS ({error:.4f})")
    rounds(recorded, clock_for(device), count=3, burst=0.003, limit=4.0, rng=random.Random(0), least=7)
    step("rounds")


def step(word: str) -> None:
    torch.cuda.synchronize()
    print(word, end=", ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serving", default=kv.SERVING)
    parser.add_argument("--group", default="medium")
    parser.add_argument("--case", default="B16 4k")
    parser.add_argument("--tiles", nargs="+", default=["table", "16x64x4x3x3x1x168"])
    parser.add_argument("--one", nargs="*", help="these callers, in this process")
    options = parser.parse_args()
    if options.one is not None:
        one(options.one, options)
        return 0
    ours = ["tilewise" if tile == "table" else tile for tile in options.tiles]
    alone = [(name, [name], apart) for name in ours for apart in ("0", "1")]
    others = [(name, [name], "0") for name in ("dense", "fa3", "vllm")]
    failed = 0
    for label, names, apart in [*alone, *others, ("everybody", [], "0")]:
        command = [sys.executable, "-m", "tests.gpu.bisect_kv", "--serving", options.serving, "--group", options.group]
        command += ["--case", options.case, "--tiles", *options.tiles, "--one", *names]
        env = os.environ | {"TILEWISE_NO_OVERLAP": apart}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        last = "ok" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1][:160]
        failed += done.returncode != 0 or "WRONG" in done.stdout
        print(f"{label + (', no overlap' if apart == '1' else ''):36}{done.stdout.strip()} {last}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
