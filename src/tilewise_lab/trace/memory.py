"""Two memories, and a count of what passes between them.

HBM is large and far: whole tensors, in blocks of rows. SRAM is small and near: the blocks a program works on. Nothing
is computed from HBM: a block must be loaded first, and what SRAM cannot hold is an error, as it is on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from tilewise.errors import AttentionError

Block = tuple[str, int]


class Memory:
    """
    >>> import torch
    >>> memory = Memory({"q": torch.zeros(8, 4).split(2)}, itemsize=2)
    >>> memory.load("q", 3).shape, memory.loaded["q"], memory.used
    (torch.Size([2, 4]), 16, 16)
    """

    def __init__(self, hbm: dict[str, Sequence[Tensor]], *, itemsize: int, sram: int | None = None) -> None:
        self.hbm = {name: list(blocks) for name, blocks in hbm.items()}
        self.sram: dict[Block, Tensor] = {}
        self.itemsize, self.limit = itemsize, sram
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self.events: list[tuple[str, str, int]] = []
        self.flops = 0
        self.peak = 0

    @property
    def used(self) -> int:
        return sum(self.size(x) for x in self.sram.values())

    def size(self, x: Tensor) -> int:
        return x.numel() * self.itemsize

    def load(self, name: str, index: int) -> Tensor:
        """HBM -> SRAM; a block that is there already costs nothing."""
        if (name, index) not in self.sram:
            block = self.hbm[name][index]
            self.loaded[name] += self.size(block)
            self.events.append(("load", name, index))
            self.keep(name, index, block.clone())
        return self.sram[name, index]

    def store(self, name: str, index: int, x: Tensor) -> None:
        """SRAM -> HBM"""
        self.hbm[name][index] = x.clone()
        self.stored[name] += self.size(x)
        self.events.append(("store", name, index))

    def keep(self, name: str, index: int, x: Tensor) -> Tensor:
        """A block made in SRAM, or changed there: no traffic, but it takes room."""
        self.sram[name, index] = x
        self.peak = max(self.peak, self.used)
        if self.limit is not None and self.used > self.limit:
            held = ", ".join(sorted({name for name, _ in self.sram}))
            raise AttentionError(
                "shared memory", f"{self.used} bytes for {held}", f"at most {self.limit}: smaller blocks"
            )
        return x

    def drop(self, *names: str) -> None:
        self.sram = {block: x for block, x in self.sram.items() if block[0] not in names}

    def multiply(self, tile: Tensor, depth: int) -> None:
        """Count a product with a tile of scores: 2 FLOPs for each of its elements and each of `depth` columns."""
        self.flops += 2 * tile.numel() * depth

    def take_events(self) -> tuple[list[Block], list[Block]]:
        """Loads and stores since the last time."""
        events, self.events = self.events, []
        return (
            [(name, i) for kind, name, i in events if kind == "load"],
            [(name, i) for kind, name, i in events if kind == "store"],
        )
