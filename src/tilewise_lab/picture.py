"""Pictures of mods. Of a mask: which pairs see each other, and which tiles a kernel skips, masks or takes as they are.
Of a score mod: what becomes of a score of 0 at every pair, or of a range of scores."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.mods.blocks import BlockMask
from tilewise.mods.expr import Place, evaluate
from tilewise.mods.program import Mod

# (hidden, seen) colours of an empty, a partial and a full tile
COLOURS = (((244, 244, 242), (244, 244, 242)), ((250, 232, 205), (217, 119, 6)), ((37, 99, 165), (37, 99, 165)))
LINE = (208, 208, 204)
LEAST, ZERO, MOST = (37, 99, 165), (250, 250, 248), (217, 119, 6)  # colours of values below, at and above 0
WIDEST = 1024
RAMP = 64.0


def picture(mask: BlockMask, b: int = 0, h: int = 0) -> Tensor:
    """(rows, columns, 3) bytes: one pixel a pair, or every n-th pair of long sequences; tiles are outlined."""
    *_, n_q, n_k = mask.shape
    i, j, step = _positions(n_q, n_k)
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


def _positions(n_q: int, n_k: int) -> tuple[Tensor, Tensor, int]:
    step = max(1, -(-max(n_q, n_k) // WIDEST))
    return torch.arange(0, n_q, step)[:, None], torch.arange(0, n_k, step), step


class Heat(NamedTuple):
    """A score mod at every pair: its values (rows, columns), and what they are the values of."""

    mod: Mod
    values: Tensor
    what: str

    @property
    def image(self) -> Tensor:
        """(rows, columns, 3) bytes, the deeper the further from 0."""
        depth = (self.values / self.values.abs().max().clamp(min=1e-30))[..., None]
        least, zero, most = (torch.tensor(c, dtype=torch.float32) for c in (LEAST, ZERO, MOST))
        return (zero + depth.abs() * (torch.where(depth < 0, least, most) - zero)).round().to(torch.uint8)

    @property
    def summary(self) -> str:
        least, most = self.values.min().item(), self.values.max().item()
        return f"{self.mod.name.lstrip('_')}, {self.what}: from {least:.4g} to {most:.4g}"


def heat(mod: Mod, n_q: int, n_k: int, b: int = 0, h: int = 0) -> Heat:
    """What a score of 0 becomes at every pair; where the mod knows no places, scores from -64 to 64 along the keys."""
    i, j, _ = _positions(n_q, n_k)
    root = mod.program.root
    if root.deps & {"i", "j"}:
        score, what = torch.zeros(len(i), len(j)), f"a score of 0 at {n_q} queries x {n_k} keys of head {h}"
    else:
        score = torch.linspace(-RAMP, RAMP, len(j)).expand(len(i), -1)
        what = f"scores from {-RAMP:g} to {RAMP:g}, left to right"
    tensors = [t.detach().cpu() for t in mod.tensors]
    (value,) = evaluate([root], Place(b, h, i, j, n_q, n_k), score, tensors, mod.numbers)
    return Heat(mod, torch.as_tensor(value, dtype=torch.float32).expand(len(i), len(j)), what)


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
    name = mask.mod.name.lstrip("_")
    return (
        f"{name}: {mask.shape[2]} queries x {mask.shape[3]} keys, tiles of {mask.block[0]} x"
        f" {mask.block[1]}: {counts[0]} empty, {counts[1]} partial, {counts[2]} full; {share:.1f} % visited"
    )


def draw(drawn: BlockMask | Heat) -> tuple[bytes, str]:
    """The file of the picture, and its summary."""
    if isinstance(drawn, Heat):
        return png(drawn.image), drawn.summary
    return png(picture(drawn)), summary(drawn)


def html(drawn: BlockMask | Heat) -> str:
    """A page with the picture and what its colours mean."""
    file, words = draw(drawn)
    if isinstance(drawn, Heat):
        least, most = drawn.values.min().item(), drawn.values.max().item()
        legend = [
            (f"{least:.4g}", LEAST if least < 0 else ZERO),
            ("0", ZERO),
            (f"{most:.4g}", MOST if most > 0 else ZERO),
        ]
    else:
        legend = [
            ("empty tile: skipped", COLOURS[0][0]),
            ("partial tile: a hidden pair", COLOURS[1][0]),
            ("partial tile: a seen pair", COLOURS[1][1]),
            ("full tile: no mask", COLOURS[2][1]),
        ]
    keys = "".join(f'<span><i style="background:rgb{colour}"></i>{label}</span>' for label, colour in legend)
    data = base64.b64encode(file).decode()
    return (
        '<!doctype html><meta charset="utf-8"><title>tilewise mod</title>'
        "<style>body{font:15px/1.5 system-ui;margin:2rem}"
        "img{image-rendering:pixelated;max-width:100%;min-width:min(640px,100%);border:1px solid #d0d0cc}"
        "span{margin-right:1.5em}i{display:inline-block;width:.9em;height:.9em;margin-right:.4em;border:1px solid #bbb}"
        f"</style><p>{words}<p>{keys}<p><img alt='{words}' src='data:image/png;base64,{data}'>"
    )
