"""What runs in several gloo processes, spawned once for all jobs of a size: torch takes seconds to import.

A job is a function of (rank, ranks) that returns the faults it found; all ranks run the same jobs in the same order.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

JOBS = {  # by module
    "a_few": "exact", "odd_sizes": "exact", "two_axes": "exact", "max_logit": "exact", "probe": "exact",
    "all_ways": "exact", "disagreement": "exact",
    "training": "with_torch", "dtensors": "with_torch", "torchs_own": "with_torch", "compiled": "with_torch",
    "models": "hugging_face", "models_compiled": "hugging_face",
}  # fmt: skip


def spawn(ranks: int, names: list[str], folder: Path) -> dict[str, list[str]]:
    """The faults that all ranks found, by job."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_process, (ranks, port, names, folder), nprocs=ranks)
    found: dict[str, list[str]] = {name: [] for name in names}
    for rank in range(ranks):
        for name, faults_ in json.loads((folder / f"{rank}.json").read_text()).items():
            found[name] += [f"rank {rank}: {x}" for x in faults_]
    return found


def _process(rank: int, ranks: int, port: int, names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found: dict[str, list[str]] = {}
    for name in names:
        try:
            module = import_module(f"tests.tilewise.distributed.{JOBS[name]}")
            found[name] = getattr(module, name)(rank, ranks)
        except Exception:
            found[name] = [traceback.format_exc()]
            (folder / f"{rank}.json").write_text(json.dumps({n: found.get(n, ["not run"]) for n in names}))
            raise  # others may wait for this one
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
