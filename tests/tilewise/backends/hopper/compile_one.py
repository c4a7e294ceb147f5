"""Compiles calls of the Hopper forward for sm_90 and prints what the compiler made of them, as JSON.

echo '{"d": 128, "after": 0}' | python -m tests.tilewise.backends.hopper.compile_one
"""

from __future__ import annotations

import re
from typing import Any

import torch
import triton

import tilewise
import tilewise.mods
from tilewise.backends.common.launch import DeviceMemory
from tilewise.backends.hopper.kv_launches import prefill_launch
from tilewise.backends.hopper.launches import forward_launches, fp8_forward_launches, new_state
from tilewise.kv_request import CachePlaces, KvRequest
from tilewise.mods.builtin import alibi, softcap
from tilewise.mods.program import bound
from tilewise.request import Request, Spec
from tilewise_lab.costs.compiled import compile_for

from ....compiling import answer

SCORE = {"softcap": lambda heads: softcap(30.0), "alibi": lambda heads: alibi(torch.empty(heads))}


@tilewise.mask_mod
def one_hidden(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx != 150


def with_terms(request: Request, names: str, batch: int, n: int) -> Request:
    """A call with these terms; `names`, of softcap alibi document hidden sinks bias lists words dropout."""
    heads = request.q.shape[-2]
    score = bound([make(heads) for name, make in SCORE.items() if name in names])
    mask = tilewise.mods.document(ids=torch.zeros(batch, n, dtype=torch.int32)) if "document" in names else None
    mask = bound([one_hidden()]) if "hidden" in names else mask
    spec = request.spec._replace(
        score_mod=score and score.key,
        score_numbers=score.numbers if score else (),
        score_tensors=len(score.tensors) if score else 0,
        mask_mod=mask and mask.key,
        mask_numbers=mask.numbers if mask else (),
        mask_tensors=len(mask.tensors) if mask else 0,
        mask_block=(128, 128, batch, 1) if "lists" in names else (),
        dropout_p=0.1 if "dropout" in names else 0.0,
    )
    return request._replace(
        spec=spec,
        bias=torch.empty(1, heads, n, n, dtype=request.q.dtype) if "bias" in names else None,
        sinks=torch.empty(heads) if "sinks" in names else None,
        seed=torch.zeros((), dtype=torch.int64) if "dropout" in names else None,
        score=score.tensors if score else (),
        mask=mask.tensors if mask else (),
        blocks=tuple(torch.zeros(batch * n // 128 + 1, dtype=torch.int32) for _ in range(4))
        if "lists" in names
        else (),
    )


def overwritten(ptx: str) -> list[str]:
    """Lines of inline assembly that read a register which a line before has written as a result. `keep_column_range`
    has many results, and without early-clobber constraints one of them may share the register of an operand."""
    found = []
    for block in re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL):
        written: set[str] = set()
        for bits, result, score in re.findall(r"and\.b32 t, (%\w+), .*?selp\.f32 (%\w+), (%\w+),", block):
            if {bits, score} & written:
                found.append(f"{bits} {score} {result}")
            written.add(result)
    return found


def main(
    d: int,
    dv: int | None = None,
    n: int = 4096,
    before: int | None = None,
    after: int | None = None,
    packed: bool = False,
    dtype: str = "bfloat16",
    terms: str = "",
    partial: bool = False,
    page: int | None = None,
    max_logit: bool = False,
    precision: str | None = None,
) -> dict[str, Any]:
    """`page`: K and V are a cache, of pages with so many tokens, or dense with 0."""
    heads, batch, dv = 4, 2, dv or d
    outer = (n,) if packed else (batch, n)
    q, k, v, out = (torch.empty(*outer, heads, x, dtype=getattr(torch, dtype)) for x in (d, d, dv, dv))
    lse = torch.empty(heads, n) if packed else torch.empty(batch, heads, n)
    cu = torch.zeros(3, dtype=torch.int32) if packed else None
    request = with_terms(
        Request(q, k, v, Spec(d**-0.5, before, after, partial=partial, precision=precision), cu_q=cu, cu_k=cu),
        terms,
        batch,
        n,
    )
    state = new_state(DeviceMemory(torch.device("cpu")), request if page is None else None)
    if partial:  # and somewhere in a larger call, if something asks where
        out, position_offsets = out.float(), torch.zeros(batch, 7, dtype=torch.int32)
        request = request._replace(position_offsets=position_offsets if terms else None)
    if precision is not None:
        memory = DeviceMemory(torch.device("cpu"))
        launches = fp8_forward_launches(request, (out, lse, None), state, 132, memory)
        launches = [launches["hopper forward"]]
    elif page is None:
        top = torch.empty(lse.shape[:-1]) if max_logit else None
        words = torch.empty(1 << 16, dtype=torch.int32) if "words" in terms else None
        launches = forward_launches(request, out, lse, state._replace(mask_words=words), 132, top)
    else:
        k, v = (torch.empty(batch if page == 0 else 1024, page or n, heads, x, dtype=q.dtype) for x in (d, dv))
        table = torch.empty(batch, n // page, dtype=torch.int32) if page else None
        places = CachePlaces(torch.empty(batch, dtype=torch.int32), table)
        cached = KvRequest(request._replace(k=k, v=v, cu_k=None), places)
        launches = [prefill_launch(cached, out, lse, state, 132)]
    made = compile_for(90, launches[0].kernel, launches[0].args, launches[0].options)
    return {
        "triton": triton.__version__,
        "spills": made.spills,
        "warnings": made.warnings,
        "shared": made.shared,
        "products": made.instructions["HGMMA" if precision is None else "QGMMA"],
        "copies": made.instructions["UTMALDG"],
        "waits": made.sass.count("WARPGROUP.DEPBAR"),
        "overwritten": overwritten(made.asm["ptx"]),
        "griddepcontrol": re.findall(r"griddepcontrol\.(\w+)", made.asm["ptx"]),
    }


if __name__ == "__main__":
    answer(main)
