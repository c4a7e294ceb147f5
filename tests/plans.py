"""Calls whose plans are compared. On a CPU no call has a plan: `on_gpu` makes tensors say that they are on a GPU, and
`Counted` stands before all backends. Rows of tests/tables/plans/different.txt are two calls that differ in one thing,
those of equal.txt two that share a plan.

Only this module knows how plans are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import tilewise
from tests.covering import FOLDER as TABLES
from tilewise.backends import registry
from tilewise.backends.reference import ReferenceBackend
from tilewise.plan_cache import plans

FOLDER = TABLES / "plans"


class Counted:
    """The reference, which counts.

    Attributes:
        made: names of the runners that were made.
        ran: names of the runners that ran.
    """

    name, reason = "counted", "it counts"

    def __init__(self, reference: Any = None) -> None:
        self.made: list[str] = []
        self.ran: list[str] = []
        self._reference = reference or ReferenceBackend()
        if reference is None:
            self.kv = Counted(self._reference.kv)
            self.kv.made, self.kv.ran = self.made, self.ran

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._reference, name)
        if not name.endswith("_runner"):
            return found

        def make(*args: Any, **options: Any) -> Any:
            run = found(*args, **options)
            self.made.append(name.removesuffix("_runner"))

            def counted(tensors: Sequence[Tensor | None]) -> Any:
                self.ran.append(name.removesuffix("_runner"))
                return run(tensors)

            return counted

        return make


@contextmanager
def on_gpu(*, limit: int | None = None) -> Iterator[Counted]:
    """Calls have plans; none is kept at the start. `limit`: of the plans that are kept."""
    backend = Counted()
    plans.clear()
    try:
        with (
            patch.object(torch.Tensor, "is_cuda", property(lambda _: True), create=True),
            patch.object(registry, "BACKENDS", (backend, *registry.BACKENDS)),
            patch.object(plans, "limit", plans.limit if limit is None else limit),
        ):
            yield backend
    finally:
        plans.clear()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within `on_gpu`: tensors say that they are on a CPU."""
    with patch.object(torch.Tensor, "is_cuda", property(lambda _: False)):
        yield


@contextmanager
def without_plans() -> Iterator[None]:
    """Calls do not find the plans that were made before."""
    kept = dict(plans)
    plans.clear()
    try:
        yield
    finally:
        plans.clear()
        plans.update(kept)


def count() -> int:
    """How many calls have plans."""
    return len(plans)


def forget() -> None:
    plans.clear()


@tilewise.score_mod
def scaled(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score * table[h] * by


@tilewise.score_mod
def shifted(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score + table[h] * by


@tilewise.mask_mod
def before(b, h, q_idx, kv_idx, ends):  # type: ignore[no-untyped-def]
    return kv_idx < ends[q_idx]


SHAPE = 1, 8, 4, 16
bf16, half, single = torch.bfloat16, torch.float16, torch.float32


def r(*shape: int, dtype: torch.dtype = single, grad: bool = False) -> Tensor:
    """Other numbers in every call."""
    return torch.randn(shape or SHAPE).to(dtype).requires_grad_(grad)


def three(n: int = 8, dtype: torch.dtype = single, grad: bool = False) -> dict[str, Tensor]:
    return {name: r(1, n, 4, 16, dtype=dtype, grad=grad) for name in "qkv"}


def strided() -> Tensor:
    return r(1, 4, 8, 16).transpose(1, 2)


def unaligned() -> Tensor:
    return r(8 * 4 * 16 + 1)[1:].view(SHAPE)


def negative() -> Tensor:
    """A view with the negative bit, with the strides of any other."""
    return torch.randn(8 * 4 * 16, dtype=torch.complex64).conj().imag.as_strided(SHAPE, (512, 64, 16, 1))


def cu(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def ends(n: int = 8) -> Tensor:
    return torch.randint(1, n, (n,)).int()


def attention(same: str = "", **changes: Any) -> Any:
    """`same`: names of tensors that are one."""
    given = three() | changes
    for name in same[1:]:
        given[name] = given[same[0]]
    return tilewise.attention, given


def packed(**changes: Any) -> Any:
    given = {name: x[0] for name, x in three().items()} | {"cu_seqlens_q": cu(0, 3, 8), "cu_seqlens_k": cu(0, 3, 8)}
    return tilewise.attention_varlen, given | changes


def pages() -> Tensor:
    """Three of six pages for each of two sequences."""
    return torch.randperm(6).int().view(2, 3)


def kv(**changes: Any) -> Any:
    given = {"q": r(2, 1, 4, 16), "k_cache": r(6, 8, 2, 16), "v_cache": r(6, 8, 2, 16), "lengths": lengths()}
    return tilewise.attention_kv, given | {"page_table": pages()} | changes


def new(n: int = 1, **changes: Any) -> dict[str, Any]:
    return {"k_new": r(2, n, 2, 16), "v_new": r(2, n, 2, 16)} | changes


def append(**changes: Any) -> Any:
    _, given = kv()
    del given["q"]
    return tilewise.append_kv, given | new() | changes


def lengths() -> Tensor:
    return torch.randint(1, 16, (2,)).int()


def made_plan(**changes: Any) -> Any:
    """A call with a plan of its own."""
    function, given = kv(**changes)
    return function, given | {"plan": tilewise.plan_kv(**given)}


def turn(rows: int = 32, **options: Any) -> tilewise.Rotary:
    angles = torch.randn(rows, 4)
    return tilewise.Rotary(angles.cos(), angles.sin(), **options)


def int8_caches(kind: str) -> dict[str, Any]:
    caches = {name: torch.randint(-99, 99, (6, 8, 2, 16)).to(torch.int8) for name in ("k_cache", "v_cache")}
    scales = {"head": lambda: torch.rand(2) / 50, "token": lambda: torch.rand(6, 8, 2) / 50, "float": lambda: 0.01}
    return caches | {"k_scale": scales[kind](), "v_scale": scales[kind]()}


def blocks(block: int = 128) -> tilewise.mods.BlockMask:
    return tilewise.block_mask(before(ends()), 8, 8, block=(block, block))


def twice(name: str, other: str, *shape: int) -> dict[str, Tensor]:
    """One tensor as two options."""
    x = r(*shape)
    return {name: x, other: x}


def evaluated(text: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """(function, arguments) of a call, with new tensors."""
    torch.manual_seed(seed)
    made: tuple[Any, dict[str, Any]] = eval(text, globals())
    return made


def tensors_of(given: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call, with those of its mods."""
    found = []
    for x in given.values():
        x = getattr(x, "mod", x)
        parts = [x] if isinstance(x, Tensor) else x if isinstance(x, tuple) else getattr(x, "tensors", ())
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def pairs(name: str) -> list[tuple[str, str]]:
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return list(zip(lines[::2], lines[1::2], strict=True))
