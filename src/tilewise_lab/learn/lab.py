"""What only a GPU can say: the course's measurements, made here if there is one, else as they were kept.

`measured("zeros")` returns a dict with what was found and "device", or None if it was not measured yet. Kept numbers
are in the course's folder `measured/`, one JSON per device: {"device", "when", "found": {name: dict}}.
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise_lab.cli import CALLED
from tilewise_lab.language import say
from tilewise_lab.learn.course import home

Found = dict[str, Any]
EXPERIMENTS: dict[str, Callable[[], Found]] = {}


def experiment(function: Callable[[], Found]) -> Callable[[], Found]:
    EXPERIMENTS[function.__name__] = function
    return function


@cache
def measured(name: str) -> Found | None:
    """One experiment, by name, and where it was made; a word about it on stdout."""
    assert name in EXPERIMENTS, f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}"
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
        print(say(f"(measuring on this {where})", f"（正在这块 {where} 上测量）"))
        return EXPERIMENTS[name]() | {"device": where}
    for path in sorted((home() / "measured").glob("*.json")):
        record = json.loads(path.read_text())
        if name in record["found"]:
            gpu, when = record["device"], record["when"]
            print(
                say(f"(no GPU here: numbers kept from an {gpu}, {when})", f"（这里没有 GPU：数据来自 {gpu}，{when}）")
            )
            return dict(record["found"][name]) | {"device": gpu}
    print(say("(no GPU here, and no numbers are kept: this part waits for one)", "（没有 GPU，也没有保存的数据）"))
    return None


def measure_all(path: Path, only: Sequence[str] = ()) -> int:
    """Every experiment; or some, in place of what the file has of them. One that fails does not stop the others."""
    if not torch.cuda.is_available():
        print(f"{CALLED} learn --measure needs a GPU, and none is here")
        return 2
    found: dict[str, Found] = json.loads(path.read_text())["found"] if only and path.exists() else {}
    record = {"device": torch.cuda.get_device_name(), "when": datetime.date.today().isoformat(), "found": found}
    failed = 0
    for name in only or EXPERIMENTS:
        began = time.monotonic()
        try:
            found[name] = rounded(EXPERIMENTS[name]())
            print(f"{name} ({time.monotonic() - began:.1f} s)", json.dumps(found[name]), flush=True)
        except Exception as error:
            failed += 1
            print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        torch.cuda.empty_cache()
    return 1 if failed else 0


def rounded(x: Any) -> Any:
    """
    >>> rounded({"a": 0.123456, "b": None, "c": {"d": 1234567.0}})
    {'a': 0.1235, 'b': None, 'c': {'d': 1235000.0}}
    """
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return float(f"{x:.4g}") if isinstance(x, float) else x


def seconds(work: Callable[[], object], budget: float = 0.03) -> float:
    """The median time of a call among rounds that together take about `budget`."""
    work()
    torch.cuda.synchronize()
    once = _clock(work)
    return statistics.median(_clock(work) for _ in range(max(3, min(300, int(budget / max(once, 1e-5))))))


def _clock(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _matmul_rate(a: Tensor, b: Tensor, budget: float = 0.03) -> float:
    """TFLOP/s"""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] / seconds(lambda: a @ b, budget) / 1e12


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


@experiment
def roofs() -> Found:
    """TFLOP/s of a large bf16 product, GB/s of a large copy (read and write counted)."""
    a, b = _normal(8192, 8192), _normal(8192, 8192)
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return {"tflops": _matmul_rate(a, b), "gbps": 2 * x.numel() / seconds(lambda: y.copy_(x)) / 1e9}


@experiment
def zeros() -> Found:
    """TFLOP/s of the same product on random data and on zeros: fewer bits flip, less power, a higher clock."""
    data = {"random": _normal(8192, 8192), "zeros": torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)}
    rounds = [{name: _matmul_rate(x, x, budget=0.3) for name, x in data.items()} for _ in range(3)]
    return {name: statistics.median(r[name] for r in rounds) for name in data}


@experiment
def precision() -> Found:
    """TFLOP/s of a 4096 product by dtype."""
    rates = {}
    before = torch.backends.cuda.matmul.fp32_precision
    for name, dtype, setting in (
        ("float32", torch.float32, "ieee"), ("tf32", torch.float32, "tf32"),
        ("bfloat16", torch.bfloat16, "ieee"), ("float16", torch.float16, "ieee"),
    ):  # fmt: skip
        torch.backends.cuda.matmul.fp32_precision = setting
        rates[name] = _matmul_rate(_normal(4096, 4096, dtype=dtype), _normal(4096, 4096, dtype=dtype))
    torch.backends.cuda.matmul.fp32_precision = before
    return rates


@experiment
def latency() -> Found:
    """Nanoseconds per dependent load, from buffers that fit in L1, in L2, and in neither."""
    from tilewise_lab.learn.kernels import chase

    found: Found = {}
    for name, size in (("L1", 16 << 10), ("L2", 8 << 20), ("HBM", 1 << 30)):
        n = size // 4
        stride = 8  # int32s: another sector every time
        order = torch.randperm(n // stride, device="cuda").to(torch.int32) * stride
        ring = torch.zeros(n, dtype=torch.int32, device="cuda")
        ring[order.long()] = order.roll(-1)
        place = torch.zeros(1, dtype=torch.int32, device="cuda")
        steps = 20_000
        found[name] = seconds(lambda: chase[(1,)](ring, place, steps, num_warps=1)) / steps * 1e9  # noqa: B023
    return found


@experiment
def coalescing() -> Found:
    """GB/s of useful bytes when neighbouring lanes read elements so many apart."""
    from tilewise_lab.learn.kernels import read_apart

    n = 1 << 28
    x = torch.randn(n, device="cuda")
    y = torch.empty(n // 1024, device="cuda")
    return {
        str(stride): 4 * n / seconds(lambda: read_apart[(n // 1024,)](x, y, stride, N=n, BLOCK=1024)) / 1e9  # noqa: B023
        for stride in (1, 2, 4, 8, 32, 4096)
    }


BRANCH = """
extern "C" __global__ void branch(const int* left, float* y, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = i;
    if (left[i])
        for (int n = 0; n < steps; ++n) v = fmaf(v, 1.0001f, 0.5f);
    else
        for (int n = 0; n < steps; ++n) v = fmaxf(v * 0.999f, 1.0f);
    y[i] = v;
}
"""


@experiment
def divergence() -> Found:
    """Milliseconds of the same work on both sides of an if, in CUDA: for warps whose lanes agree, and for lanes that
    differ."""
    n, steps = 1 << 22, 2000
    kernel = torch.cuda._compile_kernel(BRANCH, "branch")
    lane = torch.arange(n, device="cuda")
    sides = {"left": lane >= 0, "right": lane < 0, "by warp": lane // 32 % 2 == 0, "by lane": lane % 2 == 0}
    y = torch.empty(n, device="cuda")
    found = {}
    for name, side in sides.items():
        args = [side.int(), y, steps]
        found[name] = seconds(lambda: kernel((n // 256, 1, 1), (256, 1, 1), args)) * 1e3  # noqa: B023
    return found


@experiment
def tiling() -> Found:
    """Milliseconds of a 2048 product: one output per program, and one tile."""
    from tilewise_lab.learn.kernels import matmul_naive

    n = 2048
    a, b, c = (_normal(n, n) for _ in range(3))
    naive = seconds(lambda: matmul_naive[(n, n)](a, b, c, n, n, n, BLOCK_K=256, num_warps=4))
    tiled = seconds(_tiled(a, b, c, 128, 128))
    return {
        "naive_ms": naive * 1e3,
        "tiled_ms": tiled * 1e3,
        "torch_ms": seconds(lambda: torch.matmul(a, b, out=c)) * 1e3,
    }


def _tiled(
    a: Tensor, b: Tensor, c: Tensor, block_m: int, block_n: int, side: int | None = None
) -> Callable[[], object]:
    """c = a b in tiles; with `side` only those that cover its first `side` rows and columns, each of them whole."""
    from tilewise_lab.learn.kernels import matmul_tiled

    (m, k), n = a.shape, b.shape[1]
    grid = -(-(side or m) // block_m), -(-(side or n) // block_n)
    return lambda: matmul_tiled[grid](
        a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64, num_warps=8, num_stages=3,
    )  # fmt: skip


@experiment
def waves() -> Found:
    """TFLOP/s of n × n × 4096 products in 256 × 128 tiles; all of them whole, so that only their number changes."""
    found = {}
    k, width = 4096, 3072
    a, b, c = _normal(width, k), _normal(k, width), _normal(width, width)
    for n in (1536, 1792, 1793, 1920, 2048, 2049, 2304, 2560, 2816, 2817, 3072):
        run = _tiled(a, b, c, 256, 128, side=n)
        found[str(n)] = 2 * n * n * k / seconds(run) / 1e12
    return found


@experiment
def alignment() -> Found:
    """TFLOP/s of torch's n × n × n product for lengths of every alignment."""
    sizes = sorted({*range(2048, 2305, 16), *range(2050, 2300, 25), *range(2056, 2300, 40), 2304})
    return {str(n): _matmul_rate(_normal(n, n), _normal(n, n)) for n in sizes}


@experiment
def vocabulary() -> Found:
    """Milliseconds of the last layer of GPT-2 on 8192 tokens, with 50257 words and with 50304."""
    x = _normal(8192, 768)
    return {str(n): seconds(partial(torch.matmul, x, _normal(768, n))) * 1e3 for n in (50257, 50304)}


@experiment
def fusion() -> Found:
    """Milliseconds of four elementwise operations on 2²⁸ floats: one kernel each, torch.compile, one Triton kernel."""
    from tilewise_lab.learn.kernels import chain

    n = 1 << 28
    x = torch.randn(n, device="cuda")
    y = torch.empty_like(x)

    def eager() -> Tensor:
        return (2 * x + 1).relu().square() - 3

    found = {
        "eager_ms": seconds(eager) * 1e3,
        "triton_ms": seconds(lambda: chain[(n // 1024,)](x, y, n, BLOCK=1024)) * 1e3,
        "copy_ms": seconds(lambda: y.copy_(x)) * 1e3,
    }
    try:
        compiled = torch.compile(lambda t: (2 * t + 1).relu().square() - 3)
        return found | {"compiled_ms": seconds(lambda: compiled(x)) * 1e3}
    except Exception as error:
        return found | {"compiled_ms": None, "why": f"{type(error).__name__}"}


@experiment
def stages() -> Found:
    """Milliseconds of tilewise's portable forward (S 4096, D 128) by num_stages; None: does not fit."""
    from tilewise.backends.common.launch import target_of
    from tilewise.backends.triton import launches as launch
    from tilewise.request import Request, Spec

    q, k, v = (_normal(4, 4096, 16, 128) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(4, 16, 4096, device="cuda")
    one = launch.forward_launch(Request(q, k, v, Spec(128**-0.5)), out, lse, target_of(q.device).gpu)
    found: Found = {}
    for n in (1, 2, 3, 4, 8):
        try:
            changed = one._replace(options=one.options | {"num_stages": n})
            found[str(n)] = seconds(lambda: changed()) * 1e3  # noqa: B023
        except Exception:
            found[str(n)] = None
    return found


def _attention(name: str, causal: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    import tilewise

    def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v).transpose(1, 2)

    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, causal=causal)

    return naive if name == "naive" else tiled


@experiment
def causal() -> Found:
    """Milliseconds of the forward at 8192 tokens, 16 heads of 128: full and causal."""
    q, k, v = (_normal(1, 8192, 16, 128) for _ in range(3))
    return {
        name: seconds(partial(_attention("tilewise", name == "causal_ms"), q, k, v)) * 1e3
        for name in ("full_ms", "causal_ms")
    }


@experiment
def sums() -> Found:
    """Milliseconds of the backward (4 × 4096 tokens, 16 heads of 128), by how dQ is summed over the blocks of keys."""
    import tilewise

    inputs = [_normal(4, 4096, 16, 128).requires_grad_() for _ in range(3)]
    dout = _normal(4, 4096, 16, 128)
    ways: dict[str, dict[str, Any]] = {
        "two kernels": {"backend": "triton"},
        "atomic": {"deterministic": False},
        "in order": {"deterministic": True},
    }
    found = {}
    for name, options in ways.items():
        out = tilewise.attention(*inputs, **options)
        found[name] = seconds(partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)) * 1e3
    return found


@experiment
def gpt2() -> Found:
    """The notes' table on this device: GPT-2 medium, 64 sequences of 1024, forward + backward."""
    inputs = [_normal(64, 1024, 16, 64, dtype=torch.float16).requires_grad_() for _ in range(3)]
    dout = _normal(64, 1024, 16, 64, dtype=torch.float16)

    def step(attention: Any) -> None:
        torch.autograd.grad(attention(*inputs), inputs, dout)

    return {f"{name}_ms": seconds(partial(step, _attention(name))) * 1e3 for name in ("naive", "tilewise")}


@experiment
def memory() -> Found:
    """MiB beyond the inputs at the peak of forward + backward, 16 heads of 64, by length."""
    found: Found = {"naive": {}, "tilewise": {}}
    for n in (1024, 2048, 4096, 8192, 16384):
        inputs = [_normal(1, n, 16, 64).requires_grad_() for _ in range(3)]
        dout = _normal(1, n, 16, 64)
        for name in found:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(_attention(name)(*inputs), inputs, dout)
            found[name][str(n)] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


@experiment
def layer() -> Found:
    """Milliseconds of one attention layer (batch 4, width 2048, 16 heads) by length: projections, and attention."""
    found: Found = {}
    weight = _normal(2048, 4 * 2048)
    for n in (512, 2048, 8192):
        x = _normal(4 * n, 2048)
        q, k, v = (_normal(4, n, 16, 128) for _ in range(3))
        found[str(n)] = {
            "projections_ms": seconds(lambda: x @ weight) * 1e3,  # noqa: B023
            "attention_ms": seconds(partial(_attention("tilewise"), q, k, v)) * 1e3,
        }
    return found
