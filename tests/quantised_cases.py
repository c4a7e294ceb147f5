"""Quantised KV caches, with the numbers that they should hold: the nearest of all that a format has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.kv_cases import KvInputs
from tilewise_lab.fuzz.stored import LARGEST as LARGEST_BY_NAME
from tilewise_lab.fuzz.stored import groups_of, pack, token_scale, unpack
from tilewise_lab.fuzz.stored import nearest as nearest_by_name

E4M3, E5M2, INT8, INT4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
LARGEST = {getattr(torch, name): x for name, x in LARGEST_BY_NAME.items()}
KINDS = ("none", "float", "tensor", "head", "batch", "token", "group")  # of scales


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nearest(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(number, code) of the format that is nearest to each of y."""
    return nearest_by_name(y, name_of(dtype))


def quantised(
    x: KvInputs, dtypes: tuple[torch.dtype, torch.dtype], kinds: tuple[str, str], seed: int = 0
) -> tuple[KvInputs, dict[str, Tensor]]:
    """The same call with quantised caches; its `keys` and `values` are what the cache holds after the call. And the
    bytes that k_cache and v_cache, and scales by token, should hold then, where new tokens were written."""
    g = torch.Generator().manual_seed(seed)
    case, options = x.case, dict(x.options)
    caches, lists, wanted = [], [], {}
    for name, cache, tokens, dtype, kind in zip("kv", (x.k, x.v), (x.keys, x.values), dtypes, kinds, strict=True):
        if dtype not in LARGEST:
            caches.append(cache.to(dtype))
            lists.append([t.to(dtype).double() for t in tokens])
            continue
        heads, dim = cache.shape[-2:]
        size = 1.0 / LARGEST[dtype] * 4.0
        constant = {
            "none": torch.ones(()),
            "float": torch.tensor(size),
            "tensor": torch.tensor(size),
            "head": (torch.rand(heads, generator=g) + 0.5) * size,
            "batch": (torch.rand(len(case.lengths), heads, generator=g) + 0.5) * size,
        }
        by_token = groups_of(kind) > 0
        scale: Any = constant.get(kind)
        if by_token:
            scale = torch.full((*cache.shape[:3], *([] if kind == "token" else [groups_of(kind)])), torch.nan)
        width = dim // 2 if dtype == INT4 else dim
        pool = torch.full((*cache.shape[:3], width), 127, dtype=torch.uint8)  # nan in float8
        after, after_scale, found = pool.clone(), scale.clone(), []
        starts = case.starts or (0,) * len(case.lengths)
        for b, sequence in enumerate(tokens):
            numbers_of = torch.zeros(sequence.shape, dtype=torch.float64)
            for j, token in enumerate(sequence.cpu()):
                row, at = places(x, b, j)
                own = new_scales(token, dtype, kind) if by_token else scale[b] if kind == "batch" else scale
                grouped = own if groups_of(kind) > 1 else own.reshape(-1, 1)
                code = pack(token, name_of(dtype), grouped)
                numbers_of[j] = unpack(code, name_of(dtype), grouped)
                if j < starts[b]:
                    continue
                after[row, at] = code
                if by_token:
                    after_scale[row, at] = own
                if j < case.lengths[b]:
                    pool[row, at] = code
                    if by_token:
                        scale[row, at] = own
            found.append(numbers_of.to(cache.device))
        wanted[name] = after
        if by_token:
            wanted[f"{name}_scale"] = after_scale
        caches.append(strided(pool.to(cache.device), cache).view(dtype))
        lists.append(found)
        if kind == "float":
            options[f"{name}_scale"] = float(scale)
        elif kind != "none":
            options[f"{name}_scale"] = scale.to(cache.device)
    return replace(x, k=caches[0], v=caches[1], options=options, keys=lists[0], values=lists[1]), wanted


def new_scales(token: Tensor, dtype: torch.dtype, kind: str) -> Tensor:
    """Scales of one token (heads, dim): (heads,), or by group (heads, groups)."""
    found = token_scale(token, name_of(dtype), groups_of(kind))
    return found.squeeze(-1) if kind == "token" else found


def strided(x: Tensor, like: Tensor) -> Tensor:
    """x with the order of axes in memory of another tensor of as many axes."""
    order = sorted(range(x.dim()), key=lambda axis: -like.stride(axis))
    back = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def places(x: KvInputs, b: int, j: int) -> tuple[int, int]:
    """Where token j of sequence b lies."""
    page = x.case.page
    if not page:
        return int(x.options["cache_rows"][b]), j
    table = x.options["page_table"]
    if isinstance(table, tuple):
        indptr, flat = table
        return int(flat[indptr[b] + j // page]), j % page
    return int(table[b, j // page]), j % page
