"""Random calls of every kind for GPUs that are not here: whether the front end of Triton's compiler accepts their
kernels. Triton's interpreter accepts more, such as a variable of a branch that holds a function.

Run by test_calls for rows on its standard input: {"category": a name in CATEGORIES, "target": one in TARGETS, "seed"}.
Prints a line of JSON for each. With arguments it draws the rows itself:

    python -m tests.tilewise.backends.compile_calls --seconds 600 --seed 3
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from tests.tilewise.backends.drawn_calls import CATEGORIES
from tests.tilewise.backends.front_end import FrontEnd
from tilewise import AttentionError
from tilewise.request import Gpu

# (a GPU, the backend that is asked for)
TARGETS = {
    "sm_90": (Gpu("cuda", 90), "auto"),
    "sm_90 hopper": (Gpu("cuda", 90), "hopper"),
    "sm_90 triton": (Gpu("cuda", 90), "triton"),
    "sm_80": (Gpu("cuda", 80), "auto"),
    "sm_89": (Gpu("cuda", 89), "auto"),
    "sm_100": (Gpu("cuda", 100), "auto"),
    "gfx942": (Gpu("hip", "gfx942"), "auto"),
}


def report(front: FrontEnd, category: str, target: str, seed: int) -> dict[str, Any]:
    """Runs a call: its kernels that were not translated before, and what went wrong."""
    gpu, backend = TARGETS[target]
    text = CATEGORIES[category](random.Random(f"{category} {target} {seed}"), backend)
    front.kernels.clear()
    front.failures.clear()
    refused, error = "", ""
    with front.on(gpu):
        try:
            exec(text, {})
        except AttentionError as found:
            refused = str(found)
        except Exception:
            error = traceback.format_exc()
    failures = [f"{kernel}: {words}" for kernel, words in dict(front.failures).items()]
    return {"kernels": {name: n for (_, name), n in front.kernels.items()}, "refused": refused, "failures": failures,
            "error": error, "code": text if failures or error else ""}  # fmt: skip


def drawn(seed: int, categories: list[str], targets: list[str]) -> Iterator[dict[str, Any]]:
    """Rows without end: every category for every target in turn."""
    for n in count():
        for target in targets:
            for category in categories:
                yield {"category": category, "target": target, "seed": 1_000_000 * seed + n}


def main() -> int:
    parser = ArgumentParser(description="Compile the kernels of random calls up to Triton's intermediate code.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="which calls (default: %(default)s)")
    parser.add_argument("--categories", nargs="*", choices=CATEGORIES, default=[*CATEGORIES])
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=[*TARGETS])
    parser.add_argument(
        "--stages", type=int, default=0, help="stages after the front end; 3 finds tiles that are too large"
    )
    asked = parser.parse_args()
    front, began, failed = FrontEnd(asked.stages), time.monotonic(), 0
    totals: Counter[tuple[str, str]] = Counter()
    with front.running():
        for row in drawn(asked.seed, asked.categories, asked.targets):
            if time.monotonic() - began > asked.seconds:
                break
            found = report(front, **row)
            totals.update({(row["target"], name): n for name, n in found["kernels"].items()})
            totals[row["category"], row["target"]] += sum(found["kernels"].values())
            wrong = [*found["failures"], *([found["error"]] if found["error"] else [])]
            failed += bool(wrong)
            if wrong:
                print("\n".join([f"# {row}", found["code"], *wrong]), flush=True)
    for (name, other), n in sorted(totals.items()):
        print(f"{n:6} {name}: {other}")
    print(f"{failed} calls with a kernel that does not compile, or another error")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        sys.exit(main())
    one = FrontEnd()
    with one.running():
        for fields in json.load(sys.stdin):
            print(json.dumps(report(one, **fields)), flush=True)
