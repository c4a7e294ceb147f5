"""Results that nobody measured, with numbers chosen so that every derived one can be worked out by hand."""

from __future__ import annotations

from dataclasses import asdict

from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.results import Cell, Entry, Peak, Results

OURS, PEER, OTHER = "tilewise-triton", "fa2", "cudnn"


def facts(case: Case) -> dict[str, object]:
    return asdict(case) | {"lengths": []}  # as JSON gives it back


def entry(*times: float) -> Entry:
    return Entry("ok", errors={"out": [1e-3, 2e-3]}, first=0.5, times=list(times))


def cell(group: str = "forward", dim: int = 64, seq: int = 1024, causal: bool = False, **times: list[float]) -> Cell:
    """times: triton, fa2, cudnn; one number per round."""
    case = Case(16384 // seq, seq, 2048 // dim, 2048 // dim, dim, causal)
    entries = {
        OURS: entry(*times.get("triton", [1.0, 1.0, 1.0])),
        PEER: entry(*times.get("fa2", [2.0, 2.0, 2.0])),
        OTHER: entry(*times.get("cudnn", [1.5, 1.5, 1.5])),
        "fa3": Entry("missing", "flash_attn_interface is not installed"),
    }
    roof = {"amount": 4e12, "unit": "FLOP", "times": [1.0, 1.0, 1.0]}
    return Cell(group, case.key, facts(case), case.flops(group), OURS, entries, {"matmul": roof}, checked="4 of 16")


def results(
    *cells: Cell, device: str = "NVIDIA H200", kind: str = "cuda", date: str = "2026-11-15 10:00 UTC"
) -> Results:
    machine = {
        "device": device, "kind": kind, "date": date, "tilewise": "0.1.0", "commit": "0123456789ab", "torch": "2.11.0",
        "triton": "3.6.0", "cuda": "12.8", "cudnn": "91900",
    }  # fmt: skip
    settings = {
        "dtype": "bfloat16", "tokens": 16384, "hidden": 2048, "rounds": 3, "burst_ms": 20.0, "samples": 4, "seed": 0,
        "memory": facts(Case(1, 0, 16, 16, 128, True)),
    }  # fmt: skip
    providers = {
        name: {"about": name, "version": f"{name} 1", "asked": True, "missing": None} for name in (OURS, PEER, OTHER)
    }
    providers["fa3"] = {"about": "FA3", "version": None, "asked": True, "missing": "it is not installed"}
    memory = [Peak(name, n, n * size) for n in (1024, 2048) for name, size in (("tilewise", 10), ("naive", n))]
    return Results(machine, settings, providers, list(cells), memory, {"import_ms": 12.0}, seconds=1.0)


def grid(**times: list[float]) -> list[Cell]:
    return [
        cell(group, dim, seq, causal, **times)
        for group in ("forward", "backward")
        for dim in (64, 128)
        for causal in (False, True)
        for seq in (1024, 2048, 4096)
    ]
