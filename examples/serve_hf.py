"""Serve a model of Hugging Face transformers: continuous batching over a paged KV cache. On a CPU this takes seconds.

    pip install tilewise[hf]
    python examples/serve_hf.py                         # a tiny Qwen3 with random weights, 12 requests
    python examples/serve_hf.py --requests 40 --pages 64 --budget 128

Requests of different lengths join and leave while others are being answered. A step computes, in one packed batch, a
piece of the prompts that are new and a token of each of the others; the keys and values of all of them lie in pages of
one pool. Every answer is compared with `generate`, asked for that prompt alone.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import tilewise


@dataclass(eq=False)
class Request:
    """`tokens` begins with the prompt; the first `cached` of them are in the cache, in these `pages`."""

    tokens: list[int]
    last: int  # how many tokens there are when all is said
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.last


class Step:
    """What every layer has to know of a batch: where its sequences begin, how long they are, where their tokens lie."""

    def __init__(self, batch: list[tuple[Request, int]], pools: list[Tensor], device: torch.device) -> None:
        def ints(x: list[int]) -> Tensor:
            return torch.tensor(x, dtype=torch.int32, device=device)

        most = max(len(r.pages) for r, _ in batch)
        self.pools = pools
        self.lengths = ints([r.cached for r, _ in batch])
        self.cu = ints([0, *(n for _, n in batch)]).cumsum(0, dtype=torch.int32)
        self.table = torch.stack([ints([*r.pages, *[-1] * (most - len(r.pages))]) for r, _ in batch])
        self.plans: dict[Any, tilewise.KvPlan] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """New keys and values go into the layer's pool, then the queries look at all of them. Layers that are alike
        share a plan: which keys each processor of a GPU streams."""
        k_cache, v_cache = self.pools[layer]
        options |= {"k_new": k, "v_new": v, "cu_seqlens_q": self.cu, "page_table": self.table}
        like = options["window"]
        if like not in self.plans:
            self.plans[like] = tilewise.plan_kv(q, k_cache, v_cache, self.lengths, **options)
        out: Tensor = tilewise.attention_kv(q, k_cache, v_cache, self.lengths, plan=self.plans[like], **options)
        return out


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, *, step: Step, scaling: float,
    sliding_window: int | None = None, **_others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls in every layer: (1, heads, tokens, dim), of all sequences one after another."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = None if sliding_window is None else (sliding_window - 1, 0)
    return step.attend(module.layer_idx, q, k, v, scale=scaling, window=window)[None], None


transformers.AttentionInterface.register("served", attention_forward)
transformers.AttentionMaskInterface.register("served", lambda *_, **__: None)


class Engine:
    """A model, a pool of pages for each of its layers, and the requests that share them.

    A request waits until the pool has room for all its tokens; `budget` is how many tokens a step computes at most.
    """

    def __init__(self, model: Any, pages: int = 32, page: int = 16, budget: int = 64) -> None:
        self.model, self.page, self.budget = model, page, budget
        model.set_attn_implementation("served")
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, pages, page, config.num_key_value_heads, dim)  # keys and values
        self.pools = [model.lm_head.weight.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.free = list(range(pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, prompt: list[int], tokens: int) -> Request:
        request = Request(list(prompt), len(prompt) + tokens)
        if self._pages(request) > self.pools[0].shape[1]:
            raise ValueError(f"{request.last} tokens do not fit into {self.pools[0].shape[1]} pages of {self.page}")
        self.waiting.append(request)
        return request

    def _pages(self, request: Request) -> int:
        return -(-request.last // self.page)

    def _batch(self) -> Iterator[tuple[Request, int]]:
        """Requests and how many of their tokens to compute: a token of each that is being answered, then prompts."""
        while self.waiting and self._pages(self.waiting[0]) <= len(self.free):
            joins = self.waiting.popleft()
            joins.pages = [self.free.pop() for _ in range(self._pages(joins))]
            self.running.append(joins)
        left = self.budget
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):
            n = min(len(request.tokens) - request.cached, left)
            left -= n
            if n:
                yield request, n

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Compute the next tokens; the requests that are done with it leave, and their pages are free again."""
        batch = list(self._batch())
        ids = [t for r, n in batch for t in r.tokens[r.cached : r.cached + n]]
        places = [t for r, n in batch for t in range(r.cached, r.cached + n)]
        step = Step(batch, self.pools, self.model.device)
        ids_and_places = torch.tensor([ids, places], device=self.model.device)
        logits = self.model(
            input_ids=ids_and_places[:1], position_ids=ids_and_places[1:], use_cache=False, step=step,
            logits_to_keep=step.cu[1:].long() - 1,
        ).logits[0]  # fmt: skip
        for (request, n), token in zip(batch, logits.argmax(-1).tolist(), strict=True):
            request.cached += n
            if request.cached == len(request.tokens):  # the whole prompt is in: this is a new token
                request.tokens.append(token)
        left = [r for r in self.running if r.is_done]
        self.running = [r for r in self.running if not r.is_done]
        self.free += [page for r in left for page in r.pages]
        return left


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--pages", type=int, default=32, help="pages of 16 tokens in the pool")
    parser.add_argument("--budget", type=int, default=64, help="tokens that a step computes at most")
    args = parser.parse_args()
    model = tiny()
    engine = Engine(model, args.pages, budget=args.budget)
    g = torch.Generator().manual_seed(1)
    sizes = [torch.randint(1, most, (args.requests,), generator=g).tolist() for most in (120, 30)]
    coming = [(torch.randint(1, 97, (n,), generator=g).tolist(), tokens) for n, tokens in zip(*sizes, strict=True)]
    answers: list[tuple[Request, int]] = []
    steps = 0
    while coming or engine.waiting or engine.running:
        for prompt, tokens in coming[:2]:  # two more ask before every step
            answers.append((engine.submit(prompt, tokens), len(prompt)))
        del coming[:2]
        done = engine.step()
        steps += 1
        counts = len(engine.running), len(engine.waiting), len(done), len(engine.free)
        print("step {:3}: {:2} running, {:2} waiting, {} done, {:3} pages free".format(steps, *counts))
    model.set_attn_implementation("sdpa")
    for request, n in answers:
        ids = torch.tensor([request.tokens[:n]])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.last - n, do_sample=False
        )
        assert request.tokens == alone[0].tolist(), "not the tokens of generate"
    print(f"{len(answers)} requests in {steps} steps: the same tokens as generate, each alone")


if __name__ == "__main__":
    main()
