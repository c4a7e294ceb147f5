"""Compiles the kernels of a model ahead of its first call, into Triton's cache.

Several processes compile, each its share of the kernels. Tensors are meta tensors: the name of a GPU is enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import settings
from .backends import registry
from .backends.common.offline import gpu_named
from .call.fields import ATTENTION
from .errors import AttentionError
from .request import Gpu, Request, gpu_of, has_triton
from .validation import dense as checks

# Batch and length: long, three short ones (for which the Hopper forward has tiles of their own), not a multiple of a
# tile. Kernels specialise on no more than that, and the backward on whether there are many tiles of keys, as in the
# first, or few, as in the last, which has one KV head.
SIZES = ((128, 4096), (2, 1024), (2, 512), (2, 256), (1, 1000))
TENSORS = ("bias", "sinks", "alibi_slopes")
WORKER = "import sys; from tilewise.warmup import compile_share; compile_share(sys.argv[1])"
Progress = Callable[[int, int, str], None]


class Kind(NamedTuple):
    """Calls that share their kernels."""

    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    dtype: str
    packed: bool
    backward: bool
    options: dict[str, Any]


class Warmed(NamedTuple):
    """The result of `tilewise.warmup`.

    Attributes:
        kernels: number of kernels that the calls need.
        compiled: how many were compiled. The others were in the cache.
    """

    kernels: int
    compiled: int


def warmup(
    head_dim: int | Sequence[int] = (),
    *,
    value_dim: int | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
    packed: bool = False,
    backward: bool = True,
    config: Any = None,
    gpu: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Warmed:
    """Compile the kernels of calls like these, for every length and batch, with or without a GPU.

    >>> import tilewise
    >>> tilewise.warmup(128, heads=32, kv_heads=8)  # doctest: +SKIP
    >>> # without a GPU, in a Dockerfile
    >>> tilewise.warmup(128, heads=32, kv_heads=8, gpu="sm_90")  # doctest: +SKIP
    >>> # for a Hugging Face model
    >>> tilewise.warmup(config="config.json", gpu="sm_90")  # doctest: +SKIP

    `tilewise warm` is the same as a command.

    Args:
        head_dim: head dims of q and k, one or several. Not needed with config.
        value_dim: the head dim of v. Default: as q and k.
        heads: number of query heads. Default 8.
        kv_heads: number of KV heads. Default: heads. Only the ratio of both matters.
        dtype: dtype of q, k and v, one or several. Default: torch.bfloat16.
        packed: if True, for calls of `attention_varlen`; if False (default), of `attention`.
        backward: if True (default), the backward is compiled too.
        config: a transformers config, or a dict or the path of a JSON file with its entries. Its layers are added to
            those of head_dim.
        gpu: an architecture ("sm_90", "gfx942"). Default: this machine's GPU.
        workers: processes that compile at once. Default: as many as there are cores.
        progress: called with (done, total, name) after each kernel. Default: None.
        options: as in `attention`; for bias, sinks and alibi_slopes True stands for a tensor.

    Returns:
        The number of kernels, and how many of them were not in the cache.

    Raises:
        AttentionError: an option is wrong, Triton is missing, or there are no kernels for the GPU.
    """
    if not has_triton():
        raise AttentionError("warmup", "no Triton", "pip install triton")
    if settings.interprets():
        raise AttentionError("warmup", "TRITON_INTERPRET=1", "kernels that are compiled, not interpreted")
    chosen = _gpu(gpu)
    kinds = [
        Kind(d, value_dim or d, heads, kv_heads or heads, str(t).removeprefix("torch."), packed, backward, options)
        for d in _each(head_dim, int)
        for t in _each(dtype, torch.dtype)
    ]
    if config is not None:
        kinds += kinds_of(config, packed=packed, backward=backward, **options)
    if not kinds:
        raise AttentionError("warmup", "no head_dim and no config", "one of them")
    total = len(_launches(kinds, chosen))
    if not total:
        raise AttentionError(
            "warmup", f"no kernels for {gpu}", "a GPU and calls that they take: docs/compatibility.md has the table"
        )
    count = max(1, min(workers or os.cpu_count() or 1, total))
    lines: list[str] = []

    def follow(share: int) -> None:
        for line in _share(kinds, chosen, share, count):
            lines.append(line)
            if progress:
                progress(len(lines), total, line.partition(" ")[2])

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(follow, range(count)))
    return Warmed(total, sum(line.startswith("compiled") for line in lines))


def kinds_of(config: Any, packed: bool = False, backward: bool = True, **options: Any) -> list[Kind]:
    """The calls of a model with a transformers config: one for each window that its layers have.

    >>> [(kind.head_dim, kind.options) for kind in kinds_of({"hidden_size": 256, "num_attention_heads": 4})]
    [(64, {'causal': True})]
    """
    read = _reader(config)
    heads = read("num_attention_heads")
    if heads is None:
        raise AttentionError("config", "no num_attention_heads", "the config of a transformers model")
    d = read("head_dim") or read("hidden_size") // heads
    dtype = str(read("dtype") or read("torch_dtype") or "bfloat16").removeprefix("torch.")
    options = {"causal": True} | options
    if read("attn_logit_softcapping"):
        options["softcap"] = float(read("attn_logit_softcapping"))
    if read("model_type") == "gpt_oss":
        options["sinks"] = True
    layers, window = set(read("layer_types") or ()), read("sliding_window")
    windows = [None] if not window or layers == {"full_attention"} or read("use_sliding_window") is False else [window]
    if window and "full_attention" in layers and windows != [None]:
        windows = [None, window]
    return [
        Kind(
            d,
            read("v_head_dim") or d,
            heads,
            read("num_key_value_heads") or heads,
            dtype,
            packed,
            backward,
            options if w is None else options | {"window": [w - 1, 0]},
        )
        for w in windows
    ]


def _reader(config: Any) -> Callable[[str], Any]:
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise AttentionError("config", f"{config} ({error})", "the path of a JSON file that can be read") from None
    if isinstance(config, Mapping):
        inner: Any = config.get("text_config") or config
        return lambda name: inner.get(name)
    inner = getattr(config, "text_config", None) or config
    return lambda name: getattr(inner, name, None)


def _each(x: Any, one: type) -> Sequence[Any]:
    return (x,) if isinstance(x, one) else tuple(x)


def _gpu(name: str | None) -> Gpu:
    if name is not None:
        return gpu_named(name)
    found = gpu_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    if found is None:
        raise AttentionError("gpu", "none here", "the name of an architecture: gpu='sm_90'")
    return found


def requests(kind: Kind) -> Iterator[Request]:
    """Requests of meta tensors that need all kernels of this kind of call."""
    dtype = getattr(torch, kind.dtype)

    def some(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    for batch, n in SIZES:
        outer = (batch * n,) if kind.packed else (batch, n)
        heads, kv_heads = (kind.heads, kind.kv_heads) if batch > 1 else (kind.heads // kind.kv_heads, 1)
        q, k = some(*outer, heads, kind.head_dim), some(*outer, kv_heads, kind.head_dim)
        v = some(*outer, kv_heads, kind.value_dim)
        given = {name: x for name, x in kind.options.items() if name not in TENSORS or x not in (None, False)}
        shapes = {"bias": (1, heads, n, n), "sinks": (heads,), "alibi_slopes": (heads,)}
        given |= {name: some(*shapes[name]) for name in TENSORS if given.get(name) is True}
        if given.get("window") is not None:
            given["window"] = tuple(given["window"])
        if kind.packed:
            cu = some(batch + 1, of=torch.int32)
            yield checks.packed(q, k, v, cu, cu, (n, n), ATTENTION.completed(given))  # type: ignore[arg-type]
        else:
            yield checks.dense(q, k, v, ATTENTION.completed(given))  # type: ignore[arg-type]


def _launches(kinds: Sequence[Kind], gpu: Gpu) -> dict[str, Any]:
    """The launches of these calls by what they compile to, without duplicates."""
    from .backends.common.offline import specialised

    found: dict[str, Any] = {}
    for kind in kinds:
        for request in requests(kind):
            for made in registry.launches_of(request, gpu, kind.backward).values():
                found.setdefault(specialised(gpu.arch, made), made)
    return found


def _share(kinds: Sequence[Kind], gpu: Gpu, share: int, count: int) -> Iterator[str]:
    """Compiles every count-th kernel in another process; yields the line that it prints for each."""
    task = json.dumps({"kinds": kinds, "gpu": list(gpu), "share": share, "count": count})
    source = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, task],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=settings.of_child(source),
    ) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        for line in worker.stdout:
            yield line.strip()
        errors = worker.stderr.read()
    if worker.returncode:
        raise RuntimeError(f"compiling for {gpu} failed:\n{errors[-2000:]}")


def compile_share(task: str) -> None:
    """Compiles the kernels of a task of `_share`; prints "compiled NAME" or "cached NAME" for each."""
    import triton

    from .backends.common.offline import binary_for

    given = json.loads(task)
    kinds, gpu = [Kind(*kind) for kind in given["kinds"]], Gpu(*given["gpu"])
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    # every count-th: the first launches of each call, forwards and backwards, take longest
    for made in list(_launches(kinds, gpu).values())[given["share"] :: given["count"]]:
        hits.clear()
        binary_for(gpu.arch, made.kernel, made.args, made.options)
        print("cached" if all(hits) and hits else "compiled", made.kernel.fn.__name__, flush=True)
