"""Times shapes of the Hopper kernels beside FlashAttention-3 and cuDNN: calls of real models, and the grid of 36 cells.

    python bench/hopper_rows.py --fa3 DIR --out FOLDER    # DIR has FlashAttention-3's fa3.py

Prints the means and the lowest ratios of each set and writes every row to FOLDER/rows.json and FOLDER/grid.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tilewise_lab.bench.cases import Case, grid, random_lengths
from tilewise_lab.bench.model_shapes import Shape
from tilewise_lab.bench.provider import OURS, Tilewise
from tilewise_lab.bench.providers import roster
from tilewise_lab.bench.shapes_run import PEERS, report, sweep

K = 1024
SEQS = (512, K, 2 * K, 4 * K, 8 * K, 16 * K)
ROWS = {
    "GQA 32/8, 4 x 4k": Case(4, 4 * K, 32, 8, 128, True),
    "GQA 32/8, 1 x 16k": Case(1, 16 * K, 32, 8, 128, True),
    "GQA 64/8 D 64, 2 x 8k": Case(2, 8 * K, 64, 8, 64, True),
    "MQA 32/1, 4 x 4k": Case(4, 4 * K, 32, 1, 128, True),
    "GQA 16/8 D 256, 2 x 8k": Case(2, 8 * K, 16, 8, 256, True),
    "GQA 32/8, 1 x 2k": Case(1, 2 * K, 32, 8, 128, True),
    "documents, 16k tokens": Case(1, 0, 32, 8, 128, True, lengths=random_lengths(16, 2 * K)),
    "packed 16 x 1024 D 64": Case(1, 0, 12, 12, 64, True, lengths=(K,) * 16),
    "packed 8 x 2048 full": Case(1, 0, 16, 16, 128, lengths=(2 * K,) * 8),
    "window 1024 of 16k": Case(1, 16 * K, 32, 8, 128, True, window=K),
    "window 128 of 16k D 64": Case(1, 16 * K, 64, 8, 64, True, window=128),
    "D 96": Case(4, 4 * K, 16, 16, 96, True),
    "D 192": Case(4, 4 * K, 16, 16, 192, True),
    "192 by 128": Case(4, 4 * K, 16, 16, 192, True, value_dim=128),
    "D 80 full": Case(4, 4 * K, 16, 16, 80),
    "1024 queries on 16k": Case(1, 16 * K, 16, 16, 128, queries=K),
    "ViT 64 x 577 D 64": Case(64, 577, 16, 16, 64),
    "deterministic 4 x 4k": Case(4, 4 * K, 16, 16, 128, True, deterministic=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--seconds", type=float, help="after so many no new shape of a set begins")
    options = parser.parse_args()
    device = torch.device("cuda")
    known = roster(device, None, options.fa3.resolve()).known
    providers = [Tilewise(OURS, "tilewise, as auto chooses"), *(known[name] for name in PEERS)]
    cells = grid((64, 128, 256), ("full", "causal"), SEQS, tokens=16 * K, hidden=2 * K, dtype="bfloat16")
    sets = {
        "rows": [Shape(n, name, case) for n, (name, case) in enumerate(ROWS.items())],
        "grid": [Shape(n, "grid", case) for n, case in enumerate(cells)],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, shapes in sets.items():
        found = sweep(shapes, providers, device, options.out / f"{name}.json", options.seconds)
        print(name, report(found), *(f"{x['ratio']} {x['pass']} {x['key']}" for x in found["rows"]), sep="\n")


if __name__ == "__main__":
    main()
