"""Which tile a kernel uses: tables by pass, element size and padded head dim, with the reason beside each line.

There is no autotuning at run time: the same call runs the same kernel, every time. The rows fit the memory of their
GPUs and compile without a spilled register, apart from the exceptions that the tests of the
backends list. Only rows with a measurement beside them were timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ... import settings
from ...errors import AttentionError


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, `warps` of 32 threads, `stages` of loads in flight.

    `apart`: dK and dV are summed in separate passes. That takes one more product, but each pass holds one sum instead
    of two. `chunk`: products along the head dim take so many columns at a time, for operands that would not fit into
    registers. `piece`: sums along the head dim, and the rows that they are made of, are kept in pieces of so many
    columns: Triton divides a product of fewer rows than columns among the warps by columns, and with it the product
    before, whose row maxima then cross warps. `branch`: a branch skips the mask of tiles of scores without hidden
    pairs. Without it the forward has a loop without a mask, and one with a mask for the edges of the window; the
    backward compares every tile with bounds of its rows. Calls with a mask mod keep the branch.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    apart: bool = False
    chunk: int = 512
    piece: int = 512
    branch: bool = True

    @property
    def block(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    def options(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "CHUNK": self.chunk,
            "PIECE": self.piece,
            "BRANCH": self.branch,
        }


KB = 1024
# (pass, or pass and term, bytes per element) -> {largest padded head dim: tile}
Table = dict[tuple[str, int], dict[int, Tile]]

HOPPER: Table = {
    ("forward", 2): {
        64: Tile(64, 64, 4, 3),  # 392 to 458 TFLOP/s; 128x64x8 within 5 %, 128x128x8 20 % slower (H200, 2026-11-15)
        128: Tile(64, 64, 4, 3),  # 407 to 480; two programs per SM hide what one 128x128x8 (360 to 468) cannot
        256: Tile(128, 64, 8, 2),  # 471 (causal, 4k); 64x32x4 373, 128x32x8 308, 64x64x4 299
        512: Tile(32, 32, 8, 2),
    },
    ("query", 2): {
        64: Tile(64, 64, 4, 3),  # 518 to 624; 2 stages 10 % slower
        128: Tile(64, 64, 4, 2),  # 454 to 551; 64x32x4 with 3 stages is equal
        256: Tile(128, 32, 8, 2),  # 372 (causal, 4k); 64x64x8 295, 64x32x4 283, 64x32x8 190 and with 3 stages 233
        512: Tile(16, 32, 8, 1),
    },
    ("key", 2): {
        64: Tile(64, 64, 4, 3),  # 420 to 495; 2 stages 10 % slower, 8 warps 20 %
        128: Tile(32, 64, 4, 3),  # 463 to 558; 2 stages 20 % slower, 64x64x4 spills and is 25 % slower
        # the whole backward twice as fast as with 32x32x8; of tiles that hold both sums 64x64x8 has 257 TFLOP/s (and
        # spills), 32x64x8 with 3 stages 247, 32x32x8 134
        256: Tile(32, 128, 8, 2, apart=True),
        512: Tile(16, 16, 8, 1),
    },
    ("jvp", 2): {  # from 256 on the largest that do not spill, not timed
        64: Tile(64, 64, 4, 3),  # 478 TFLOP/s (full, 2k; H200); 128x128x8 407, 2 stages 395, 128x64x8 304
        128: Tile(128, 64, 8, 2),  # 455; 128x32x8 with 3 stages 438, 64x32x4 408
        256: Tile(128, 16, 8, 2),  # 128x32x8 spills 132 bytes, 64x32x4 with 2 stages 248
        512: Tile(16, 16, 8, 1, chunk=64),  # q and its movement alone would fill the registers
    },
    ("hvp query", 2): {  # four tiles of scores at once; from 256 on the largest that do not spill, not timed
        64: Tile(64, 64, 4, 2),  # 498; 64x32x4 with 3 stages 486, 128x64x8 392, 3 stages 385
        128: Tile(128, 64, 8, 2),  # 553; 128x32x8 with 3 stages 492, 64x32x4 465
        256: Tile(32, 32, 8, 1, chunk=64),  # 64x32x8 spills 252 bytes, and whole rows 384 and more
        512: Tile(16, 16, 8, 1, chunk=64),
    },
    ("hvp key", 2): {
        64: Tile(32, 64, 4, 3),  # 395; 64x64x4 443, but it spills 272 bytes if causal; 64x128x8 398
        128: Tile(32, 128, 8, 2),  # 398 (1.38 ms); dk and dv apart 1.62 and more: 64x128x8 1.02, 32x64x4 0.60
        256: Tile(16, 32, 8, 1, apart=True, chunk=64),  # 16x64x8 spills 292 bytes
        512: Tile(16, 16, 8, 1, apart=True, chunk=64),
    },
    ("sums", 2): {  # of the gradients of biases and mods; from 128 on the largest that do not spill, not timed
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 8, 2),
        256: Tile(64, 32, 8, 2),  # 128x32x8 needs 303 KB of shared memory
        512: Tile(16, 32, 8, 1),
    },
    # float32, three products of TF32 for each; ms on an H200, causal, 2048 tokens of 16384, hidden 2048. 64 rows take
    # the matrix instructions of a warpgroup, 8 warps want 128 of them. Chunks have not been timed.
    ("forward", 4): {
        64: Tile(64, 32, 4, 1),  # 3.35; 32x32x4 4.82, 64x64x8 6.29
        128: Tile(128, 32, 8, 1),  # 3.68; 64x32x4 4.52, 32x32x4 6.01 and 2 KB spilled
        256: Tile(32, 32, 8, 1, chunk=32),
        512: Tile(16, 32, 8, 1, chunk=64),
    },
    ("query", 4): {
        64: Tile(64, 64, 4, 1),  # 3.93; 128x32x8 4.56, 32x32x4 6.70
        128: Tile(16, 32, 4, 1),  # 7.14; 32x32x4 9.09 and 3 KB spilled, 64x32x8 10.0
        256: Tile(32, 32, 8, 1, chunk=32),
        512: Tile(16, 32, 8, 1, chunk=32),
    },
    ("key", 4): {
        64: Tile(32, 128, 8, 1),  # 6.08; 32x64x4 6.70 (spills in packed sequences), 32x32x4 8.56
        128: Tile(64, 16, 8, 1),  # 10.2; 32x32x4 11.2 and 2 KB spilled, 32x16x8 15.6
        256: Tile(32, 32, 8, 1, apart=True, chunk=32),
        512: Tile(16, 16, 8, 1, apart=True, chunk=32),
    },
    ("jvp", 4): {
        64: Tile(64, 32, 4, 1),
        128: Tile(64, 32, 8, 1, chunk=64),
        256: Tile(16, 32, 8, 1, chunk=64),
        512: Tile(16, 16, 8, 1, chunk=64),
    },
    ("hvp query", 4): {
        64: Tile(16, 32, 4, 1, chunk=32),
        128: Tile(16, 32, 4, 1, chunk=32),
        256: Tile(16, 16, 8, 1, chunk=32),
        512: Tile(16, 16, 8, 1, chunk=32),
    },
    ("hvp key", 4): {
        64: Tile(32, 16, 4, 1, apart=True, chunk=32),
        128: Tile(32, 16, 4, 1, apart=True, chunk=32),
        256: Tile(16, 16, 8, 1, apart=True, chunk=32),
        512: Tile(16, 16, 8, 1, apart=True, chunk=32),
    },
}
# Ampere, Ada and the Blackwell of workstations: 99 KB of shared memory on the small parts, operands in registers
AMPERE: Table = {
    ("forward", 2): {
        64: Tile(128, 64, 4, 2),  # a third stage spills 12 bytes
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 32, 8, 1),
        512: Tile(16, 16, 8, 1),
    },
    ("query", 2): {
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 64, 8, 2),
        256: Tile(32, 32, 8, 1),
        512: Tile(16, 16, 8, 1),
    },
    ("key", 2): {
        64: Tile(32, 128, 8, 2),
        128: Tile(64, 64, 8, 2),
        256: Tile(32, 32, 8, 1),
        512: Tile(16, 16, 8, 1),
    },
    ("jvp", 2): {
        64: Tile(64, 32, 4, 2),
        128: Tile(32, 32, 8, 1),
        256: Tile(16, 32, 8, 1),
        512: Tile(16, 16, 8, 1, chunk=64),
    },
    ("forward", 4): {
        64: Tile(32, 32, 4, 2),
        128: Tile(32, 32, 4, 1, chunk=32),
        256: Tile(16, 32, 4, 1, chunk=64),
        512: Tile(16, 32, 8, 1, chunk=64),
    },
    ("query", 4): {
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 4, 1, chunk=16),
        256: Tile(16, 32, 4, 1, chunk=32),
        512: Tile(16, 32, 8, 1, chunk=32),
    },
    ("key", 4): {
        64: Tile(32, 32, 4, 1, chunk=32),
        128: Tile(32, 32, 4, 1, apart=True, chunk=16),
        256: Tile(32, 32, 8, 1, apart=True, chunk=32),
        512: Tile(16, 16, 8, 1, apart=True, chunk=32),
    },
    ("jvp", 4): {
        64: Tile(16, 16, 4, 1),
        128: Tile(16, 16, 4, 1, chunk=64),
        256: Tile(16, 32, 8, 1, chunk=64),
        512: Tile(16, 16, 8, 1, chunk=64),
    },
}
AMPERE["hvp query", 2] = {
    64: Tile(32, 32, 4, 2),
    128: Tile(32, 32, 8, 1),
    256: Tile(16, 16, 8, 1),
    512: Tile(16, 16, 8, 1, chunk=64),
}
AMPERE["hvp key", 2] = {
    64: Tile(32, 32, 4, 2),
    128: Tile(32, 32, 8, 1, apart=True),
    256: Tile(16, 16, 8, 1, apart=True),
    512: Tile(16, 16, 8, 1, apart=True, chunk=64),
}
AMPERE["hvp query", 4], AMPERE["hvp key", 4] = HOPPER["hvp query", 4], HOPPER["hvp key", 4]
HOPPER["sums", 4] = HOPPER["query", 4] | {64: Tile(64, 32, 4, 1, chunk=32), 128: Tile(64, 32, 4, 1, chunk=32)}
AMPERE["sums", 4] = AMPERE["query", 4] | {64: Tile(32, 32, 4, 1, chunk=32)}
AMPERE["sums", 2] = AMPERE["query", 2] | {128: Tile(64, 64, 8, 2, chunk=64)}
# Terms that want more than their pass has; none timed. A bias keeps a tile of addresses, tile lists a loop in a loop.
# Rows of several heads keep where each of them lies.
HOPPER["forward groups", 2] = {256: Tile(64, 32, 4, 2)}  # 128x64x8 spills 8 to 16 bytes, 64x64x8 serialises
AMPERE["forward groups", 2] = {64: Tile(64, 64, 4, 2)}  # 128x64x4 spills 12 to 56 bytes with terms, with a bias 1.2 KB
HOPPER["forward bias", 2] = {128: Tile(64, 32, 4, 3)}  # 64x64x4 spills 2 KB, 64x64x8 with 2 stages none
AMPERE["forward bias", 2] = {128: Tile(64, 32, 8, 2)}  # 128x64x8 spills 1.7 KB, 64x64x8 and 64x32x4 60 bytes
AMPERE["forward blocks", 2] = {  # with a mask that reads a tensor by i and j, as that of a neighborhood:
    64: Tile(64, 64, 4, 2),  # 72 KB; 128x64x4 wants 128, and sm_86, sm_89 and sm_120 have 99
    128: Tile(64, 32, 8, 2),  # 64 KB; 128x64x8 wants 168 KB, and spills 1.9
}
AMPERE["key blocks", 2] = {128: Tile(32, 64, 8, 2)}  # 72 KB; 64x64x8 wants 112, and spills 708 bytes
AMPERE["forward blocks", 4] = {  # with their pass's tiles they spill 120 and 168 bytes
    128: Tile(32, 32, 8, 1, chunk=32),
    256: Tile(16, 32, 8, 1, chunk=64),
}

# mma.sync takes its operands from registers. A branch around the mask keeps Triton 3.6 from giving both products of a
# loop one division among the warps: every tile of keys then costs 9 barriers and 27 stores to shared memory in place of
# 2 and 0. FlashAttention-2's time / ours, sm_80 code on an H200, causal, 4k: bench/results/2026-11-19-older-gpus.md.
# sm_90 code is 4 to 20 % slower without the branch: its products are divided by rows anyhow.


def _without_branch(rows: dict[str, dict[int, Tile]]) -> Table:
    """AMPERE with these tiles for head dims up to 256; terms keep what they have there."""
    table = dict(AMPERE)
    for which, better in rows.items():
        table[which, 2] = AMPERE[which, 2] | {d: replace(tile, branch=False) for d, tile in better.items()}
        for term in ("groups", "bias", "blocks"):  # not timed
            table[f"{which} {term}", 2] = AMPERE[which, 2] | AMPERE.get((f"{which} {term}", 2), {})
    return table


ADA: Table = _without_branch({
    "forward": {
        64: Tile(128, 64, 4, 3),  # 1.09; 2 stages 0.97, with the branch 0.67
        128: Tile(64, 64, 4, 3, piece=64),  # 0.92; 128x32x4 0.94, but it spills 160 bytes; with the branch 0.65
        256: Tile(64, 64, 4, 2, piece=64),  # 0.93; 64x32x4 0.80, with the branch 0.39
    },
    "query": {  # of the whole backward of FlashAttention-2, whose five products are here seven
        64: Tile(128, 32, 4, 3),  # 2.26; 64x64x4 1.98, with the branch 1.63
        128: Tile(64, 64, 4, 2, piece=64),  # 1.85; 64x32x4 with 3 stages 1.63, with the branch 1.05
        256: Tile(64, 16, 4, 3, piece=64),  # 1.58; 64x32x4 1.69, but it spills 204 bytes; with the branch 0.61
    },
    "key": {
        64: Tile(64, 64, 4, 2),  # 1.43; 32x64x4 with 3 stages 1.38, with the branch 0.97
        128: Tile(64, 64, 4, 2, piece=64),  # 1.36; 32x64x4 1.27, with the branch 0.85
        256: Tile(32, 64, 4, 2, apart=True, piece=64),  # 0.94; with the branch 0.61
    },
})  # fmt: skip
A100: Table = ADA | {("key", 2): ADA["key", 2] | {256: Tile(64, 64, 4, 2, apart=True, piece=64, branch=False)}}  # 1.03

# Blackwell of the data center; not timed. Products of 64 rows and more are summed in tensor memory, of 512 columns:
# Triton makes a trap of a kernel that wants more, as three products of TF32 do, which take it three times.
BLACKWELL: Table = {(which, size): (AMPERE if size == 4 else HOPPER)[which, size] for which, size in HOPPER}
BLACKWELL["forward", 2] = HOPPER["forward", 2] | {128: Tile(64, 64, 4, 2)}  # with 3 stages documents spill 24 bytes
BLACKWELL["forward bias", 2] = {128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 2)}  # 64x32x4 spills 536 bytes
BLACKWELL["query", 4] = AMPERE["query", 4] | {64: Tile(32, 32, 4, 1, chunk=32)}  # whole rows spill 16 to 32 bytes
BLACKWELL["forward blocks", 4] = AMPERE["forward blocks", 4]
BLACKWELL["jvp", 2] = HOPPER["jvp", 2] | {256: Tile(64, 32, 8, 1)}  # 128 rows trap, 4 warps spill 64 bytes
# AMD's data center GPUs, 64 KB of shared memory; not timed. A warp has 64 lanes, each with 512 registers in a program
# of four warps, with 256 in one of eight.
CDNA: Table = AMPERE | {
    ("forward", 2): AMPERE["forward", 2] | {128: Tile(64, 64, 4, 2)},  # 128x64x8 spills 548 bytes with a bias
    ("query", 2): {
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 32, 4, 2),  # 64x64x8 spills 56 to 192 bytes with terms
        256: Tile(32, 32, 4, 1),  # 8 warps spill 92
        512: Tile(16, 16, 4, 1),  # 8 warps spill 60
    },
    ("key", 2): {
        64: Tile(32, 64, 4, 2),
        128: Tile(32, 32, 4, 2),  # 64x64x4 spills 380, with 1 stage none
        256: Tile(32, 32, 4, 1),
        512: Tile(16, 16, 4, 1),
    },
}
CDNA["sums", 2] = CDNA["query", 2]
CDNA["forward bias", 2] = CDNA["forward", 2]


Arch = int | str  # 90 for sm_90; "gfx942"


class Chip(NamedTuple):
    """What decides a tile: `shared` bytes that one program may have, and the table of rows that fit."""

    shared: int
    tiles: Table


CHIPS: dict[Arch, Chip] = {
    80: Chip(163 * KB, A100),
    86: Chip(99 * KB, ADA),
    87: Chip(163 * KB, A100),
    89: Chip(99 * KB, ADA),
    90: Chip(227 * KB, HOPPER),
    100: Chip(227 * KB, BLACKWELL),
    103: Chip(227 * KB, BLACKWELL),
    120: Chip(99 * KB, AMPERE),
    121: Chip(99 * KB, AMPERE),
    "gfx90a": Chip(64 * KB, CDNA),
    "gfx942": Chip(64 * KB, CDNA),
    "gfx950": Chip(160 * KB, CDNA),
}


def chip(arch: Arch) -> Chip:
    """The chip of an architecture; for one that is not in the table, the smallest of its kind."""
    return CHIPS.get(arch) or (CHIPS[120] if isinstance(arch, int) else CHIPS["gfx942"])


def tile(which: str, arch: Arch, itemsize: int, padded_dim: int, *terms: str | None) -> Tile:
    """The tile of a pass ("forward", "query", "key", "sums", "jvp", "hvp query", "hvp key") on sm_<arch>, or on an AMD
    GPU by its name; if terms ("groups", "bias", "blocks") have rows of their own, the row of the last such term.

    >>> tile("forward", 90, 2, 128)
    Tile(block_m=64, block_n=64, warps=4, stages=3, apart=False, chunk=512, piece=512, branch=True)
    """
    table = chip(arch).tiles
    own = measured_tiles()
    rows = table[which, itemsize] | own.get((arch, which, itemsize), {})
    for term in terms:
        rows = rows | table.get((f"{which} {term}", itemsize), {}) | own.get((arch, f"{which} {term}", itemsize), {})
    return next(row for limit, row in sorted(rows.items()) if padded_dim <= limit)


@cache
def measured_tiles() -> dict[tuple[Arch, str, int], dict[int, Tile]]:
    """The rows of the file that TILEWISE_TILES names, which replace those of the tables. It is read once.

    The file is a JSON list; each row is {"arch": 80, "pass": "forward", "bytes": 2, "head_dim": 128, "tile":
    {"block_m": 128, "block_n": 64, "warps": 8, "stages": 3}} and replaces the tile of padded head dims up to head_dim.
    """
    name = settings.tiles_file()
    found: dict[tuple[Arch, str, int], dict[int, Tile]] = {}
    if not name:
        return found
    try:
        for row in json.loads(Path(name).read_text()):
            key = row["arch"], row["pass"], int(row["bytes"])
            found.setdefault(key, {})[int(row["head_dim"])] = Tile(**row["tile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AttentionError(
            settings.TILES, f"{name} ({type(error).__name__}: {error})", "a file of `tilewise tune`"
        ) from None
    return found


FEW_QUERIES, MANY_KEYS = 64, 1024  # of a dense call: keys of so few queries are divided among programs, if many


def heads_of_a_tile(queries: int, group: int, block_m: int) -> int:
    """How many heads, of a group that shares its keys, have their queries in one tile: all, if those of one head leave
    some of it empty. Then keys are read once for the group, and rows of the matrix units that would be idle are used.

    >>> heads_of_a_tile(5, 8, 64), heads_of_a_tile(64, 8, 64)
    (8, 1)
    """
    return group if queries < block_m else 1


def parts_of_keys(programs: int, keys: int, block_n: int, num_sms: int) -> int:
    """How many programs share the keys of one program, 1 to 64: as many as make at most one program per SM in all, each
    with at least four blocks of keys.

    Microseconds on an H200 (one query, 32 heads, 8 KV heads, D 128), in brackets with two programs per SM and
    undivided: batch 1, 65536 keys: 77 (81, 743); batch 4, 8192 keys: 47 (51, 102); batch 16, 8192 keys: 132 (138, 132).

    >>> parts_of_keys(8, 8192, 64, 132), parts_of_keys(128, 8192, 64, 132)
    (16, 1)
    >>> parts_of_keys(8, 400, 64, 132)
    1
    """
    return max(1, min(num_sms // max(programs, 1), keys // (4 * block_n), 64))


INTERPRETER = Tile(16, 16, 4, 1, chunk=32)  # small enough that tiny shapes still have edge, interior and ragged tiles
