"""What the compiler makes of the Hopper forward, without a GPU: on the Triton that is installed, and on those in the
folders that TILEWISE_TRITONS names (pip install --no-deps --target FOLDER triton==3.9.0).
"""

from __future__ import annotations

import os
from itertools import product

import pytest

from tests.covering import cases
from tilewise.backends.hopper import support, tile_table

from ....compiling import compiler

pytestmark = pytest.mark.slow

TRITONS = ("", *filter(None, os.environ.get("TILEWISE_TRITONS", "").split(os.pathsep)))
CALLS = {
    "64 short causal": {"d": 64, "n": 1024, "after": 0},
    "64, three programs": {"d": 64, "n": 512, "after": 0},
    "64, three programs, packed window": {
        "d": 64,
        "n": 512,
        "before": 99,
        "after": 0,
        "packed": True,
        "terms": "sinks",
    },
    "64, two programs, partial": {"d": 64, "n": 512, "partial": True, "packed": True},
    "64 short softcap": {"d": 64, "n": 512, "terms": "softcap"},
    "64 medium full": {"d": 64, "n": 2048},
    "96, two programs": {"d": 96, "n": 512, "before": 99, "after": 0},
    "128, two programs": {"d": 128, "n": 512, "after": 0, "partial": True, "packed": True},
    "128 short full": {"d": 128, "n": 300},
    "128 medium full": {"d": 128, "n": 1024, "packed": True},
    "64 causal": {"d": 64, "after": 0},
    "64 full": {"d": 64},
    "128 causal": {"d": 128, "after": 0},
    "128 full": {"d": 128},
    "128 packed window": {"d": 128, "packed": True, "before": 100, "after": 7},
    "256 causal": {"d": 256, "after": 0},
    "256 full": {"d": 256},
    "96 causal": {"d": 96, "after": 0},
    "192 full": {"d": 192},
    "512 causal": {"d": 512, "after": 0},
    "384 by 256": {"d": 384, "dv": 256},
    "192 by 128 bias": {"d": 192, "dv": 128, "after": 0, "terms": "bias"},
    "192 by 128": {"d": 192, "dv": 128, "after": 0, "dtype": "float16"},
    "64 softcap": {"d": 64, "after": 0, "terms": "softcap"},
    "64 sinks": {"d": 64, "after": 0, "terms": "sinks"},
    "128 softcap": {"d": 128, "terms": "softcap"},
    "128 alibi": {"d": 128, "after": 0, "terms": "alibi"},
    "64 one hidden key": {"d": 64, "after": 0, "terms": "hidden"},
    "128 document": {"d": 128, "terms": "document"},
    "64 document lists": {"d": 64, "terms": "document lists"},
    "128 document lists": {"d": 128, "terms": "document lists"},
    "128 document lists, packed": {"d": 128, "terms": "document lists", "packed": True},
    "256 document lists": {"d": 256, "terms": "document lists"},
    "64 lists as words": {"d": 64, "after": 0, "terms": "document lists words"},
    "128 lists as words": {"d": 128, "after": 0, "terms": "document lists words"},
    "128 lists as words, packed": {"d": 128, "terms": "document lists words", "packed": True},
    "192 lists as words": {"d": 192, "terms": "document lists words"},
    "256 lists as words": {"d": 256, "terms": "document lists words"},
    "64 dropout": {"d": 64, "after": 0, "terms": "dropout"},
    "96 dropout": {"d": 96, "terms": "dropout"},
    "128 dropout": {"d": 128, "after": 0, "terms": "dropout"},
    "192 dropout": {"d": 192, "after": 0, "terms": "dropout"},
    "256 dropout": {"d": 256, "after": 0, "terms": "dropout"},
    "128 bias": {"d": 128, "terms": "bias"},
    "128 bias, packed": {"d": 128, "after": 0, "packed": True, "terms": "bias"},
    "256 softcap": {"d": 256, "after": 0, "terms": "softcap"},
    "256 document sinks": {"d": 256, "terms": "document sinks"},
    "128 partial": {"d": 128, "after": 0, "partial": True},
    "192 partial, packed": {"d": 192, "after": 0, "partial": True, "packed": True},
    "256 partial": {"d": 256, "after": 0, "partial": True},
    "64 pages of 16": {"d": 64, "after": 0, "page": 16},
    "128 pages of 16": {"d": 128, "after": 0, "page": 16},
    "128 pages of 256, packed": {"d": 128, "after": 0, "page": 256, "packed": True},
    "128 dense cache": {"d": 128, "after": 0, "page": 0},
    "192 by 128 pages of 64": {"d": 192, "dv": 128, "after": 0, "page": 64},
    "256 pages of 16": {"d": 256, "after": 0, "page": 16},
    "128 partial alibi": {"d": 128, "after": 0, "partial": True, "terms": "alibi"},
    "64 max logit": {"d": 64, "after": 0, "max_logit": True},
    "128 max logit": {"d": 128, "after": 0, "max_logit": True},
    "128 max logit, packed": {"d": 128, "max_logit": True, "packed": True},
    "256 max logit": {"d": 256, "after": 0, "max_logit": True},
    "128 fp8": {"d": 128, "precision": "fp8"},
    "128 fp8 causal": {"d": 128, "after": 0, "precision": "fp8"},
    "64 fp8 packed window": {"d": 64, "packed": True, "before": 100, "after": 7, "precision": "fp8"},
    "128 fp8 softcap": {"d": 128, "after": 0, "terms": "softcap", "precision": "fp8"},
}
ELSEWHERE = ("64 causal", "128 full", "128 packed window", "256 causal", "192 by 128", "128 document")
SPILLS = {
    "128 alibi": 36,
    "128 bias": 120,
    "128 bias, packed": 260,  # of the repair, but for 2 loads in the loop
    "256 softcap": 52,
    "256 document sinks": 92,
}  # bytes
SPILLS |= {"128 document lists, packed": 12, "256 document lists": 48, "256 dropout": 28}
# Of the registers that branches for rows with scales of their own need, one or two are loaded again in the loop.
SPILLS |= {"128 fp8 causal": 64, "128 fp8 softcap": 52}
SPILLS |= {"512 causal": 36, "128 partial alibi": 48, "128 document lists": 20}


def compiled(call: dict[str, object], triton: str = "", script: str = "compile_one") -> dict[str, object]:
    return compiler(f"tests.tilewise.backends.hopper.{script}", triton).report(call)


@cases(
    "name, triton",
    [
        ("128 causal", TRITONS[0]),
        ("128 lists as words, packed", TRITONS[0]),
        ("128 fp8", TRITONS[0]),
        ("128 pages of 256, packed", TRITONS[0]),
    ],
    [*product(CALLS, TRITONS[:1]), *product(ELSEWHERE, TRITONS[1:])],
)
def test_no_spills_and_nothing_serialised(name, triton):
    """Serialised products (C7510, C7512, C7514, C7515) show as warnings, and as one wait for each product."""
    pytest.importorskip("triton")
    made = compiled(CALLS[name], triton)
    assert made["spills"] <= SPILLS.get(name, 0)
    assert made["warnings"] == []
    assert made["overwritten"] == []
    assert made["copies"] > 0
    assert made["products"] > made["waits"] > 0
    assert made["shared"] <= 227 * 1024
    assert made["griddepcontrol"] == ["wait", "launch_dependents"]  # else the next kernel could overtake the previous


def test_every_row_of_the_table_is_compiled():
    rows = {
        support.forward_tile(
            c["d"],
            c.get("dv", c["d"]),
            banded="after" in c,
            keys=c.get("n", 4096),
            plain=c.get("terms") in (None, "sinks"),
        )
        for c in CALLS.values()
    }
    assert rows == {row for *_, row in tile_table.FORWARD}
