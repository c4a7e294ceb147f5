"""The tiles of the Hopper kernels: tables by head dim and kind of call, with the measured reason beside each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """`warpgroups` of 64 queries each by `block_n` keys. `ping_pong`: the warpgroups issue their products one after the
    other. `lazy_rescale`: O is rescaled only by warps with a new maximum, behind a branch; otherwise always, overlapped
    with the exponentials. `stages`: blocks of K, and of V, that shared memory has room for. `o_stores`: O is stored in
    so many parts through the same shared memory, which leaves more of it for keys. `q_in_registers`: Q is loaded once a
    tile; S then reads half as much shared memory. `rescale_late`: O is rescaled while the next scores are computed.
    `q_stages`: with 2, Q of the next tile is loaded during this one. `programs`: on one SM; while one begins or ends a
    tile, another computes.
    """

    block_n: int
    warpgroups: int
    ping_pong: bool = False
    lazy_rescale: bool = True
    stages: int = 2
    o_stores: int = 1
    q_in_registers: bool = False
    rescale_late: bool = False
    q_stages: int = 1
    programs: int = 1


class ForwardRow(NamedTuple):
    """A tile and the calls that it is for: head dims of Q and K up to `max_d`, and of V up to `max_dv`; up to
    `max_keys` keys (None: any number); with `only_banded`, only causal calls, windows and block masks; with
    `only_plain`, only calls without score terms and mask mods. The first row of FORWARD that fits a call has its
    tile."""

    max_d: int
    max_dv: int
    max_keys: int | None
    only_banded: bool
    only_plain: bool
    tile: ForwardTile


# All measurements are on an H200 in bf16. A call is "batch x sequence length", with hidden size 2048 unless the number
# of heads is given. A "ratio" is the time of the fastest other library (cuDNN or FlashAttention-3) divided by ours:
# above 1, we are faster. TFLOP/s are of calls with 16384 tokens in all. The first number is that of the row's own tile;
# the others are those of the tiles that the comment names, in its order. "Lazy" is a tile with `lazy_rescale`, "always"
# one without.
FORWARD: tuple[ForwardRow, ...] = (
    # max_d, max_dv, max_keys, only_banded, only_plain, tile
    # Causal and short. Ratios of this tile, two programs, one program of two warpgroups: 64 x 512 with 12 heads 1.14,
    # 0.98, 0.92; 64 x 128 1.09, 1.05, 0.99; 8 x 323 1.48, 1.37, 1.13; packed, window of 128 1.74, 1.45, 1.08.
    # Of this tile and one program of two warpgroups: 16 x 1024 1.07, 0.98. Of this tile and one program of three:
    # 3 x 1463 1.15, 0.97; 4 x 4096 0.94, 1.00.
    ForwardRow(64, 64, 1536, True, True, ForwardTile(64, 1, lazy_rescale=False, programs=3)),
    # Full and short. Ratios of this tile, 64 keys and three programs, one program of two warpgroups: 64 x 512 with 12
    # heads 1.04, 1.03, 1.01; 1 x 512 1.53, 1.37, 1.14; 2 x 128 1.67, 1.59, 1.32.
    ForwardRow(64, 64, 640, False, True, ForwardTile(128, 1, lazy_rescale=False, programs=2)),
    # Full and short, with score terms; measured without. TFLOP/s of 64 x 512 with 12 heads: 390, lazy 369, three
    # warpgroups 331 (tiles of 192 queries), cuDNN 389. Ratios to FlashAttention-3 of 32 x 577: 1.27, lazy 1.19, three
    # warpgroups 1.03 (768 rows of tiles instead of 640).
    ForwardRow(64, 64, 640, False, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # Exponentials, not products, are the limit: three warpgroups overlap more of them, and ping-pong keeps them apart.
    # Ratios to FlashAttention-3 of this tile and lazy: full 4 x 4096 1.07, 0.98; 1 x 16384 1.00, 0.92; 2 x 8192 0.99,
    # 0.93, lazy without ping-pong 0.90; causal 2 x 8192 with 64/8 heads 1.00, 0.90.
    ForwardRow(64, 64, None, False, True, ForwardTile(128, 3, ping_pong=True, lazy_rescale=False, stages=3)),
    # With mods, a bias or a block mask. Times at 4096 keys: causal with ALiBi 814 us, lazy 839 us; documents 278 us,
    # lazy 282 us.
    ForwardRow(64, 64, None, True, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # With mods or a bias. Three warpgroups, with 160 registers each, spill 204 bytes with ALiBi and 2752 with a bias.
    ForwardRow(64, 64, None, False, False, ForwardTile(128, 2, ping_pong=True)),
    # D 72. Ratios of this tile and two programs of one warpgroup: 64 x 256 1.10, 0.85; packed 1.16, 0.85.
    ForwardRow(72, 72, None, False, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # Causal and short. Ratios of this tile and two warpgroups of 128 keys: D 80, 32 x 693 1.11, 1.01; D 96, 64 x 256
    # 0.92, 0.93.
    ForwardRow(96, 96, 768, True, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # Full and short. Ratios of this tile and two warpgroups of 128 keys, D 80: 64 x 257 1.11, 0.93; 40 x 400 1.12,
    # 1.08; 16 x 512 1.07, 1.30; 16 x 730 0.94, 1.15.
    ForwardRow(96, 96, 448, False, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # TFLOP/s with 16 heads at 1024 and 8192 keys: full 518, 555, causal 372, 523; lazy full 494, 528, causal 349, 495;
    # without ping-pong full 453, 500; three warpgroups of 64 keys full 438, 499, causal 312, 455. Three stages have 1
    # to 3 % less.
    ForwardRow(96, 96, None, False, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # Causal and short. Ratios of this tile and one program of two warpgroups: 32 x 512 0.99, 0.96; 64 x 256 0.87, 0.89;
    # with grouped heads 32 x 256 1.06, 0.97; 64 x 128 1.06, 0.96; 2 x 512 1.09, 0.92.
    ForwardRow(128, 128, 640, True, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # Causal. TFLOP/s at 1024, 2048, 4096, 16384 keys: 417, 532, 609, 686; lazy 405, -, 583, 669; without ping-pong 414,
    # -, 594, 672. At 256 keys blocks of 64 keys are 3 % faster, which is not worth another kernel.
    ForwardRow(128, 128, None, True, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # Full and short. Ratios of this tile and one program of two warpgroups: 1 x 257 with 25 heads 1.73, 1.18.
    ForwardRow(128, 128, 384, False, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # Full. Ratios of this tile, lazy without ping-pong, two programs: 4 x 512 with 128 heads 1.05, 0.98, 0.91; 8 x 1025
    # 0.93, 0.90, 0.84; 4 x 1337 0.985, 0.92.
    ForwardRow(128, 128, 1536, False, True, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, q_stages=2)),
    # Full. Ratios to FlashAttention-3 of this tile, lazy, with ping-pong: 8 x 2048 1.03, 0.99, 1.03; 1 x 16384 1.01,
    # 0.98, 1.01; 1024 queries on 16384 keys 0.98 to 1.01, 0.77, 0.99; 2048 on 8192 1.00, 0.75, 1.00.
    ForwardRow(128, 128, None, False, True, ForwardTile(128, 2, lazy_rescale=False)),
    # With mods or a bias.
    ForwardRow(128, 128, None, False, False, ForwardTile(128, 2)),
    # TFLOP/s with 16 heads at 1024 and 8192 keys, measured without `rescale_late`: full 633, 688, causal 458, 644; lazy
    # full 608, 658, causal 447, 614; 64 keys full 531, 572, causal 429, 545. At 4096 keys, causal: 698, without
    # `rescale_late` 686, lazy 669. With a bias it spills 324 bytes, with ALiBi 144.
    ForwardRow(
        *(192, 128, None, False, True),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, o_stores=2, rescale_late=True),
    ),
    # With blocks of 128 keys D 192 spills 1400 bytes; with a document mask this tile spills 100.
    # TFLOP/s at 1024 and 8192 keys, all with Q in shared memory and without `rescale_late`: lazy full 560, 646, causal
    # 439, 605; lazy with two stages full 557, 642, causal 429, 605; lazy without ping-pong full 524, 563, causal 425,
    # 543; always full 573, 625, causal 449, 599. At 4096 keys, full and causal: this tile 638, 600; lazy 639, 589; lazy
    # with Q in shared memory 623, 583; that without `rescale_late` 616, 575; without ping-pong 611, 568.
    ForwardRow(
        *(192, 192, None, False, True),
        ForwardTile(64, 2, True, lazy_rescale=False, stages=3, o_stores=2, q_in_registers=True, rescale_late=True),
    ),
    # 64 keys, because O's 128 registers leave no room for more. TFLOP/s at 4096 and 16384 keys: full 704, 754, causal
    # 657, 754; always full 651, 674, causal 609, 676; with ping-pong 0 to 2 % less.
    ForwardRow(256, 256, None, False, False, ForwardTile(64, 2, o_stores=2)),
    # Two warpgroups compute the same scores, and each half of the columns of O; there is room for one tile of K and V.
    # At 4096 keys, causal: 3.1 times as fast as the portable kernels.
    ForwardRow(512, 512, None, False, False, ForwardTile(64, 2, stages=1, o_stores=2)),
)
MAX_WHOLE_ROWS = 256  # columns of O that a warpgroup can hold for 64 queries


# For a block mask without score terms, up to head dim 64. Warpgroups leave out different tiles, so they must not wait
# for one another, and further stages let one be ahead. Times in us with 16 heads and 16384 keys: neighbourhood 162,
# with ping-pong and two stages 184, lazy 170, three and five stages 164 and 163; causal documents of 1000 tokens 147,
# 151, 154, and of 4000 tokens 341, 353, 367, in the same order.
LISTED = ForwardTile(128, 2, lazy_rescale=False, stages=4)
# For fp8: its operands are stored in blocks of 128 keys.
FP8_FORWARD = ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Blocks of `block_m` queries and tiles of `block_n` keys. `dq_by_tma`: TMA adds dQ to global memory instead of
    atomics. With deterministic=True and head dim up to 128 it always does.
    """

    block_m: int
    block_n: int
    dq_by_tma: bool


class BackwardRow(NamedTuple):
    """A tile and the calls that it is for: padded head dims of Q and K up to `max_d`, and of V up to `max_dv`; with
    `only_fast`, only calls without score terms and with deterministic=False. The first row of BACKWARD that fits a call
    has its tile."""

    max_d: int
    max_dv: int
    only_fast: bool
    tile: BackwardTile


BACKWARD: tuple[BackwardRow, ...] = (
    # max_d, max_dv, only_fast, tile
    # TFLOP/s at 16384 keys, full and causal: 555, 578; by atomics 520, 540; blocks of 64 queries by atomics 506, 501,
    # by TMA 444, 448, because their copies have half the size.
    BackwardRow(64, 64, True, BackwardTile(128, 128, dq_by_tma=True)),
    # With blocks of 128 queries softcap spills 868 bytes, ALiBi 260.
    BackwardRow(64, 64, False, BackwardTile(64, 128, dq_by_tma=False)),
    # TFLOP/s at 16384 keys, full: 604; by atomics 568, because the fence before dQ waits for them.
    BackwardRow(128, 128, False, BackwardTile(64, 128, dq_by_tma=True)),
    # In two passes (`attend_values`); there is no room for a tile of dQ. Ratios to FlashAttention-3, causal 4 x 4096
    # and 16 x 1024: D 192 0.92, 0.83, with tiles of 64 keys 0.80, 0.65; D 192 by 128 1.01, 0.89, in halves 0.99, 0.94.
    BackwardRow(192, 192, True, BackwardTile(64, 128, dq_by_tma=False)),
    # There is no room for a tile of dQ.
    BackwardRow(256, 256, False, BackwardTile(64, 64, dq_by_tma=False)),
)
