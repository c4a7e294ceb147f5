"""What the families of calls share: the fields of a case, its first lines, and one table of how the options of
`tilewise.call.fields` are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tilewise_lab.fuzz.twins import MASK, SCORE

# fields that say how large a case is, or where it runs: two cases that fail alike and differ in these are one finding
SIZES = frozenset(
    {"seed", "backend", "device", "batch", "n_q", "n_k", "heads", "kv_heads", "d", "dv", "lengths", "queries", "space",
     "size", "steps", "wants"}
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A case of any family. The defaults are the simplest."""

    seed: int = 0
    backend: str = "auto"
    device: str = "cpu"
    mode: str = "call"
    dtype: str = "float32"

    def dict(self) -> dict[str, Any]:
        """What differs from the simplest case."""
        simplest = asdict(type(self)())
        return {name: x for name, x in asdict(self).items() if x != simplest[name]}

    def features(self) -> frozenset[str]:
        """The names of the fields that are not at their simplest, sizes left out."""
        return frozenset(self.dict()) - SIZES

    @property
    def cast(self) -> str:
        """What follows a tensor of random numbers to give it the dtype of the case."""
        return "" if self.dtype == "float32" else f".to(torch.{self.dtype})"

    def begin(self, *imports: str) -> list[str]:
        """The first lines of a case."""
        place = [f"torch.set_default_device({self.device!r})"] if self.device != "cpu" else []
        return ["import torch, tilewise", *imports, *place, f"torch.manual_seed({self.seed})"]


class Option(NamedTuple):
    """How often an option is given, and what it then is."""

    odds: float
    value: Callable[[random.Random], Any]


def _of(*values: Any) -> Callable[[random.Random], Any]:
    return lambda r: r.choice(values)


# by the field of the table of options: what a case has for it, where a call can have it
OPTIONS: dict[str, Option] = {
    "causal": Option(0.35, lambda r: True),
    "window": Option(0.3, lambda r: (r.choice((None, 0, 3, 20, 40)), r.choice((None, 0, 2, 40)))),
    "scale": Option(0.2, _of(0.3, -0.5, 0.0, 1.0)),
    "softcap": Option(0.2, _of(0.5, 2.0, 30.0)),
    "alibi_slopes": Option(0.15, lambda r: True),
    "sinks": Option(0.2, lambda r: True),
    "score_mod": Option(0.2, lambda r: r.choice(list(SCORE))),
    "mask_mod": Option(0.2, lambda r: r.choice(list(MASK))),
    "deterministic": Option(0.15, _of(True, False)),
    "dropout_p": Option(0.2, _of(0.1, 0.5, 0.9)),
    "seed": Option(0.9, _of(0, 11, 2**40, 2**63 - 1, -3)),
    "bias": Option(0.2, _of("bhij", "hij", "ij", "bj", "hi", "bij", "h", "j", "i", "", "-hij", "-ij", "-j", "-")),
    "return_lse": Option(0.6, lambda r: True),
    "return_max_logit": Option(0.4, lambda r: True),
    "split": Option(0.2, _of(0, 128)),
    "out": Option(0.2, lambda r: True),
    "plan": Option(0.3, lambda r: True),
    "tree": Option(0.15, lambda r: True),
    "rotary": Option(0.4, _of("halves", "pairs")),
}
# fields that are arguments of a call's layout, drawn with its sizes
PLACES = frozenset(
    {"k_new", "v_new", "cu_seqlens_q", "cu_seqlens_new", "page_table", "slots", "cache_rows", "starts", "k_scale",
     "v_scale", "shared_prefix", "token_table", "backend"}
)  # fmt: skip
# fields that no case has, and where they are tested
ELSEWHERE = {
    "precision": "tests/tilewise/backends: its results have another budget",
    "qk_norm": "tests/tilewise/kv_cache: the oracle has no norm",
    "max_seqlen_q": "tests/tilewise/kv_cache: it chooses a tile",
}


def options(r: random.Random, *names: str, odds: float | None = None) -> dict[str, Any]:
    """Those of the named options that are given, with their values. odds: in place of each one's own."""
    return {
        name: OPTIONS[name].value(r) for name in names if r.random() < (OPTIONS[name].odds if odds is None else odds)
    }
