"""Pictures of masks: which pairs see each other, and which tiles a kernel skips, masks or takes as they are."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

from tilewise.mods.blocks import BlockMask
from tilewise.mods.expr import Place, evaluate

# (hidden, seen) colours of an empty, a partial and a full tile
COLOURS = (((244, 244, 242), (244, 244, 242)), ((250, 232, 205), (217, 119, 6)), ((37, 99, 165), (37, 99, 165)))
LINE = (208, 208, 204)
WIDEST = 1024


def picture(mask: BlockMask, b: int = 0, h: int = 0) -> Tensor:
    """(rows, columns, 3) bytes: one pixel a pair, or every n-th pair of long sequences; tiles are outlined."""
    *_, n_q, n_k = mask.shape
    step = max(1, -(-max(n_q, n_k) // WIDEST))
    i, j = torch.arange(0, n_q, step)[:, None], torch.arange(0, n_k, step)
    tensors = [t.cpu() for t in mask.mod.tensors]
    (seen,) = evaluate([mask.mod.program.root], Place(b, h, i, j, n_q, n_k), None, tensors, mask.mod.numbers)
    seen = torch.as_tensor(seen).expand(len(i), len(j)).long()
    kinds = mask.tiles.cpu()[b % mask.shape[0], h % mask.shape[1]].long()
    colours = torch.tensor(COLOURS, dtype=torch.uint8)
    image = colours[kinds[i // mask.block[0], j // mask.block[1]], seen]
    for axis, position, size in ((0, i[:, 0], mask.block[0]), (1, j, mask.block[1])):
        if size // step >= 8:
            edges = (position % size < step) & (position > 0)
            image.transpose(0, axis)[edges] = torch.tensor(LINE, dtype=torch.uint8)
    return image


def png(image: Tensor) -> bytes:
    """The file of an 8-bit RGB picture."""
    height, width, _ = image.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), image.reshape(height, -1)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(rows.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def summary(mask: BlockMask) -> str:
    counts = torch.bincount(mask.tiles.flatten().long().cpu(), minlength=3).tolist()
    share = 100 * (counts[1] + counts[2]) / max(1, sum(counts))
    return (
        f"{mask.mod.program.name}: {mask.shape[2]} queries x {mask.shape[3]} keys, tiles of {mask.block[0]} x"
        f" {mask.block[1]}: {counts[0]} empty, {counts[1]} partial, {counts[2]} full; {share:.1f} % visited"
    )


def html(mask: BlockMask) -> str:
    """A page with the picture and what its colours mean."""
    data = base64.b64encode(png(picture(mask))).decode()
    keys = "".join(
        f'<span><i style="background:rgb{colour}"></i>{label}</span>'
        for label, colour in (
            ("empty tile: skipped", COLOURS[0][0]),
            ("partial tile: a hidden pair", COLOURS[1][0]),
            ("partial tile: a seen pair", COLOURS[1][1]),
            ("full tile: no mask", COLOURS[2][1]),
        )
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>tilewise mask</title>'
        "<style>body{font:15px/1.5 system-ui;margin:2rem}"
        "img{image-rendering:pixelated;max-width:100%;min-width:min(640px,100%);border:1px solid #d0d0cc}"
        "span{margin-right:1.5em}i{display:inline-block;width:.9em;height:.9em;margin-right:.4em;border:1px solid #bbb}"
        f"</style><p>{summary(mask)}<p>{keys}<p><img alt='{summary(mask)}' src='data:image/png;base64,{data}'>"
    )
