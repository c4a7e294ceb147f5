"""Runs transformers' continuous batching with its own attentions and with tilewise's, and compares tokens and speed.

    python bench/engines/transformers_batching.py --backends FA3,tilewise,tilewise-eager,sdpa

The model is the small Llama of `vllm_engine.py`, made from its config, with the same random weights; nothing is
downloaded. Every backend has a process of its own. All start at the same time and generate once; then they are timed
in turns. "FA3" needs the package flash-attn-3. At last the first backend computes, without a cache, the logits where
the tokens of another differ first from its own. "sdpa" takes so long that it is timed once, with the first workload
alone. On a CPU the model and the prompts are tiny: that tests the calls.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turns import Engines, Worker
from vllm_engine import LLAMA, Compilations, say, set_weights, workload

NOT_OURS = ("torch_dtype", "model_type", "architectures", "rope_theta")  # of LLAMA: the class says them, or its default
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GRAPHS = ("use_cuda_graph", "use_async_batching", "max_blocks_per_request")
EAGER = dict.fromkeys(GRAPHS, False) | {"max_blocks_per_request": 0}
SYNC = {"max_blocks_per_request": 16, "use_async_batching": False}
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {  # attn_implementation, options of ContinuousBatchingConfig
    "sdpa": ("sdpa", {}),
    "FA3": ("flash_attention_3", {"max_blocks_per_request": 16}),
    "FA3-sync": ("flash_attention_3", SYNC),
    "tilewise": ("tilewise", {"max_blocks_per_request": 16}),  # CUDA graphs, and decoding from a table of blocks
    "tilewise-sync": ("tilewise", SYNC),
    "tilewise-indices": ("tilewise", {"max_blocks_per_request": 0}),  # CUDA graphs
    "tilewise-eager": ("tilewise", EAGER),
}


class Captures:
    """Counts the CUDA graphs that transformers captures, and the seconds that takes."""

    def __init__(self) -> None:
        from transformers.generation.continuous_batching import model_runner

        (runner,) = (x for x in vars(model_runner).values() if hasattr(x, "_capture_graph"))
        capture = runner._capture_graph
        self.seconds: list[float] = []

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = capture(*args, **kwargs)
            self.seconds.append(time.perf_counter() - began)
            return found

        runner._capture_graph = timed

    def told(self) -> tuple[int, float]:
        """Since the last time."""
        found, self.seconds = (len(self.seconds), round(sum(self.seconds), 3)), []
        return found


class Engine:
    """A model, its batching manager, and what it has done."""

    def __init__(self, backend: str) -> None:
        import torch
        import transformers

        from tilewise.integrations import transformers as ours

        began = time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.is_tiny = self.device.type == "cpu"
        config = {name: x for name, x in LLAMA.items() if name not in NOT_OURS} | (TINY if self.is_tiny else {})
        with self.device:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16).eval()
        set_weights(SimpleNamespace(get_model=lambda: model), few_tokens=False)
        name, options = BACKENDS[backend]
        before_5_22 = "page_size" not in vars(transformers.ContinuousBatchingConfig())
        if name == "tilewise":
            ours.serve(model)
        else:
            model.set_attn_implementation(f"paged|{name}" if before_5_22 else name)
        page = {"block_size" if before_5_22 else "page_size": 16 if self.is_tiny else 256}
        if not before_5_22:
            options = options | {"auto_switch_to_flash": False}
        if self.is_tiny:
            options = {name: x for name, x in options.items() if name not in GRAPHS}
        blocks, tokens = (64, 64) if self.is_tiny else (1024, 8192)
        self.model, self.transformers, self.torch, self.captures = model, transformers, torch, Captures()
        self.config = transformers.ContinuousBatchingConfig(
            **page, num_blocks=blocks, max_batch_tokens=tokens, max_requests_per_batch=16 if self.is_tiny else 128,
            allow_block_sharing=False, **options,
        )  # fmt: skip
        self.found: dict[str, Any] = {"engine_s": time.perf_counter() - began}
        self.found["attention"] = model.config._attn_implementation

    def workload(self, work: str) -> tuple[list[list[int]], int]:
        prompts, new = workload(work)
        return ([p[:40] for p in prompts[:4]], 6) if self.is_tiny else (prompts, new)

    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Seconds from the first request's start to the last one's end, and the tokens."""
        words = {"max_new_tokens": new, "do_sample": False, "eos_token_id": LLAMA["vocab_size"], "pad_token_id": 0}
        config = self.transformers.GenerationConfig(**words)
        got = self.model.generate_batch(prompts, config, self.config, max_new_tokens=new, persistent_manager=True)
        if len(got) < len(prompts) or any(x.error for x in got.values()):
            raise RuntimeError(f"{len(got)} of {len(prompts)} requests: {[x.error for x in got.values()][:1]}")
        began, ended = zip(*(x.lifespan for x in got.values()), strict=True)
        return max(ended) - min(began), [list(x.generated_tokens) for x in got.values()]

    def first(self, work: str) -> None:
        """Tokens, and how many requests change with the start of their prompts."""
        prompts, new = self.workload(work)
        seconds, tokens = self.generate(prompts, new)
        other = [[*reversed(p[: len(p) // 2]), *p[len(p) // 2 :]] for p in prompts[:16]]
        _, got = self.generate(other, 4)
        changed = sum(a != b[:4] for a, b in zip(got, tokens, strict=False))
        self.found[work] = {
            "tokens": tokens, "first_s": seconds, "seconds": [], "repeatable": True, "changed": changed, "captures": [],
        }  # fmt: skip

    def timed(self, work: str) -> None:
        self.captures.told()
        seconds, tokens = self.generate(*self.workload(work))
        x = self.found[work]
        x["seconds"].append(seconds)
        x["captures"].append(self.captures.told())
        x["repeatable"] &= tokens == x["tokens"]

    def judge(self, work: str, other: list[list[int]]) -> list[float]:
        """How far the lower one of the two tokens is below the best, where another backend's differ first: by the
        logits of this model with transformers' sdpa and no cache."""
        torch, (prompts, _) = self.torch, self.workload(work)
        self.model.destroy_cached_continuous_batching_manager()
        self.model.set_attn_implementation("sdpa")
        gaps = []
        for prompt, a, b in zip(prompts, self.found[work]["tokens"], other, strict=True):
            i = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), None)
            if i is not None:
                ids = torch.tensor([[*prompt, *a[:i]]], device=self.device)
                with torch.no_grad():
                    logits = self.model(ids, logits_to_keep=1).logits[0, -1].float()
                gaps.append((logits.max() - torch.stack((logits[a[i]], logits[b[i]])).min()).item())
        return sorted(gaps)


def run_engine(backend: str, works: list[str], rounds: int, folder: Path) -> None:
    import logging

    logging.basicConfig(level=logging.WARNING)
    compilations = Compilations()
    engine, turns = Engine(backend), Worker(folder, backend)
    works = works[:1] if backend == "sdpa" else works
    say(backend, engine.found)
    turns.ready()
    for n in range(1 + rounds):
        turns.wait_for_turn(n)
        began = time.perf_counter()
        for work in works if n <= 1 or backend != "sdpa" else []:
            if n == 0:
                engine.first(work)
            else:
                engine.timed(work)
            say(backend, n, work, engine.found[work]["first_s"], engine.found[work]["seconds"])
        if n:
            engine.found.setdefault("compiled_after", []).extend(compilations.since(began))
        (folder / f"{backend}.json").write_text(json.dumps(engine.found))
        turns.done(n)
    turns.wait_for_turn(1 + rounds)
    others = [p for p in folder.glob("*.json") if p.stem != backend and not p.stem.startswith("gaps")]
    for path in others:
        told = json.loads(path.read_text())
        gaps = {work: engine.judge(work, told[work]["tokens"]) for work in works if work in told}
        (folder / f"gaps-{path.stem}.json").write_text(json.dumps(gaps))
    turns.done(1 + rounds)


def report(folder: Path, backends: list[str], works: list[str]) -> None:
    found = {x: json.loads(path.read_text()) for x in backends if (path := folder / f"{x}.json").exists()}
    base = found.get(backends[0], {})
    for backend, x in found.items():
        say(f"{backend}: made in {x['engine_s']:.1f} s, {x['attention']}, compiled later: {x.get('compiled_after')}")
        path = folder / f"gaps-{backend}.json"
        gaps = json.loads(path.read_text()) if path.exists() else {}
        for work in works:
            row = x.get(work)
            if row is None:
                continue
            tokens, seconds = sum(map(len, row["tokens"])), row["seconds"] or [row["first_s"]]
            said = f"    {work}: {tokens / statistics.median(seconds):.0f} tokens/s of {len(row['seconds'])} runs"
            said += f" (first {row['first_s']:.2f} s; {[round(s, 3) for s in row['seconds']]}); {row['changed']} change"
            said += "" if row["repeatable"] else "; runs differ"
            said += f"; graphs captured, s: {row['captures']}"
            if work in base and backend != backends[0]:
                first = base[work]["seconds"] or [base[work]["first_s"]]
                equal = sum(a == b for a, b in zip(base[work]["tokens"], row["tokens"], strict=True))
                said += f"; {statistics.median(first) / statistics.median(seconds):.3f} of {backends[0]}"
                said += f"; {equal} of {len(row['tokens'])} requests equal"
            if gaps.get(work):
                said += f"; gaps: median {statistics.median(gaps[work]):.3f}, largest {gaps[work][-1]:.3f}"
            print(said, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="tilewise,tilewise-eager,sdpa")
    parser.add_argument("--work", default="small,long")
    parser.add_argument("--rounds", type=int, default=3, help="timed ones")
    parser.add_argument("--folder", type=Path, default=Path("transformers_results"))
    parser.add_argument("--seconds", type=float, default=170, help="time limit of all together")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder, works = given.folder.absolute(), given.work.split(",")
    if given.backend:
        try:
            run_engine(given.backend, works, given.rounds, folder)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(Path(__file__).resolve().parents[2] / "src"), os.environ.get("PYTHONPATH")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    backends, deadline = given.backends.split(","), time.monotonic() + given.seconds
    engines = Engines(__file__, folder, given.rounds)
    atexit.register(engines.end)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    words = ["--work", given.work, "--rounds", str(given.rounds)]
    for backend in backends:
        engines.start(backend, [*words, "--backend", backend], env)
    engines.wait("ready", backends, deadline)
    backends = engines.drop_late()
    engines.turn(0, backends, deadline)
    say("all have generated once, or failed")
    for n in range(1, 1 + given.rounds):
        for backend in backends:
            engines.turn(n, [backend], deadline)
    report(folder, backends, works)
    engines.turn(1 + given.rounds, backends[:1], deadline)
    report(folder, backends, works)


if __name__ == "__main__":
    main()
