"""Runs vLLM's engine with its own attention and with tilewise's, and compares tokens, speed and compilation.

    python bench/engines/vllm_engine.py --site SITE --cases llama,qwen3 --out results.json

SITE is a folder with vLLM 0.23 and the packages that it needs (not installed ones, which may be of other versions);
without --site the installed vLLM is used. Models are small and have dummy weights, so nothing is downloaded. Every case
is one process with its own engine. All engines start at the same time; then those of a group run in turns while all
others wait. Start times are those of engines that start together.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zlib
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
    "fp8": {"model": "qwen3", "work": ["small", "many"], "options": FEW | {"kv_cache_dtype": "fp8"}},
    "prefix": {"model": "llama", "work": ["shared"], "options": FEW | {"enable_prefix_caching": True}},
    "chunked": {"model": "llama", "work": ["many"], "options": FEW | {"max_num_batched_tokens": 512}},
    "ngram": {
        "model": "llama", "work": ["repeats"],
        "options": FEW | {"speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }},
    },
}  # fmt: skip
KV_BYTES = 3 << 30
FEW_TOKENS = range(3, 19)
ROUNDS = 3  # timed ones


def say(*words: Any) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, flush=True)


def workload(name: str) -> tuple[list[list[int]], int]:
    """(prompts, new tokens of each)"""
    draw = random.Random(name)

    def prompt(n: int) -> list[int]:
        return [draw.randint(3, 31999) for _ in range(n)]

    if name == "small":
        return [prompt(n) for n in [5, 900, *(draw.randint(5, 900) for _ in range(14))]], 64
    if name == "long":  # the bar of issue 31: 64 requests of 1k in and 256 out
        return [prompt(1024) for _ in range(64)], 256
    if name == "many":  # long and short prompts mixed
        return [prompt(draw.choice((5, 20, 100, 700, 2500))) for _ in range(128)], 48
    if name == "shared":  # a prefix of 1000 tokens, cached by the first run
        prefix = prompt(1000)
        return [prefix + prompt(draw.randint(1, 200)) for _ in range(64)], 48
    if name == "repeats":  # few different tokens, so n-grams recur
        return [[draw.choice(FEW_TOKENS) for _ in range(draw.randint(20, 300))] for _ in range(32)], 48
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


def set_weights(worker: Any, few_tokens: bool) -> None:
    """Random weights with which attention decides the tokens. (Those of load_format="dummy" are so small that the next
    token follows from the last one alone.) `few_tokens`: nearly all tokens are of FEW_TOKENS, so n-grams recur."""
    import torch

    for name, x in worker.get_model().named_parameters():
        draw = torch.Generator(x.device).manual_seed(zlib.crc32(name.encode()))
        if "norm" in name:
            x.data.fill_(2.0 if "q_norm" in name or "k_norm" in name else 1.0)
            continue
        gain = {"embed_tokens": 0.5, "lm_head": 3.0, "sinks": 1.0}.get(
            name.split(".")[-2 if "weight" in name else -1], 2.0
        )
        scale = 1.0 if "embed_tokens" in name or "sinks" in name else x.shape[-1] ** -0.5
        x.data.copy_(torch.randn(x.shape, generator=draw, device=x.device) * gain * scale)
        if few_tokens and "lm_head" in name:
            x.data[FEW_TOKENS.start : FEW_TOKENS.stop] *= 3


def implementations(worker: Any) -> list[str]:
    return sorted({type(m.impl).__name__ for m in worker.get_model().modules() if hasattr(m, "impl")})


class Engine:
    """An engine and what it has done."""

    def __init__(self, group: str, backend: str, folder: Path) -> None:
        import torch
        from vllm import LLM

        began = time.perf_counter()
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
        self.llm = LLM(model=str(folder / row["model"]), **(words | row["options"]))
        self.found: dict[str, Any] = {"engine_s": time.perf_counter() - began}
        self.call = self.llm.llm_engine.model_executor.collective_rpc
        self.call(set_weights, args=(group == "ngram",))
        self.found["attention"] = self.call(implementations)[0]
        self.synchronize = torch.cuda.synchronize

    def generate(self, prompts: list[list[int]], new: int, **words: Any) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False, **words)
        self.synchronize()
        began = time.perf_counter()
        got = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - began, [o.outputs[0] for o in got]

    def first(self, work: str, with_gaps: bool) -> None:
        """Tokens, and how far the best of each is before the second; how many requests change with a prompt's start."""
        prompts, new = workload(work)
        _, got = self.generate(prompts, new, **({"logprobs": 2} if with_gaps else {}))
        x = self.found[work] = {"tokens": [list(o.token_ids) for o in got], "seconds": [], "repeatable": True}
        if with_gaps:
            best = [[sorted((p.logprob for p in step.values()), reverse=True) for step in o.logprobs] for o in got]
            x["gaps"] = [[p[0] - p[1] for p in steps] for steps in best]
        other = [[*reversed(p[: len(p) // 2]), *p[len(p) // 2 :]] for p in prompts[:16]]
        _, got = self.generate(other, 4)
        x["changed"] = sum(list(o.token_ids) != t[:4] for o, t in zip(got, x["tokens"], strict=False))

    def timed(self, work: str) -> None:
        seconds, got = self.generate(*workload(work))
        x = self.found[work]
        x["seconds"].append(seconds)
        x["repeatable"] &= [list(o.token_ids) for o in got] == x["tokens"]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def worker(group: str, backend: str, folder: Path) -> None:
    import logging

    logging.basicConfig(level=logging.INFO)
    without_nvml()
    compilations = Compilations()
    name = f"{group}.{backend}"
    engine = Engine(group, backend, folder)
    engine.found["compiled_before"] = len(compilations.events)
    say(name, engine.found)
    (folder / f"{name}.ready").touch()
    served = time.perf_counter()
    for n in range(1 + ROUNDS):
        wait_for(folder / f"{name}.turn{n}")
        for work in GROUPS[group]["work"]:
            if n == 0:
                engine.first(work, with_gaps=group != "ngram")
            else:
                engine.timed(work)
        engine.found["compiled_after"] = compilations.since(served)
        (folder / f"{name}.json").write_text(json.dumps(engine.found))
        (folder / f"{name}.done{n}").touch()


def compare(base: dict[str, Any], x: dict[str, Any]) -> str:
    """How many requests have equal tokens, and where they differ first, how near the two best tokens were."""
    a, b = base["tokens"], x["tokens"]
    first = [next((i for i, (s, t) in enumerate(zip(*z, strict=True)) if s != t), None) for z in zip(a, b, strict=True)]
    differ = [(n, i) for n, i in enumerate(first) if i is not None]
    said = f"{len(a) - len(differ)} of {len(a)} requests equal"
    if differ and "gaps" in base:
        gaps = sorted(base["gaps"][n][i] for n, i in differ)
        every = sorted(g for row in base["gaps"] for g in row)
        said += f"; gaps where they differ first: median {gaps[len(gaps) // 2]:.3f}, largest {gaps[-1]:.3f}"
        said += f" (of all tokens: median {every[len(every) // 2]:.3f})"
    return said


def report(folder: Path, cases: list[tuple[str, str]]) -> None:
    found = {}
    for group, backend in cases:
        with contextlib.suppress(OSError):
            found[group, backend] = json.loads((folder / f"{group}.{backend}.json").read_text())
    for (group, backend), x in found.items():
        after = x.get("compiled_after", [])
        before = f"{x['compiled_before']} kernels before the start, {after} after"
        print(f"{group} {backend}: engine {x['engine_s']:.1f} s, {before}")
        base = found.get((group, "FA3"))
        for work in GROUPS[group]["work"]:
            row = x.get(work)
            if row is None or not row["seconds"]:
                continue
            tokens = sum(map(len, row["tokens"]))
            middle = statistics.median(row["seconds"])
            said = f"    {work}: {tokens / middle:.0f} tokens/s; {row['changed']} of 16 change with the prompt"
            said += "" if row["repeatable"] else "; runs differ"
            if base is not None and backend != "FA3" and work in base:
                said += f"; {statistics.median(base[work]['seconds']) / middle:.3f} of FA3; {compare(base[work], row)}"
            print(said)


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

    def is_waited_for(case: tuple[str, str], name: str) -> bool:
        return processes[case].poll() is None and not (folder / f"{case[0]}.{case[1]}.{name}").exists()

    while time.monotonic() < deadline and any(is_waited_for(case, "ready") for case in cases):
        time.sleep(0.2)
    for case in cases:
        if is_waited_for(case, "ready"):
            say(*case, "has not started in time")
            processes[case].kill()
            processes[case].wait()
    groups = list(dict.fromkeys(group for group, _ in cases))
    for group in groups:  # the engines of a group in turns
        for n in range(1 + ROUNDS):
            for case in cases:
                if case[0] == group:
                    (folder / f"{case[0]}.{case[1]}.turn{n}").touch()
                    while is_waited_for(case, f"done{n}"):
                        time.sleep(0.01)
        report(folder, [case for case in cases if case[0] == group])
        sys.stdout.flush()
    for case in cases:
        lines = (folder / f"{case[0]}.{case[1]}.log").read_text(errors="replace").splitlines()
        shown = [x for x in lines if x.startswith("[") or "tilewise:" in x or "JIT compilation during" in x]
        print("\n".join(x[:300] for x in (lines[-30:] if processes[case].wait() else shown)), flush=True)


if __name__ == "__main__":
    main()
