"""Runs SGLang's engine with its own attention and with tilewise's, and compares tokens and speed.

    python bench/engines/prepare_sglang.py FOLDER                        where there is a network
    python bench/engines/sglang_engine.py --pack FOLDER --cases eager,graphs

Without --pack (or --site, a folder that was unpacked before) the installed SGLang is used. The model is a small Llama;
its random weights are those of `vllm_engine.py`, with which attention decides the tokens. Every engine has processes of
its own. All engines start at the same time and run once, which compiles; then those of a case are timed in turns while
all others wait. Results are written and printed after each case. With `--device cpu` a tiny model runs on the CPU, with
torch_native instead of triton and Triton's interpreter for other kernels: that tests the scheduling and the backend's
calls. The interpreter of Triton 3.6 needs numpy 2.4 or older.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turns import Engines, Worker, finish, spawn, tail
from vllm_engine import LLAMA, compare, say, set_weights, workload

HERE = Path(__file__).resolve().parent
TINY = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
GRAPHS = {"cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 64}
RADIX = {"disable_radix_cache": False}  # prefix caching, on unless said otherwise
CASES: dict[str, dict[str, Any]] = {  # name: workloads, options of Engine
    "eager": {"work": ["small"], "options": {"disable_cuda_graph": True}},
    "graphs": {"work": ["small", "long"], "options": GRAPHS},
    "pages": {"work": ["small", "many", "shared"], "options": GRAPHS | RADIX | {"page_size": 16}},
    "prefix": {"work": ["small", "many", "shared"], "options": GRAPHS | RADIX},
    "chunked": {"work": ["many"], "options": GRAPHS | {"chunked_prefill_size": 512}},
    "default": {"work": ["small", "long", "shared"], "options": RADIX},  # also CUDA graphs of the parts of prefill
}
PARTS = {  # of SGLang's kernels for a layer of Llama: compiled ones, and those that it compiles with nvcc
    "kernels": ["kernels"],
    "jit": ["activation", "rope", "kvcache", "norm"],
}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """config.json and model.safetensors, with the weights of `set_weights`."""
    import torch
    from safetensors.torch import save_file

    d, f, heads, kv, dim = (
        config[n]
        for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for n in range(config["num_hidden_layers"]):
        own = {"q_proj": (heads * dim, d), "k_proj": (kv * dim, d), "v_proj": (kv * dim, d), "o_proj": (d, heads * dim)}
        mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        at = f"model.layers.{n}."
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in own.items()}
        shapes |= {f"{at}mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{at}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
    weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    model = SimpleNamespace(named_parameters=weights.items)
    set_weights(SimpleNamespace(get_model=lambda: model), few_tokens=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    say("wrote", folder, sum(x.numel() for x in weights.values()), "parameters")


def check(name: str) -> None:
    """Runs one kernel that SGLang needs on the GPU and compares it with torch. Compiles it, where SGLang does."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(7, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, device="cuda", dtype=torch.bfloat16)

    def norm(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(y.float(), (1024,), w.float(), 1e-5)

    if name == "kernels":
        from sgl_kernel import rmsnorm

        got, want = rmsnorm(x, w, 1e-5), norm(x)
    elif name == "activation":
        from sglang.kernels.ops.activation.activation import silu_and_mul

        a, b = x.float().chunk(2, -1)
        got, want = silu_and_mul(x), torch.nn.functional.silu(a) * b
    elif name == "norm":
        from sglang.kernels.ops.layernorm.norm import fused_add_rmsnorm

        want = norm(2 * x)
        got = x.clone()
        fused_add_rmsnorm(got, x.clone(), w, 1e-5)
    elif name == "rope":
        from sglang.kernels.ops.attention.rope import apply_rope_inplace

        q, k = x.view(7, 16, 64).clone(), x.view(7, 16, 64)[:, :4].clone()
        angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(32) / 32)).cuda()
        at = torch.tensor([3, 1, 4, 1, 5, 9, 49], device="cuda")
        cos, sin = angles[at].cos()[:, None], angles[at].sin()[:, None]
        a, b = x.view(7, 16, 64).float().chunk(2, -1)
        want = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        apply_rope_inplace(q, k, torch.cat((angles.cos(), angles.sin()), -1), at, is_neox=True)
        assert torch.equal(k, q[:, :4])
        got = q
    else:
        from sglang.kernels.ops.kvcache.kvcache import store_cache

        caches = torch.zeros(2, 9, 256, device="cuda", dtype=torch.bfloat16)
        store_cache(x[:, :256].contiguous(), x[:, 256:512].contiguous(), *caches, torch.arange(1, 8, device="cuda"))
        got, want = caches[:, 1:8], torch.stack((x[:, :256], x[:, 256:512])).float()
    error = (got.float() - want).abs().max().item()
    say(f"check {name}: error {error:.4f}")
    assert error < 0.1, error


class Engine:
    """An engine and what it has done."""

    def __init__(self, case: str, backend: str, folder: Path, device: str) -> None:
        import sglang

        began = time.perf_counter()
        options = {
            "model_path": str(folder / "model"), "skip_tokenizer_init": True, "random_seed": 0, "dtype": "bfloat16",
            "attention_backend": backend, "sampling_backend": "pytorch", "grammar_backend": "none", "device": device,
            "disable_radix_cache": True, "max_total_tokens": 262144, "max_running_requests": 256,
            "context_length": 4096, "mem_fraction_static": 0.4, "log_level": "info",
        } | CASES[case]["options"]  # fmt: skip
        if device == "cpu":
            options |= {"max_total_tokens": 16384, "mem_fraction_static": 0.05, "disable_cuda_graph": True}
        self.engine, self.is_tiny = sglang.Engine(**options), device == "cpu"
        self.keeps_prefixes = not options["disable_radix_cache"]
        self.found: dict[str, Any] = {"engine_s": time.perf_counter() - began}
        self.found["attention"] = self.engine.server_args.get_attention_backends()

    def workload(self, work: str) -> tuple[list[list[int]], int]:
        prompts, new = workload(work)
        return ([p[:60] for p in prompts[:6]], 8) if self.is_tiny else (prompts, new)

    def generate(self, prompts: list[list[int]], new: int, **words: Any) -> tuple[float, list[Any]]:
        params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        began = time.perf_counter()
        got = self.engine.generate(input_ids=prompts, sampling_params=params, **words)
        return time.perf_counter() - began, got

    def first(self, work: str) -> None:
        """Tokens, and how far the best of each is before the second; how many requests change with a prompt's start."""
        prompts, new = self.workload(work)
        seconds, got = self.generate(prompts, new, return_logprob=True, top_logprobs_num=2)
        x = self.found[work] = {"tokens": [o["output_ids"] for o in got], "seconds": [], "repeatable": True}
        best = [[[p[0] for p in step] for step in o["meta_info"]["output_top_logprobs"]] for o in got]
        x["gaps"] = [[p[0] - p[1] for p in steps] for steps in best]
        x["first_s"] = seconds
        other = [[*reversed(p[: len(p) // 2]), *p[len(p) // 2 :]] for p in prompts[:16]]
        _, got = self.generate(other, 4)
        x["changed"] = sum(o["output_ids"] != t[:4] for o, t in zip(got, x["tokens"], strict=False))

    def timed(self, work: str) -> None:
        if self.keeps_prefixes and work != "shared":  # otherwise the prompts of the run before are found in the cache
            self.engine.flush_cache()
        seconds, got = self.generate(*self.workload(work))
        x = self.found[work]
        x["seconds"].append(seconds)
        x["repeatable"] &= [o["output_ids"] for o in got] == x["tokens"]


def run_engine(case: str, backend: str, folder: Path, device: str, rounds: int) -> None:
    """Generates once, then is timed `rounds` times, and once more with `sglang_timing` if that was loaded."""
    name = f"{case}.{backend}"
    flag = folder / f"{name}.recording"
    os.environ["SGLANG_TIMING"] = str(flag)
    engine = Engine(case, backend, folder, device)
    turns = Worker(folder, name)
    say(name, engine.found)
    turns.ready()
    for n in range(1 + rounds):
        turns.wait_for_turn(n)
        for work in CASES[case]["work"]:
            if n == 0:
                engine.first(work)
            else:
                engine.timed(work)
            say(name, n, work, engine.found[work]["seconds"])
            (folder / f"{name}.json").write_text(json.dumps(engine.found))
        turns.done(n)
    turns.wait_for_turn(1 + rounds)
    for work in CASES[case]["work"]:
        flag.touch()
        engine.timed(work)
        flag.unlink()
        engine.generate([[1, 2, 3]], 2)
        if (found := Path(f"{flag}.found")).exists():
            found.rename(folder / f"{name}.{work}.steps")
    turns.done(1 + rounds)


def report(folder: Path, case: str, base: str, backend: str) -> None:
    found = {}
    for name in {base, backend}:
        with contextlib.suppress(OSError):
            found[name] = json.loads((folder / f"{case}.{name}.json").read_text())
    if backend not in found:
        print(f"{case} {backend}: no result", flush=True)
        return
    x, first = found[backend], found.get(base)
    print(f"{case} {backend}: engine {x['engine_s']:.1f} s, attention {x['attention']}")
    for work in CASES[case]["work"]:
        row = x.get(work)
        if row is None or not row["seconds"]:
            continue
        middle = statistics.median(row["seconds"])
        said = f"    {work}: {sum(map(len, row['tokens'])) / middle:.0f} tokens/s (first run {row['first_s']:.2f} s); "
        said += f"{row['changed']} of {min(16, len(row['tokens']))} change with the prompt"
        said += "" if row["repeatable"] else "; runs differ"
        if first is not None and backend != base and first.get(work, {}).get("seconds"):
            ratio = statistics.median(first[work]["seconds"]) / middle
            said += f"; {ratio:.3f} of {base}; {compare(first[work], row)}"
        print(said)
    sys.stdout.flush()


def start_checks(env: dict[str, str], folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    names = [name for part in PARTS.values() for name in part]
    return {name: spawn(__file__, ["--check", name], env, folder, f"check_{name}.log") for name in names}


def failed_parts(running: dict[str, subprocess.Popen[bytes]], folder: Path) -> list[str]:
    """Waits for the checks, says what they found, and returns folders with replacements for what does not run here."""
    deadline = time.monotonic() + 150
    codes = {name: finish(process, deadline) for name, process in running.items()}
    chosen = []
    for part, names in PARTS.items():
        failed = [name for name in names if codes[name] != 0]
        say(f"{part}:", "SGLang's own" if not failed else f"these failed: {failed}")
        for name in failed:
            print(tail(folder / f"check_{name}.log", 15))
        if failed:
            chosen.append(str(HERE / "sglang_in_torch" / part))
    return chosen


def environment(given: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Finds the pack, and tilewise as if it were installed: SGLang's processes load it through its entry point."""
    entry = folder / "entry/tilewise-0.dist-info"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: tilewise\nVersion: 0\n")
    module = "sglang_timing" if given.timing else "tilewise.integrations.sglang"
    (entry / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ntilewise = {module}:register\n")
    paths = [str(entry.parent), str(HERE.parents[1] / "src"), str(HERE), given.site, os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_PLUGINS": "tilewise", "SGLANG_USE_CPU_ENGINE": str(int(given.device == "cpu")), "OMP_NUM_THREADS": "2",
        "TVM_FFI_CACHE_DIR": str(folder / "jit"), "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "SGLANG_HOST_IP": "127.0.0.1", "PYTHONUNBUFFERED": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "TRITON_INTERPRET": str(int(given.device == "cpu")),
        "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pack", type=Path, help="folder with sglang_site.tar.xz")
    parser.add_argument("--site", help="where it is unpacked, or was before")
    parser.add_argument("--cases", default="eager,graphs", help="each with triton and tilewise; or case:a+b")
    parser.add_argument("--folder", type=Path, default=Path("sglang_results"))
    parser.add_argument("--seconds", type=float, default=170, help="time limit of all engines together")
    parser.add_argument("--start", type=float, default=120, help="seconds in which the engines have to start")
    parser.add_argument("--own", action="store_true", help="use SGLang's kernels; check them while the engines start")
    parser.add_argument("--rounds", type=int, default=3, help="timed ones")
    parser.add_argument("--timing", action="store_true", help="and one more, with the times of steps")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--model", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.check or given.case or given.model:
        try:
            if given.model:
                write_model(folder / "model", TINY if given.device == "cpu" else LLAMA)
            elif given.check:
                check(given.check)
            else:
                run_engine(*given.case.split(":"), folder, given.device, given.rounds)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)  # what the engine leaves behind is ended by the parent
    folder.mkdir(parents=True, exist_ok=True)
    if given.pack:
        given.site = given.site or str(folder / "site")
        with tarfile.open(given.pack / "sglang_site.tar.xz") as tar:
            tar.extractall(given.site, filter="fully_trusted")
        say("unpacked", given.site)
    env = environment(given, folder)
    writer = spawn(__file__, ["--model", "--device", given.device], env, folder, "model.log")
    on_gpu = given.device == "cuda"
    checks = start_checks(env, folder) if on_gpu else {}
    if not given.own:
        replaced = failed_parts(checks, folder) if on_gpu else [str(HERE / "sglang_in_torch/kernels")]
        env["PYTHONPATH"] = os.pathsep.join([*replaced, env["PYTHONPATH"]])
    if finish(writer, time.monotonic() + 120) != 0:
        sys.exit(tail(folder / "model.log", 30))
    groups = {}
    for one in given.cases.split(","):
        case, _, backends = one.partition(":")
        names = (backends or ("triton+tilewise" if on_gpu else "torch_native+tilewise")).split("+")
        groups[case] = [(case, backend) for backend in names]
    engines = Engines(__file__, folder, given.rounds)
    atexit.register(engines.end)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for group in groups.values():
        for case, backend in group:
            words = ["--case", f"{case}:{backend}", "--device", given.device, "--rounds", str(given.rounds)]
            engines.start(f"{case}.{backend}", words, env)
    deadline, every = time.monotonic() + given.seconds, list(engines.processes)
    engines.wait("ready", every, time.monotonic() + given.start)
    every = engines.drop_late()
    if given.own:
        failed_parts(checks, folder)
    engines.turn(0, every, deadline)
    say("all have generated once, or failed")
    for group in groups.values():
        names = [x for case, backend in group if (x := f"{case}.{backend}") in every]
        for n in range(1, 1 + given.rounds):
            for name in names:
                engines.turn(n, [name], deadline)
        for case, backend in group:
            report(folder, case, group[0][1], backend)
        for name in names if given.timing else []:
            engines.turn(1 + given.rounds, [name], deadline)
            for path in sorted(folder.glob(f"{name}.*.steps")):
                print(path.stem)
                for kind, x in json.loads(path.read_text()).items():
                    print("   ", kind, x, flush=True)


if __name__ == "__main__":
    main()
