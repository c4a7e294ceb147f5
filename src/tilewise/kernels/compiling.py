"""Kernels are compiled side by side, in threads, and whoever waits long is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from .offline import all_options
from .triton_private import cache_folder, side_by_side

PATIENCE = 1.0  # seconds of silence
log = logging.getLogger("tilewise")


def compiled(launches: Sequence[Any], ahead: Callable[[], Sequence[Any]] | None = None) -> list[Any]:
    """The compiled kernels of launches. Where that takes time, those of `ahead`, which will be wanted next, are begun
    as well; whoever asks for them then finds them on their way."""
    with side_by_side() as start:
        found = [_asked(made) for made in launches]
        following = ahead() if ahead is not None and any(map(_is_asked, found)) else ()
        every = [*zip(found, launches, strict=True), *((_asked(made), made) for made in following)]
        every.sort(key=_size)
        start(kernel for kernel, _ in reversed(every) if _is_asked(kernel))
    _tell([x for x in found if _is_asked(x)])
    return [x.result() if _is_asked(x) else x for x in found]


def _size(asked: tuple[Any, Any]) -> int:
    """Kernels with many parameters take longest to compile. They are started first, for they are started one after the
    other; of two with as many, the later launch, which is a backward's."""
    return len(asked[1].kernel.params)


def _asked(made: Any) -> Any:
    return made.kernel.warmup(*made.args, grid=(1,), **all_options(made.kernel, made.options))


def _is_asked(kernel: Any) -> bool:
    return hasattr(kernel, "future")


def _tell(pending: Sequence[Any]) -> None:
    done, missing = wait([x.future for x in pending], PATIENCE)
    if missing:
        log.warning(
            "tilewise: compiling %d kernels for this kind of call, %d done after %.0f s; they are kept in %s"
            " (tilewise.warmup and `tilewise warm` compile ahead of time)",
            len(pending), len(done), PATIENCE, cache_folder(),
        )  # fmt: skip
