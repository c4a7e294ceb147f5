"""Run by test_mods, in a process whose Triton is the compiler's: mods, pickled, from its standard input, and their
derivatives, compiled for GPUs of three kinds."""

from __future__ import annotations

import pickle
import sys

import torch
import triton
import triton.language as tl

from tilewise.backends.common import mod_source as generated
from tilewise.backends.common.offline import binary_for

N = tl.constexpr(32)


@triton.jit
def kernel(out, aux, MOD: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    score = tl.cast(i - j, tl.float32)
    tl.store(out + i * N + j, tl.cast(MOD(score, 0, i % 5, i, j, N, N, aux), tl.float32))


if __name__ == "__main__":
    for mod in pickle.load(sys.stdin.buffer):
        sites = (generated.site(mod.key, n, False) for n in range(len(mod.program.sites)))
        for function in (generated.value(mod.key, False), *sites):
            aux = (*generated.captured(mod.tensors, (*mod.numbers, 1.0)), 3)  # the scale, and a position in a row
            for arch in (80, 90, "gfx942"):
                binary_for(arch, kernel, (torch.zeros(32, 32), aux), {"MOD": function})
    print("compiled")
