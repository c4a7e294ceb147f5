"""Who takes part: tilewise's backends and every peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from tilewise.backends.registry import NAMES
from tilewise.errors import AttentionError
from tilewise_lab.bench.peers import FlashAttn, FlashAttn3, FlashInfer, Xformers
from tilewise_lab.bench.provider import OURS, Provider, Tilewise
from tilewise_lab.bench.torch_peers import Flex, Naive, Sdpa, TorchFlash


@dataclass(frozen=True)
class Roster:
    """All known providers, and the names of those to be measured."""

    known: Mapping[str, Provider]
    asked: tuple[str, ...] = field(default=())

    def taking_part(self) -> list[Provider]:
        return [provider for name, provider in self.known.items() if name in self.asked]


# Default peers: the fast ones; the others by name or with `--peers all`.
DEFAULT = {"cuda": ("cudnn", "fa2", "flash-attn", "fa3", "fa4"), "cpu": ("sdpa", "naive")}


def roster(device: torch.device, peers: tuple[str, ...] | None = None, fa3: Path | None = None) -> Roster:
    """tilewise's backends and the peers that were named; unknown names are an error.

    >>> roster(torch.device("cpu"), ("naive",)).asked
    ('tilewise-reference', 'tilewise-torch', 'tilewise-triton', 'tilewise-hopper', 'naive')
    """
    ours = [Tilewise(f"{OURS}-{backend}", f"tilewise, backend={backend!r}", backend) for backend in NAMES[1:]]
    others = [
        Sdpa("sdpa", "torch SDPA, torch's own choice"),
        Sdpa("cudnn", "torch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION, cpu=False),
        TorchFlash("fa2", "torch SDPA, FlashAttention-2", SDPBackend.FLASH_ATTENTION, cpu=False),
        Sdpa("efficient", "torch SDPA, memory-efficient", SDPBackend.EFFICIENT_ATTENTION, cpu=False),
        Flex("flex", "torch FlexAttention, compiled"),
        Naive("naive", "the textbook in torch, the whole matrix"),
        FlashAttn("flash-attn", "flash-attn 2"),
        FlashAttn3("fa3", "FlashAttention-3", folder=fa3),
        FlashAttn("fa4", "FlashAttention-4", "flash_attn.cute", None),
        Xformers("xformers", "xformers memory_efficient_attention"),
        FlashInfer("flashinfer", "FlashInfer, ragged prefill"),
    ]
    known = {provider.name: provider for provider in [*ours, *others]}
    backends = tuple(provider.name for provider in ours)
    if device.type == "cuda":  # the others are for CPUs and for reading
        backends = tuple(name for name in backends if name not in (f"{OURS}-reference", f"{OURS}-torch"))
    if peers is None:
        peers = DEFAULT.get(device.type, DEFAULT["cpu"])
    elif peers == ("all",):
        peers = tuple(known)
    for name in peers:
        if name not in known:
            raise AttentionError("--peers", name, f"'all', or of: {', '.join(known)}")
    return Roster(known, tuple(dict.fromkeys((*backends, *peers))))
