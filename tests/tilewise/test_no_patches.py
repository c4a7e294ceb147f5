"""tilewise changes nothing of torch, Triton or Python: not on import, and not by a call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import HAS_TRITON

# The attributes of modules and classes that libraries are tempted to replace, by identity. Numbers and strings count by
# value. A module may gain the attribute of a submodule when that is imported.
SCRIPT = """
import gc, inspect, sys, threading, types
import torch, torch.nn.functional, torch.utils.flop_counter
import torch.autograd.function, torch.library, torch.nn.attention

names = ["builtins", "inspect", "gc", "threading", "functools", "linecache", "importlib", "ctypes", "warnings",
         "torch", "torch._C", "torch.cuda", "torch.nn.functional", "torch.autograd", "torch.autograd.function",
         "torch.library", "torch.compiler", "torch.nn.attention", "torch.backends.cuda", "torch.ops"]
backend = sys.argv[1]
if backend == "triton":
    import triton, triton.language, triton.runtime.jit, triton.runtime.cache, triton.runtime.autotuner
    import triton.compiler.code_generator, triton.compiler.compiler, triton.runtime.driver, triton.knobs
    import triton.runtime.interpreter, triton.language.core, triton.language.semantic, triton.runtime._async_compile
    import triton.experimental.gluon, triton.backends.compiler
    names += [name for name in sys.modules if name.partition(".")[0] == "triton"]
classes = [torch.Tensor, torch.nn.Parameter, torch.autograd.Function, torch.nn.Module]
if backend == "triton":
    from triton.runtime.jit import JITFunction, KernelInterface
    from triton.runtime.interpreter import InterpretedFunction
    classes += [JITFunction, KernelInterface, InterpretedFunction, triton.compiler.compiler.CompiledKernel,
                triton.compiler.code_generator.CodeGenerator]

def values():
    found = {}
    for name in names:
        for key, x in vars(sys.modules[name]).items():
            found[name, key] = x
    for kind in classes:
        for key, x in vars(kind).items():
            found[kind.__name__, key] = x
    return found

def settings():
    found = {"gc": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)), "trace": (sys.gettrace(), sys.getprofile()),
             "switch": sys.getswitchinterval(), "recursion": sys.getrecursionlimit(), "meta": list(sys.meta_path),
             "hook": (sys.excepthook, threading.excepthook), "threads": torch.get_num_threads(),
             "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(),
             "deterministic": torch.are_deterministic_algorithms_enabled(),
             "precision": torch.get_float32_matmul_precision(),
             "rng": hash(bytes(torch.random.get_rng_state().tolist()))}
    if backend == "triton":
        knobs = triton.knobs
        for group in ("runtime", "compilation", "cache", "autotuning"):
            for key in dir(type(getattr(knobs, group))):
                if not key.startswith("_") and not callable(getattr(type(getattr(knobs, group)), key, None)):
                    try:
                        found[group, key] = repr(getattr(getattr(knobs, group), key))
                    except Exception as error:
                        found[group, key] = repr(error)
    return found

IGNORED = {"__warningregistry__", "__doc__", "__pycache__"}
INTERPRETED = backend == "triton" and triton.knobs.runtime.interpret
LANGUAGES = ("triton.language", "triton.experimental.gluon.language")

def compare(before, after, when):
    wrong = []
    if INTERPRETED and when != "import tilewise":  # Triton's interpreter replaces functions of triton.language
        before, after = ([{k: x for k, x in part[0].items() if not k[0].startswith(LANGUAGES)}, part[1]]
                         for part in (before, after))
    for key, x in before[0].items():
        if key[1] in IGNORED:
            continue
        if key not in after[0]:
            wrong.append(f"{when}: {key} is gone")
        elif after[0][key] is not x and not (isinstance(x, (int, float, str, bytes, tuple)) and after[0][key] == x):
            wrong.append(f"{when}: {key} is another: {x!r} -> {after[0][key]!r}")
    for key in after[0].keys() - before[0].keys():
        if key[1] not in IGNORED and not isinstance(after[0][key], types.ModuleType):
            wrong.append(f"{when}: {key} is new: {after[0][key]!r}")
    wrong += [f"{when}: {key}: {x} -> {after[1][key]}" for key, x in before[1].items() if after[1][key] != x]
    if wrong:
        raise SystemExit("\\n".join(wrong))

def snapshot():
    return values(), settings()

inputs = [torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3)]
cache = torch.randn(2, 16, 2, 16)
torch.ones(1, requires_grad=True).sum().backward()
before = snapshot()
import tilewise
compare(before, snapshot(), "import tilewise")

# calls
tilewise.attention(*inputs, causal=True, backend=backend).sum().backward()
compare(before, snapshot(), "attention")
sinks = torch.zeros(2, requires_grad=True)
out, lse = tilewise.attention(*inputs, sinks=sinks, softcap=3.0, return_lse=True, backend=backend)
(out.sum() + lse.sum()).backward()
cu = torch.tensor([0, 4, 9], dtype=torch.int32)
tilewise.attention_varlen(*(x[0] for x in inputs), cu, cu, backend=backend)
q, lengths = torch.ones(2, 1, 2, 16), torch.tensor([3, 5], dtype=torch.int32)
plan = tilewise.plan_kv(q, cache, cache, lengths, backend=backend)
tilewise.attention_kv(q, cache, cache, lengths, plan=plan, backend=backend)
tilewise.append_kv(q, q, cache, cache.clone(), lengths, backend=backend)
compare(before, snapshot(), "calls")
from tilewise import compat, distributed, integrations
import tilewise.warmup
compare(before, snapshot(), "adapters")
print("same", len(before[0]))
"""


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nothing_of_torch_triton_or_python_changes(backend: str) -> None:
    if backend == "triton" and not HAS_TRITON:
        pytest.skip("no triton here")
    environment = os.environ | {"TRITON_INTERPRET": "1" if backend == "triton" else "0", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-c", SCRIPT, backend], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout.split()[-1]) > 1000


@pytest.mark.slow
def test_compilation_changes_nothing(tmp_path: object) -> None:
    """Of kernels for a GPU that is not here: Triton's active driver is set for the compiler alone, and reset."""
    if not HAS_TRITON:
        pytest.skip("no triton here")
    head, _, _ = SCRIPT.partition("# calls")
    script = head + (
        "from tilewise.request import Gpu\n"
        "from tilewise.backends.common.offline import binary_for\n"
        "from tilewise.backends.registry import launches_of\n"
        "from tilewise.request import Request, Spec\n"
        "x = torch.empty(1, 64, 2, 64, dtype=torch.float16, device='meta')\n"
        "found = launches_of(Request(x, x, x, Spec(1.0, backend='triton')), Gpu('cuda', 80), False)\n"
        "before = snapshot()\n"
        "for launch in found.values():\n"
        "    assert binary_for(80, launch.kernel, launch.args, launch.options).asm['ptx']\n"
        "compare(before, snapshot(), 'compilation')\n"
        "print('same', len(before[0]))\n"
    )
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", script, "triton"], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
