"""A few calls that touch every kernel and every edge, for compute-sanitizer (see sanitize.sh).

python -m tests.gpu.sanitize [--check] triton hopper
"""

from __future__ import annotations

import sys

from tests import budget
from tests.cases import Case, make, run
from tilewise.backends.hopper.support import unsupported
from tilewise.request import Request, gpu_of

CASES = [
    Case(batch=2, n_q=130, n_k=130, heads=4, kv_heads=2, d=64, dv=64, dtype="bfloat16", after=0),
    Case(n_q=128, n_k=256, d=128, dv=128, dtype="bfloat16"),
    Case(n_q=77, n_k=200, d=40, dv=24, dtype="float16", before=50, after=10, layouts=("bhsd", "qkv", "bdsh", "heads")),
    Case(batch=4, n_q=181, n_k=160, heads=2, kv_heads=1, d=64, dv=64, dtype="bfloat16", after=0,
         lengths=((100, 100), (0, 7), (80, 0), (1, 53))),
    Case(n_q=70, n_k=40, d=32, dv=32, dtype="float32", after=0),
    Case(n_q=1, n_k=1100, heads=4, kv_heads=2, d=64, dv=64, dtype="bfloat16", after=0),
    Case(n_q=130, n_k=150, d=192, dv=128, dtype="bfloat16", after=0),
    Case(n_q=130, n_k=150, d=96, dv=96, dtype="bfloat16"),
]  # fmt: skip

if __name__ == "__main__":
    backends = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    for case in CASES:
        inputs = make(case, "cuda")
        for backend in backends:
            if (
                backend == "hopper"
                and unsupported(Request(*inputs[1:4], case.spec), gpu_of(inputs.q.device)) is not None
            ):
                continue
            results = run(inputs, backend)
            if "--check" in sys.argv:  # many more kernels, torch's own: not for the sanitizer
                budget.check(results, inputs)
            print("ok", backend, case, flush=True)
