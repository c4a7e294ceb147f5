"""Calls that the rows of tests/tables describe. In Triton's interpreter they are small; on a GPU their dims are those
that its kernels have tiles for, and they have many tiles."""

from __future__ import annotations

from tests import features
from tests.cases import Case
from tests.covering import Row
from tests.features import Call, Features

LONGER = 17  # times as many tokens on a GPU: odd, so that no number of tokens divides by 16

DIMS = {"cpu": {"square": (16, 16), "wide": (24, 24), "uneven": (5, 19)},
        "cuda": {"square": (64, 64), "wide": (128, 128), "uneven": (192, 128)}}  # fmt: skip

# (queries, keys) of each sequence, and tokens after the last one
TOKENS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "equal": ([(21, 21)] * 2, 0),
    "more keys": ([(9, 25)] * 2, 0),
    "more queries": ([(25, 9)] * 2, 0),
    "one query": ([(1, 34)] * 2, 0),
    "packed": ([(17, 17), (0, 0), (5, 5)], 0),
    "packed apart": ([(5, 19), (2, 0), (0, 3), (9, 4)], 3),
}

BANDS: dict[str, tuple[int | None, int | None]] = {
    "-": (None, None),
    "causal": (None, 0),
    "window": (5, 3),
    "left": (4, None),
    "sliding": (11, 0),
    "diagonal": (0, 0),
}

GRADS = {"all": (), "q": ("q",), "kv": ("k", "v"), "terms": (*(x for mod in features.MODS.values() for x in mod[0]),
                                                              "alibi", "bias", "sinks")}  # fmt: skip


def numbers(text: str) -> tuple[int, ...]:
    """(4, 2) of "4/2"."""
    return tuple(map(int, text.split("/")))


def sizes(row: Row, device: str) -> tuple[list[tuple[int, int]], int]:
    """The lengths of a row's sequences, and how many tokens follow the last one."""
    lengths, padding = TOKENS[row["tokens"]]
    if device != "cuda":
        return lengths, padding
    return [tuple(n if n == 1 else n * LONGER for n in pair) for pair in lengths], padding


def attention(row: Row, device: str, seed: int = 0) -> Call:
    """The call of a row of attention.tsv or nan.tsv."""
    lengths, padding = sizes(row, device)
    d, dv = DIMS[device][row["dims"]]
    heads, kv_heads = numbers(row["heads"])

    def given(name: str) -> str | None:
        """The value of an option without its name: "bhij" of "bias bhij"."""
        value = row.get(name, "-")
        return None if value == "-" else value.split()[-1]

    chosen = Features(
        softcap=row["softcap"] != "no",
        mod=given("score_mod"),
        alibi=given("alibi"),
        bias=given("bias"),
        turned=row.get("layout") == "bdsh",
        sinks=row["sinks"] != "no",
        dropout=row["dropout"] != "no",
        mask=given("mask_mod"),
        blocks=0 if row["lists"] == "no" else 16 if device == "cpu" else 128,
        packed=row["tokens"].startswith("packed"),
        heads=(heads, kv_heads),
        d=d,
        dv=dv,
        dtype=row["dtype"],
        scale=None if row.get("scale", "-") == "-" else float(row["scale"]),
        layout=row.get("layout", "bshd"),
        max_logit=row.get("max_logit", "no") != "no",
        wanted=GRADS[row.get("grads", "all")],
    )
    before, after = BANDS[row["band"]]
    if device == "cuda":
        before, after = (x and x * LONGER for x in (before, after))
    return features.away_from_kinks(features.data(chosen, lengths, (before, after), seed, device, padding))


def strided(row: Row, device: str) -> Case:
    """The call of a row of layouts.tsv."""
    lengths, _ = sizes(row, device)
    d, dv = DIMS[device][row["dims"]]
    packed = row["tokens"].startswith("packed")
    n_q, n_k = (sum(n) if packed else n[0] for n in zip(*lengths, strict=True))
    return Case(
        batch=len(lengths),
        n_q=n_q,
        n_k=n_k,
        heads=2,
        kv_heads=2,
        d=d,
        dv=dv,
        dtype=row["dtype"],
        after=0,
        layouts=(row["q"], row["k"], row["v"], row["dout"]),
        lengths=tuple(lengths) if packed else None,
    )
