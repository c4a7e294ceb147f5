"""The tiles of the Hopper kernels: tables by head dim and kind of call, with the measured reason beside each row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """`warpgroups` of 64 queries each by `block_n` keys. `ping_pong`: the warpgroups issue their products one after the
    other. `lazy_rescale`: O is rescaled only by warps with a new maximum, behind a branch; otherwise always, overlapped
    with the exponentials. `o_stores`: O is stored in so many parts through the same shared memory, which leaves more of
    it for keys. `q_in_registers`: Q is loaded once a tile; S then reads half as much shared memory. `rescale_late`: O
    is rescaled while the next scores are computed. `q_stages`: with 2, Q of the next tile is loaded during this one.
    `programs`: on one SM; while one begins or ends a tile, another computes.
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


# The forward: (largest head dims of Q and K and of V, most keys, only causal or with a block mask, only without score
# terms) -> tile; TFLOPS on an H200, bf16, 16384 tokens, hidden 2048, at S = 512 1024 4096 16384 by default.
FORWARD: tuple[tuple[int, int, int | None, bool, bool, ForwardTile], ...] = (
    # causal and short, of the best peer (cuDNN): 64 x 512, 12 heads, 1.14, two programs 0.98, one of two warpgroups
    # 0.92; 64 x 128 1.09, 1.05, 0.99; 8 x 323 1.48, 1.37, 1.13; window of 128, packed: 1.74, 1.45, 1.08; 16 x 1024
    # 1.07, one of two 0.98; 3 x 1463 1.15, one of three 0.97; 4 x 4096 0.94, 1.00
    (64, 64, 1536, True, True, ForwardTile(64, 1, lazy_rescale=False, programs=3)),
    # full and short: 64 x 512, 12 heads, 1.04, 64 keys and three programs 1.03, one of two warpgroups 1.01; 1 x 512
    # 1.53, 1.37, 1.14; 2 x 128 1.67, 1.59, 1.32
    (64, 64, 640, False, True, ForwardTile(128, 1, lazy_rescale=False, programs=2)),
    # full and short, 64 x 512, 12 heads: 390, lazy 369, three warpgroups 331 (tiles of 192 rows); cuDNN 389; 32 x 577:
    # 1.27 of FlashAttention-3, lazy 1.19, three warpgroups 1.03 (768 rows of tiles instead of 640)
    (64, 64, 640, False, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # exponentials, not products, are the limit: three warpgroups overlap more of them, and ping-pong keeps them apart.
    # Of FlashAttention-3: full 4 x 4096 1.07, lazy 0.98; 1 x 16384 1.00, 0.92; 2 x 8192 0.99, 0.93, lazy without
    # ping-pong 0.90; causal 2 x 8192, 64/8 heads, 1.00, lazy 0.90
    (64, 64, None, False, True, ForwardTile(128, 3, ping_pong=True, lazy_rescale=False, stages=3)),
    # with mods, a bias or a block mask: 4096, causal with alibi 814 us, lazy 839; documents 278 us, lazy 282
    (64, 64, None, True, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # with mods or a bias: of three warpgroups, with 160 registers each, alibi spills 204 bytes and a bias 2752
    (64, 64, None, False, False, ForwardTile(128, 2, ping_pong=True)),
    # D 72, of the best peer: 64 x 256 1.10, packed 1.16; two programs of one warpgroup 0.85, 0.85
    (72, 72, None, False, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # D 80, of the best peer: full 64 x 257 1.11, three warpgroups of 64 keys 1.05, two of 128 0.93; causal 32 x 693
    # 1.11, 1.01 (two of 128); D 96, causal 64 x 256: 0.92, 0.93
    (96, 96, 768, False, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # 16 heads, 1024 and 8192: full 518 555, causal 372 523; lazy 494 528, without ping-pong 453 500; causal lazy
    # 349 495; three stages 1 to 3 % less; three warpgroups of 64 keys 438 499, 312 455
    (96, 96, None, False, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # causal and short, of the best peer: 32 x 512 0.99, one program of two warpgroups 0.96; 64 x 256 0.87, 0.89; with
    # grouped heads 32 x 256 1.06, 0.97, 64 x 128 1.06, 0.96, 2 x 512 1.09, 0.92
    (128, 128, 640, True, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # causal, 1024 2048 4096 16384: 417 532 609 686; lazy 405 - 583 669; without ping-pong 414 - 594 672; at 256 64 keys
    # are 3 % faster, which is not worth another kernel
    (128, 128, None, True, False, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)),
    # full and short, of the best peer: 1 x 257, 25 heads, 1.73, one program of two warpgroups 1.18
    (128, 128, 384, False, True, ForwardTile(64, 1, lazy_rescale=False, programs=2)),
    # full: 4 x 512, 128 heads, 1.05, lazy without ping-pong 0.98, two programs 0.91; 8 x 1025 0.93, 0.90, 0.84;
    # 4 x 1337 0.985, 0.92
    (128, 128, 1536, False, True, ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, q_stages=2)),
    # full, of FlashAttention-3: 8 x 2048 1.03, lazy 0.99, with ping-pong 1.03; 1 x 16384 1.01, 0.98, 1.01; 1024
    # queries on 16384 0.98 to 1.01, 0.77, 0.99; 2048 on 8192 1.00, 0.75, 1.00
    (128, 128, None, False, True, ForwardTile(128, 2, lazy_rescale=False)),
    # with mods or a bias
    (128, 128, None, False, False, ForwardTile(128, 2)),
    # 16 heads, 1024 and 8192: full 633 688, causal 458 644; lazy 608 658, 447 614; 64 keys 531 572, 429 545;
    # with a bias it spills 324 bytes, with alibi 144
    # 4096, causal: 698, rescaled before that 686, lazy 669
    (
        *(192, 128, None, False, True),
        ForwardTile(128, 2, ping_pong=True, lazy_rescale=False, o_stores=2, rescale_late=True),
    ),
    # of 128 keys D 192 spills 1400 bytes; 1024 and 8192: full 560 646, causal 439 605; two stages 557 642, 429 605;
    # without ping-pong 524 563, 425 543; always 573 625, 449 599; with a document mask it spills 100 bytes
    # 4096, full and causal: 638 600, lazy 639 589; Q in shared memory 623 583 (lazy), rescaled before that 616 575;
    # without ping-pong 611 568
    (
        *(192, 192, None, False, True),
        ForwardTile(64, 2, True, lazy_rescale=False, stages=3, o_stores=2, q_in_registers=True, rescale_late=True),
    ),
    # 64 keys: O's 128 registers leave no room for more; 4096 and 16384: full 704 754, causal 657 754; always 651 674,
    # 609 676; with ping-pong 0 to -2 %
    (256, 256, None, False, False, ForwardTile(64, 2, o_stores=2)),
    # Two warpgroups compute the same scores, and each half of the columns of O; there is room for one tile of K and V.
    # 4096, causal: 3.1 times as fast as the portable kernels.
    (512, 512, None, False, False, ForwardTile(64, 2, stages=1, o_stores=2)),
)
MAX_WHOLE_ROWS = 256  # columns of O that a warpgroup can hold for 64 queries


# Of a block mask without score terms, up to head dim 64: warpgroups leave out different tiles, so they must not wait
# for one another, and further stages let one be ahead. us, 16 heads, 16384: neighbourhood 162, with ping-pong and two
# stages 184, lazy 170, 3 and 5 stages 164 163; causal documents of 1000 147, 151, 154; of 4000 341, 353, 367
LISTED = ForwardTile(128, 2, lazy_rescale=False, stages=4)
FP8_FORWARD = ForwardTile(128, 2, ping_pong=True, lazy_rescale=False)  # of the blocks in which fp8 operands are stored


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Blocks of `block_m` queries and tiles of `block_n` keys. `dq_by_tma`: TMA adds dQ to global memory instead of
    atomics. With deterministic=True and head dim up to 128 it always does.
    """

    block_m: int
    block_n: int
    dq_by_tma: bool


# The backward: (largest padded head dims of Q and K and of V, only without score terms and in any order) -> tile;
# TFLOPS on an H200, bf16, 16384 tokens, hidden 2048, full and causal at S = 16384
BACKWARD: tuple[tuple[int, int, bool, BackwardTile], ...] = (
    # 555 578; by atomics 520 540, 64 queries by atomics 506 501 and by TMA 444 448: half the copies of half the size
    (64, 64, True, BackwardTile(128, 128, dq_by_tma=True)),
    # of 128 queries softcap spills 868 bytes, alibi 260
    (64, 64, False, BackwardTile(64, 128, dq_by_tma=False)),
    # full 604, by atomics 568: the fence before dQ waits for them
    (128, 128, False, BackwardTile(64, 128, dq_by_tma=True)),
    # in two passes (`backward_passes`); there is no room for a tile of dQ. FlashAttention-3's time over ours, causal
    # 4 x 4096 and 16 x 1024: 192 0.92 0.83, tiles of 64 keys 0.80 0.65; 192 by 128 1.01 0.89, in halves 0.99 0.94
    (192, 192, True, BackwardTile(64, 128, dq_by_tma=False)),
    # there is no room for a tile of dQ
    (256, 256, False, BackwardTile(64, 64, dq_by_tma=False)),
)
