"""Calls with a KV cache whose sequences begin with the same pages."""

from __future__ import annotations

from typing import Any

import torch

from tests.kv_cases import KvCase, KvInputs, inputs


def shared_inputs(
    case: KvCase, common: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> KvInputs:
    """Inputs in which each sequence has so many leading pages of the one before it. `case` has pages; what is appended
    must lie in pages of its own."""
    x = inputs(case, dtype, device, seed)
    page = case.page
    rows = page_rows(x)
    for b in range(1, len(common)):
        n = common[b]
        rows[b][:n] = rows[b - 1][:n]
        held = min(n * page, len(x.keys[b]), len(x.keys[b - 1]))
        for of in (x.keys, x.values):
            of[b][:held] = of[b - 1][:held]
        for j in range(held, case.lengths[b]):
            x.k[rows[b][j // page], j % page], x.v[rows[b][j // page], j % page] = x.keys[b][j], x.values[b][j]
    table: Any = x.options["page_table"]
    if case.csr:
        flat = torch.tensor([p for row in rows for p in row], dtype=torch.int32, device=device)
        x.options["page_table"] = table[0], flat
    else:
        for b, row in enumerate(rows):
            table[b, : len(row)] = torch.tensor(row, dtype=torch.int32, device=device)
    return x


def page_rows(x: KvInputs) -> list[list[int]]:
    """The pages of every sequence."""
    table: Any = x.options["page_table"]
    needed = [-(-len(keys) // x.case.page) for keys in x.keys]
    if x.case.csr:
        return [part.tolist() for part in table[1].split(needed)]
    return [row[:n] for row, n in zip(table.tolist(), needed, strict=True)]
