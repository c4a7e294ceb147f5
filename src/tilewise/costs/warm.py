"""Compile ahead: the kernels that a model will ask for, into the cache where it will look for them.

A process of its own compiles each share of them: `python -m tilewise.costs.warm SHARE`, SHARE being JSON, says a line
for every kernel. Tensors are meta, so nothing needs a GPU but the name of one.
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

from tilewise.backends import registry as dispatch
from tilewise.backends.common.gpu import Gpu, gpu_of, has_triton
from tilewise.backends.common.offline import gpu_named
from tilewise.errors import AttentionError
from tilewise.request import Request
from tilewise.validation import dense as checks

LENGTHS = (4096, 1024, 1000)  # long; short; one that no tile divides: kernels know no more of them
TENSORS = ("bias", "sinks", "alibi_slopes")
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
    kernels: int
    compiled: int  # the others were there


def warmup(
    head_dim: int | Sequence[int] = (), *, value_dim: int | None = None, heads: int = 8, kv_heads: int | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16, packed: bool = False, backward: bool = True,
    config: Any = None, gpu: str | None = None, workers: int | None = None, progress: Progress | None = None,
    **options: Any,
) -> Warmed:  # fmt: skip
    """Compile the kernels of calls like these, of every length and batch, into the cache that they will use.

        tilewise.warmup(128, heads=32, kv_heads=8, causal=True)              for the GPU that is here
        tilewise.warmup(128, heads=32, kv_heads=8, causal=True, gpu="sm_90")   without one, in a Dockerfile
        tilewise.warmup(config=AutoConfig.from_pretrained(...), gpu="sm_90")   what a Hugging Face model needs

    options: those of `attention`; for bias, sinks and alibi_slopes True stands for a tensor. Of the heads, only how
        many query heads share one of k and v matters.
    config: a transformers config, or a dict or the path of a JSON file with its entries.
    workers: processes that compile at once; as many as there are cores, if None.
    progress: called with (done, all, name) after each kernel.
    """
    if not has_triton():
        raise AttentionError("warmup", "no Triton", "pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise AttentionError("warmup", "TRITON_INTERPRET=1", "kernels that are compiled, not interpreted")
    chosen = _gpu(gpu)
    kinds = [
        Kind(d, value_dim or d, heads, kv_heads or heads, str(t).removeprefix("torch."), packed, backward, options)
        for d in _each(head_dim, int) for t in _each(dtype, torch.dtype)
    ]  # fmt: skip
    if config is not None:
        kinds += kinds_of(config, packed=packed, backward=backward, **options)
    if not kinds:
        raise AttentionError("warmup", "no head_dim and no config", "one of them")
    total = len(_launches(kinds, chosen))
    if not total:
        raise AttentionError(
            "warmup", f"no kernels for {gpu}", "a GPU and calls that they take: README.md has the table"
        )
    count = max(1, min(workers or os.cpu_count() or 1, total))
    told: list[str] = []

    def follow(share: int) -> None:
        for line in _share(kinds, chosen, share, count):
            told.append(line)
            if progress:
                progress(len(told), total, line.partition(" ")[2])

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(follow, range(count)))
    return Warmed(total, sum(line.startswith("made") for line in told))


def kinds_of(config: Any, **words: Any) -> list[Kind]:
    """The calls of a model that transformers describes: its layers may differ in their window.

    >>> [(kind.head_dim, kind.options) for kind in kinds_of({"hidden_size": 256, "num_attention_heads": 4})]
    [(64, {'causal': True})]
    """
    read = _reader(config)
    heads = read("num_attention_heads")
    if heads is None:
        raise AttentionError("config", "no num_attention_heads", "the config of a transformers model")
    d = read("head_dim") or read("hidden_size") // heads
    dtype = str(read("dtype") or read("torch_dtype") or "bfloat16").removeprefix("torch.")
    packed, backward = words.pop("packed", False), words.pop("backward", True)
    options = {"causal": True} | words
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
            d, read("v_head_dim") or d, heads, read("num_key_value_heads") or heads, dtype, packed, backward,
            options if w is None else options | {"window": [w - 1, 0]},
        )
        for w in windows
    ]  # fmt: skip


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
    """One call for each kernel of this kind, of tensors without memory."""
    dtype = getattr(torch, kind.dtype)

    def some(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    for n in LENGTHS:
        outer = (n,) if kind.packed else (2, n)
        q, k = some(*outer, kind.heads, kind.head_dim), some(*outer, kind.kv_heads, kind.head_dim)
        v = some(*outer, kind.kv_heads, kind.value_dim)
        given = {name: x for name, x in kind.options.items() if name not in TENSORS or x not in (None, False)}
        shapes = {"bias": (1, kind.heads, n, n), "sinks": (kind.heads,), "alibi_slopes": (kind.heads,)}
        given |= {name: some(*shapes[name]) for name in TENSORS if given.get(name) is True}
        if given.get("window") is not None:
            given["window"] = tuple(given["window"])
        if kind.packed:
            cu = some(3, of=torch.int32)
            yield checks.packed(q, k, v, cu, cu, (n, n), checks.options_of(given))  # type: ignore[arg-type]
        else:
            yield checks.dense(q, k, v, checks.options_of(given))  # type: ignore[arg-type]


def _launches(kinds: Sequence[Kind], gpu: Gpu) -> dict[str, Any]:
    """The launches of these calls, those that compile to the same once."""
    from tilewise.backends.common.offline import specialised

    found: dict[str, Any] = {}
    for kind in kinds:
        for request in requests(kind):
            for made in dispatch.launches_of(request, gpu, kind.backward).values():
                found.setdefault(specialised(gpu.arch, made), made)
    return found


def _share(kinds: Sequence[Kind], gpu: Gpu, share: int, count: int) -> Iterator[str]:
    """Every count-th kernel, compiled by another process; what it says of each."""
    task = json.dumps({"kinds": kinds, "gpu": list(gpu), "share": share, "count": count})
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        [sys.executable, "-m", "tilewise.costs.warm", task], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert worker.stderr is not None
        for line in worker.stdout:
            yield line.strip()
        words = worker.stderr.read()
    if worker.returncode:
        raise RuntimeError(f"compiling for {gpu} failed:\n{words[-2000:]}")


def _work(task: str) -> None:
    import triton

    from tilewise.backends.common.offline import binary_for

    given = json.loads(task)
    kinds, gpu = [Kind(*kind) for kind in given["kinds"]], Gpu(*given["gpu"])
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    # the first ones, forwards and backwards, take longest: they are dealt out, not given to one
    for made in list(_launches(kinds, gpu).values())[given["share"] :: given["count"]]:
        hits.clear()
        binary_for(gpu.arch, made.kernel, made.args, made.options)
        print("kept" if all(hits) and hits else "made", made.kernel.fn.__name__, flush=True)


if __name__ == "__main__":
    _work(sys.argv[1])
