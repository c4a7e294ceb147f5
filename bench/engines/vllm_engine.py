"""Runs vLLM's engine with its own attention and with tilewise's, and compares tokens, speed and compilation.

    python bench/engines/vllm_engine.py --site SITE --cases llama,qwen3 --out results.json

SITE is a folder with vLLM 0.23 and the packages that it needs (not installed ones, which may be of other versions);
without --site the installed vLLM is used. Models are small and have dummy weights, so nothing is downloaded. Every case
is one process with its own engine. All engines start at the same time; then one after another runs the workloads while
the others wait, so that timings do not disturb each other. Start times are those of engines that start together.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

BACKENDS = {"FA3": "FLASH_ATTN", "Triton": "TRITON_ATTN", "tilewise": "CUSTOM"}
LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 64,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 8192, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "model_type": "llama",
    "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "mha": LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3": LLAMA | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "sinks": LLAMA | {
        "architectures": ["SinkLlamaForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 2,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]  # of the CUDA graphs, where starting is not what is measured
FEW = {"compilation_config": {"cudagraph_capture_sizes": SIZES}}
GROUPS: dict[str, dict[str, Any]] = {  # name: model, workloads, options of LLM
    "llama-eager": {"model": "llama", "work": ["small"], "options": {"enforce_eager": True}},
    "llama": {"model": "llama", "work": ["small", "long"], "options": {}},
    "mha": {"model": "mha", "work": ["small", "many"], "options": FEW},
    "qwen3": {"model": "qwen3", "work": ["small", "many"], "options": FEW},
    "sinks": {"model": "sinks", "work": ["small", "many"], "options": FEW},
    "prefix": {"model": "llama", "work": ["shared"], "options": FEW | {"enable_prefix_caching": True}},
    "chunked": {"model": "llama", "work": ["many"], "options": FEW | {"max_num_batched_tokens": 512}},
    "ngram": {
        "model": "llama", "work": ["repeats"],
        "options": FEW | {"speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }},
    },
}  # fmt: skip
KV_BYTES = 6 << 30


def say(*words: Any) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, flush=True)


def workload(name: str) -> tuple[list[list[int]], int, int]:
    """(prompts, new tokens of each, how often it runs)"""
    draw = random.Random(name)

    def prompt(n: int) -> list[int]:
        return [draw.randint(3, 31999) for _ in range(n)]

    if name == "small":
        return [prompt(n) for n in [5, 900, *(draw.randint(5, 900) for _ in range(14))]], 64, 3
    if name == "long":  # the bar of issue 31: 64 requests of 1k in and 256 out
        return [prompt(1024) for _ in range(64)], 256, 2
    if name == "many":  # long and short prompts mixed
        return [prompt(draw.choice((5, 20, 100, 700, 2500))) for _ in range(128)], 48, 2
    if name == "shared":  # a prefix of 1000 tokens, cached by the first run
        prefix = prompt(1000)
        return [prefix + prompt(draw.randint(1, 200)) for _ in range(64)], 48, 3
    if name == "repeats":  # prompts whose n-grams recur
        return [prompt(12) * draw.randint(2, 20) for _ in range(64)], 96, 2
    raise ValueError(name)


def register_sink_model() -> None:
    """Llama whose attention has sinks, as gpt-oss's: without mixtures of experts, for which kernels may be missing."""
    import torch
    from vllm import ModelRegistry
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import llama

    class SinkAttention(llama.LlamaAttention):
        def __init__(self, *given: Any, cache_config: Any = None, prefix: str = "", **words: Any) -> None:
            super().__init__(*given, cache_config=cache_config, prefix=prefix, **words)
            window = self.attn.sliding_window
            del get_current_vllm_config().compilation_config.static_forward_context[f"{prefix}.attn"]
            self.sinks = torch.nn.Parameter(torch.empty(self.num_heads, dtype=torch.bfloat16), requires_grad=False)
            self.attn = Attention(
                self.num_heads, self.head_dim, self.scaling, num_kv_heads=self.num_kv_heads, cache_config=cache_config,
                per_layer_sliding_window=window, prefix=f"{prefix}.attn", sinks=self.sinks,
            )  # fmt: skip

    class SinkLayer(llama.LlamaDecoderLayer):
        def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
            super().__init__(vllm_config, prefix, config, attn_layer_type=SinkAttention)

    class SinkLlamaForCausalLM(llama.LlamaForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SinkLayer)

    ModelRegistry.register_model("SinkLlamaForCausalLM", SinkLlamaForCausalLM)


def without_nvml() -> None:
    """vLLM looks for GPUs with NVML. Where that library is missing but CUDA works, CUDA is named here."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        import vllm.platforms as platforms

        platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"


class Compilations:
    """What Triton compiles, or loads from its cache, and when."""

    def __init__(self) -> None:
        import triton

        self.events: list[tuple[float, str]] = []
        triton.knobs.runtime.jit_post_compile_hook = self.add

    def add(self, **event: Any) -> None:
        self.events.append((time.perf_counter(), str(getattr(event.get("fn"), "name", event.get("fn")))))

    def since(self, when: float) -> list[str]:
        return [name for at, name in self.events if at >= when]


def worker(group: str, backend: str, folder: Path) -> None:
    began = time.perf_counter()
    name = f"{group}.{backend}"
    import logging

    import torch

    logging.basicConfig(level=logging.INFO)
    without_nvml()
    compilations = Compilations()
    from vllm import LLM, SamplingParams

    if backend == "tilewise":
        from tilewise.integrations.vllm import register

        register()
    row = GROUPS[group]
    if row["model"] == "sinks":
        register_sink_model()
    words = {
        "load_format": "dummy", "seed": 0, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": KV_BYTES,
        "max_model_len": 4096, "max_num_seqs": 256, "dtype": "bfloat16", "skip_tokenizer_init": True,
        "disable_log_stats": True, "enable_prefix_caching": False, "attention_backend": BACKENDS[backend],
    }  # fmt: skip
    imported = time.perf_counter()
    llm = LLM(model=str(folder / row["model"]), **(words | row["options"]))
    ready = time.perf_counter()
    found = {"import_s": imported - began, "engine_s": ready - imported, "compiled_at_start": len(compilations.events)}
    say(name, found)
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.turn").exists():
        time.sleep(0.05)
    params = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    served = time.perf_counter()
    for work in row["work"]:
        prompts, new, runs = workload(work)
        seconds, tokens = [], []
        for _ in range(runs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            got = llm.generate(
                [{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=new, **params), use_tqdm=False
            )
            seconds.append(time.perf_counter() - start)
            tokens.append([list(o.outputs[0].token_ids) for o in got])
        found[work] = {"seconds": seconds, "tokens": tokens[-1], "repeatable": all(t == tokens[0] for t in tokens)}
        say(name, work, [round(s, 3) for s in seconds], f"{sum(map(len, tokens[-1])) / min(seconds):.0f} tokens/s")
    found["compiled_after"] = compilations.since(served)

    def implementations(w: Any) -> list[str]:
        return sorted({type(m.impl).__name__ for m in w.get_model().modules() if hasattr(m, "impl")})

    with contextlib.suppress(Exception):
        found["attention"] = llm.llm_engine.model_executor.collective_rpc(implementations)[0]
    say(name, "compiled after the start:", found["compiled_after"], found.get("attention"))
    (folder / f"{name}.json").write_text(json.dumps(found))


def compare(a: list[list[int]], b: list[list[int]]) -> str:
    """How many tokens are equal up to the first difference of every request. One near tie changes all after it."""
    first = [
        next((i for i, (x, y) in enumerate(zip(s, t, strict=True)) if x != y), len(s))
        for s, t in zip(a, b, strict=True)
    ]
    same = sum(n == len(s) for n, s in zip(first, a, strict=True))
    return f"{same} of {len(a)} requests equal ({sum(first)} of {sum(map(len, a))} tokens before a difference)"


def report(folder: Path, cases: list[tuple[str, str]]) -> None:
    found = {}
    for group, backend in cases:
        with contextlib.suppress(OSError):
            found[group, backend] = json.loads((folder / f"{group}.{backend}.json").read_text())
    for (group, backend), x in found.items():
        work = [w for w in GROUPS[group]["work"] if w in x]
        speeds = {w: round(sum(map(len, x[w]["tokens"])) / min(x[w]["seconds"])) for w in work}
        print(
            f"{group:12s} {backend:9s} engine {x['engine_s']:5.1f} s, {x['compiled_at_start']:3d} kernels before, "
            f"{len(x['compiled_after'])} after the start; tokens/s {speeds}; repeatable "
            f"{[x[w]['repeatable'] for w in work]}"
        )
        base = found.get((group, "FA3"))
        if base is not None and backend != "FA3":
            for w in work:
                if w in base:
                    print(
                        f"{'':12s} {w}: {compare(base[w]['tokens'], x[w]['tokens'])}, "
                        f"{min(base[w]['seconds']) / min(x[w]['seconds']):.3f} of FA3's speed"
                    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site")
    parser.add_argument(
        "--cases", default="llama-eager,llama", help="groups, each with FA3 and tilewise; or group:backend"
    )
    parser.add_argument("--folder", default="vllm_results")
    parser.add_argument("--start", type=float, default=75, help="seconds in which the engines have to start")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = Path(given.folder).absolute()
    if given.case:
        try:
            worker(*given.case.split(":"), folder)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        os._exit(0)  # what the engine leaves behind is not waited for
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.*"):
        old.unlink()
    for name, config in MODELS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    cases = [
        (group, backend)
        for case in given.cases.split(",")
        for group, _, backends in [case.partition(":")]
        for backend in (backends or "FA3+tilewise").split("+")
    ]
    source = str(Path(__file__).resolve().parents[2] / "src")
    paths = [p for p in (given.site, source, os.environ.get("PYTHONPATH")) if p]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_PLUGINS": "",
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    atexit.register(lambda: [p.kill() for p in processes.values()])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for n, (group, backend) in enumerate(cases):
        own = env | {"VLLM_CACHE_ROOT": str(folder / f"cache{n}"), "MASTER_PORT": str(29500 + n)}
        command = [sys.executable, __file__, "--folder", str(folder), "--case", f"{group}:{backend}"]
        with open(folder / f"{group}.{backend}.log", "w") as log:
            processes[group, backend] = subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + given.start

    def is_waited_for(case: tuple[str, str]) -> bool:
        return processes[case].poll() is None and not (folder / f"{case[0]}.{case[1]}.ready").exists()

    while time.monotonic() < deadline and any(map(is_waited_for, cases)):
        time.sleep(0.2)
    for case in cases:
        if is_waited_for(case):
            say(*case, "has not started in time")
            processes[case].kill()
    for group, backend in cases:
        (folder / f"{group}.{backend}.turn").touch()
        processes[group, backend].wait()
        lines = (folder / f"{group}.{backend}.log").read_text(errors="replace").splitlines()
        if processes[group, backend].returncode:
            print("\n".join(x[:300] for x in lines[-30:]), flush=True)
        else:
            shown = [x for x in lines if x.startswith("[") or "tilewise:" in x or "JIT compilation during" in x]
            print("\n".join(x[:300] for x in shown), flush=True)
    report(folder, cases)


if __name__ == "__main__":
    main()
