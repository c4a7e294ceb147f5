"""Plans: equal calls share one, any other call has another, and none keeps a tensor."""

from __future__ import annotations

import ast
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tests import plans
from tests.plans import Counted, before, cu, ends, r, scaled, three
from tilewise import AttentionError

DIFFERENT = plans.pairs("different") + plans.pairs("different_kv")
EQUAL = plans.pairs("equal")
EACH = [*dict.fromkeys(call for pair in (*DIFFERENT, *EQUAL) for call in pair)]


class Passes(TorchDispatchMode):
    """Changes nothing. Under a mode calls run as the registered op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted() -> Iterator[Counted]:
    with plans.on_gpu() as backend:
        yield backend


def results(text: str, seed: int) -> list[Tensor]:
    """The results of a call with new tensors; its gradients if a tensor requires one; and its caches."""
    function, given = plans.evaluated(text, seed)
    found = function(**given)
    found = [*found] if isinstance(found, tuple) else [found] if isinstance(found, Tensor) else []
    found += [given[name] for name in ("k_cache", "v_cache") if name in given]
    leaves = [x for x in plans.tensors_of(given) if x.requires_grad]
    if leaves:
        found += torch.autograd.grad(found[0].float().square().sum(), leaves)
    return [x.detach() for x in found]


def is_right(text: str, seed: int) -> bool:
    """Whether a call has the results that it has without plans."""
    found = results(text, seed)
    with plans.without_plans():
        expected = results(text, seed)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_calls_that_differ_have_plans_of_their_own(counted: Counted) -> None:
    def runners() -> int:
        return sum(counted.made.count(name) for name in ("forward", "attend", "append"))

    for pair in DIFFERENT:
        plans.forget()
        made = []
        for text in pair * 2:
            before = runners()
            results(text, 0)
            made.append(runners() - before)
        assert made == [1, 1, 0, 0], pair


def test_equal_calls_share_a_plan(counted: Counted) -> None:
    def runners() -> int:
        return sum(counted.made.count(name) for name in ("forward", "attend", "append"))

    for pair in EQUAL:
        plans.forget()
        before = runners()
        for text in pair * 2:
            results(text, 0)
        assert runners() - before == 1, pair


@pytest.mark.parametrize("way", ["call", "op"])
def test_a_call_with_a_plan_runs_on_its_own_tensors(way: str, counted: Counted) -> None:
    """Also after a call that differs in one thing only; each with other numbers than before."""
    for pair in (*DIFFERENT, *EQUAL):
        plans.forget()
        with Passes() if way == "op" else nullcontext():
            for seed, text in enumerate(pair):
                results(text, seed)
            assert [is_right(text, seed) for seed, text in enumerate(pair, 2)] == [True, True], pair


def test_no_tensor_of_the_caller_is_kept_alive(counted: Counted) -> None:
    alive = []
    for text in EACH:
        function, given = plans.evaluated(text)
        found = function(**given)
        found = found[0] if isinstance(found, tuple) else given["k_cache"] if found is None else found
        if found.requires_grad:
            found.sum().backward()
        tensors = plans.tensors_of(given)
        memory = [x.untyped_storage() for x in tensors]
        alive += [(text, weakref.ref(x)) for x in (*tensors, found, *memory)]
    del function, given, found, tensors, memory
    gc.collect()
    assert not [text for text, x in alive if x() is not None]
    assert plans.count() > 30


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_runners_of_the_backends_keep_no_tensor(backend: str, counted: Counted, triton_runs: None) -> None:
    for _ in range(2):
        q, k, v = (torch.randn(1, 6, 2, 16, requires_grad=True) for _ in range(3))
        out = tilewise.attention(q, k, v, causal=True, backend=backend)
        expected = tilewise.attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
        assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)
        out.sum().backward()
        alive = [weakref.ref(x) for x in (q, k, v, out, q.grad)]
        del q, k, v, out, expected
        gc.collect()
        assert [x() for x in alive] == [None] * 5
    assert plans.count() >= 1


def test_calls_on_a_cpu_and_checked_calls(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the contents of tensors other than q, k and v are checked in every call."""
    with plans.on_cpu():
        tilewise.attention(**three(), sinks=r(4))
    assert plans.count() == 0
    tilewise.attention(**three())
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    wrong = torch.tensor([0, 9], dtype=torch.int32)
    given = {name: x[0] for name, x in three().items()}
    for _ in range(2):
        with pytest.raises(AttentionError, match="end of cu_seqlens_q: found 9"):
            tilewise.attention_varlen(**given, cu_seqlens_q=wrong, cu_seqlens_k=wrong)


def test_a_known_call_is_no_way_around_a_check(counted: Counted) -> None:
    """1 == True and 2.0 == 2, but the options differ."""
    tilewise.attention(**three(), causal=True, window=(2, 0))
    for causal, window in ((1, (2, 0)), (True, (2.0, 0)), (True, [2.0, 0]), (True, (2, False)), (True, (2, 0, 0))):
        with pytest.raises(AttentionError):
            tilewise.attention(**three(), causal=causal, window=window)
    with pytest.raises(AttentionError):
        tilewise.attention(**three(), scale=True)
    given = {name: x[0] for name, x in three().items()} | {"cu_seqlens_q": cu(0, 8), "cu_seqlens_k": cu(0, 8)}
    for longest in (9, 8):
        tilewise.attention_varlen(**given, max_seqlen_q=longest, max_seqlen_k=8)
    for wrong in (-1, 2.0, True, "8"):
        with pytest.raises(AttentionError, match="max_seqlen_q"):
            tilewise.attention_varlen(**given, max_seqlen_q=wrong, max_seqlen_k=8)


def test_settings_of_torch_count(counted: Counted) -> None:
    def made(**options: Any) -> int:
        before = len(counted.made)
        tilewise.attention(**three(**options))
        return len(counted.made) - before

    assert [made(), made(dtype=torch.bfloat16), made(), made(dtype=torch.bfloat16)] == [1, 1, 0, 0]
    torch.use_deterministic_algorithms(True)
    try:
        assert made() == 1
    finally:
        torch.use_deterministic_algorithms(False)
    setting = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert [made(), made(dtype=torch.bfloat16)] == [1, 0]  # no bfloat16 kernel uses TF32
    finally:
        torch.backends.cuda.matmul.fp32_precision = setting


IN_KEYS = {"are_deterministic_algorithms_enabled", "backends.cuda.matmul.fp32_precision"}  # the test above
NOT_IN_KEYS = {  # other settings of torch that modules read, and why a plan does not depend on them
    "is_autocast_enabled": "a call with autocast has no plan before its tensors are cast",
    "get_autocast_dtype": "as above",
    "is_grad_enabled": "a plan has both ways; each call chooses",
    "get_num_threads": "calls on a CPU have no plans",
    "backends.mha.get_fastpath_enabled": "set by replaces_sdpa, not read by calls",
    "backends.mha.set_fastpath_enabled": "as above",
}
SETTING = re.compile(r"torch\.((?:backends\.[\w.]+)|(?:(?:is|are|get)_\w+))")


def settings_of_torch(source: str) -> set[str]:
    """The settings that a user may change at any time: torch.backends.*, torch.is_*, torch.are_*, torch.get_*."""
    names = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    found = {match[1] for match in map(SETTING.fullmatch, names) if match}
    return {x for x in found if not any(y.startswith(x + ".") for y in found)}


def test_every_setting_of_torch_is_in_the_keys_or_has_a_reason() -> None:
    assert settings_of_torch("if torch.backends.cudnn.allow_tf32 or f(torch.is_x(y)): z(torch.backends.a.b.c)") == {
        "backends.cudnn.allow_tf32", "is_x", "backends.a.b.c",
    }  # fmt: skip
    sources = Path(tilewise.__file__).parent.rglob("*.py")
    found = set().union(*(settings_of_torch(path.read_text(encoding="utf-8")) for path in sources))
    assert found == IN_KEYS | set(NOT_IN_KEYS)


@pytest.mark.parametrize("first", [True, False])
def test_a_known_call_has_a_gradient_if_grad_mode_says_so(first: bool, counted: Counted) -> None:
    given = three(grad=True)
    for wanted in (first, not first, first):
        with torch.set_grad_enabled(wanted):
            for lse in (True, False):
                out = tilewise.attention(**given, causal=True, return_lse=lse)
                assert (out[0] if lse else out).requires_grad == wanted
    with torch.inference_mode():
        assert not tilewise.attention(**given, causal=True, return_lse=False).requires_grad
    assert tilewise.attention(**given, causal=True, return_lse=False).requires_grad
    assert counted.made.count("forward") == 2  # with and without lse


def test_a_gradient_of_one_tensor(counted: Counted) -> None:
    """Of q, k, v or the sinks alone; gradients of score terms are computed only where they are wanted."""
    for n in range(4):
        for _ in range(2):
            counted.ran.clear()
            tensors = [r(grad=n == m) for m in range(3)]
            sinks = r(4, grad=n == 3)
            out = tilewise.attention(*tensors, sinks=sinks, mask_mod=before(ends()))
            out.square().sum().backward()
            assert [x.grad is not None for x in (*tensors, sinks)] == [n == m for m in range(4)]
            assert counted.ran.count("term_gradients") == (n == 3)
    for _ in range(2):
        assert not tilewise.attention(**three(), sinks=r(4)).requires_grad


def test_each_dropout_call_draws_a_seed(counted: Counted) -> None:
    given = three()
    assert not torch.equal(*(tilewise.attention(**given, dropout_p=0.5) for _ in range(2)))


def test_autocast(counted: Counted) -> None:
    for _ in range(3):
        given = three(grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            torch.set_autocast_enabled("cuda", True)  # where the tensors say they are
            out = tilewise.attention(**given)
            torch.set_autocast_enabled("cuda", False)
        out.sum().backward()
        assert out.dtype == torch.bfloat16
        assert given["q"].grad is not None
        assert given["q"].grad.dtype == torch.float32
        assert tilewise.attention(**given).dtype == torch.float32
    assert counted.made == ["forward", "backward", "forward"]


def test_a_full_cache_drops_its_oldest_plans() -> None:
    with plans.on_gpu(limit=8) as counted:
        for n in range(4, 24):
            for _ in range(2):
                assert tilewise.attention(**three(n)).shape == (1, n, 4, 16)
            assert plans.count() <= 8
        assert counted.made == ["forward"] * 20
        for n in range(16, 24):
            tilewise.attention(**three(n))
        assert counted.made == ["forward"] * 20


def test_a_known_call_under_a_dispatch_mode_runs_the_op(counted: Counted) -> None:
    given = three()
    tilewise.attention(**given)
    with FlopCounterMode(display=False) as counter:
        tilewise.attention(**given)
    assert counter.get_total_flops() == 2 * 4 * 8 * 8 * (16 + 16)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "forward mode", "compile", "make_fx", "fake tensors"])
def test_a_known_call_under_a_transform(transform: str, counted: Counted) -> None:
    """The op is called, so that the transform sees it."""
    given = three(dtype=torch.float64)
    q, *others = given.values()
    tilewise.attention(q, *others)
    expected = found = tilewise.attention(q, *others, backend="reference")
    call = tilewise.attention
    if transform == "vmap":
        found = torch.vmap(lambda q: call(q, *others))(torch.stack([q] * 2))[1]
    elif transform == "grad":
        wanted = torch.func.grad(lambda q: call(q, *others, backend="reference").square().sum())(q)
        assert_close(torch.func.grad(lambda q: call(q, *others).square().sum())(q), wanted)
    elif transform == "jvp":
        found, _ = torch.func.jvp(lambda q: call(q, *others, backend="reference"), (q,), (torch.ones_like(q),))
    elif transform == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            found, tangent = torch.autograd.forward_ad.unpack_dual(call(dual, *others))
            assert tangent is not None
    elif transform == "compile":
        found = torch.compile(call, backend="eager", fullgraph=True)(q, *others)
    elif transform == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda *x: call(*x))(q, *others)
        assert any("tilewise." in str(node.target) for node in graph.graph.nodes)
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(x) for x in (q, *others)))
        assert fake.shape == expected.shape
    assert_close(found, expected)


def test_nested_tensors(counted: Counted) -> None:
    """Calls with and without gradients; the second of each runs by the plan of the first."""
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    for requires_grad in (False, True):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).detach().requires_grad_(requires_grad)
        tilewise.attention(x, x, x)
        made = len(counted.made)
        out = tilewise.attention(x, x, x)
        assert len(counted.made) == made
        assert out.requires_grad is requires_grad
        for found, part in zip(out.detach().unbind(), parts, strict=True):
            assert_close(found, tilewise.attention(*[part[None]] * 3)[0])


def in_four_threads(work: Callable[[torch.Generator], None]) -> None:
    """They start together, each with random numbers of its own; raises what one of them raised."""
    start = threading.Barrier(4)

    def run(seed: int) -> None:
        start.wait()
        work(torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run, seed) for seed in range(4)]:
            done.result()


def test_threads_share_the_cache() -> None:
    """Each gets the results of its own tensors, while the cache fills up and drops plans."""

    def work(generator: torch.Generator) -> None:
        for n in (3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8) * 2:
            q, k, v = (torch.randn(1, n, 2, 8, generator=generator).requires_grad_() for _ in range(3))
            found = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
            theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
            for a, b in zip(found, torch.autograd.grad(theirs.square().sum(), (q, k, v)), strict=True):
                assert_close(a, b, atol=1e-5, rtol=1e-5)

    with plans.on_gpu(limit=4):
        in_four_threads(work)
        assert plans.count() <= 4 + 4


def negative(*shape: int) -> Tensor:
    """A view with the negative bit: its values are those in memory, negated."""
    x = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


@pytest.mark.parametrize("what", ["q", "k", "v", "bias", "sinks", "slopes", "mod", "dout", "dlse"])
@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_negative_views_and_zero_tensors(what: str, kind: str, counted: Counted, triton_runs: None) -> None:
    """Kernels read memory, so these are copied first, by every call: also after one with plain tensors."""
    make = negative if kind == "negative" else lambda *shape: torch._efficientzerotensor(shape)
    shapes = {"q": (1, 6, 2, 16), "k": (1, 6, 2, 16), "v": (1, 6, 2, 16), "bias": (1, 2, 6, 6), "sinks": (2,),
              "slopes": (2,), "mod": (2,), "dout": (1, 6, 2, 16), "dlse": (1, 2, 6)}  # fmt: skip
    for plain in (True, False, False):
        given = {name: torch.randn(*shape) if plain or name != what else make(*shape) for name, shape in shapes.items()}
        results = []
        for backend in ("triton", "reference"):
            q = given["q"] if what == "q" else given["q"].clone().requires_grad_()
            terms = {"bias": given["bias"], "sinks": given["sinks"], "alibi_slopes": given["slopes"]}
            options: dict[str, Any] = {} if what in "qkv" else terms | {"score_mod": scaled(given["mod"], 1.0)}
            found = tilewise.attention(q, given["k"], given["v"], **options, return_lse=True, backend=backend)
            if q.requires_grad:
                found = *found, *torch.autograd.grad(found, q, (given["dout"], given["dlse"]))
            results.append(found)
        for a, b in zip(*results, strict=True):
            assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (1, 0, 3), (1, 3, 0)])
def test_calls_without_elements(batch: int, queries: int, keys: int, counted: Counted, triton_runs: None) -> None:
    for _ in range(2):
        q = torch.randn(batch, queries, 2, 16, requires_grad=True)
        k, v = torch.randn(2, batch, keys, 2, 16).requires_grad_().unbind()
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="triton")
        assert torch.equal(out, torch.zeros_like(q))
        assert bool((lse == -torch.inf).all())
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))


def test_threads_that_decode_share_the_cache() -> None:
    def work(generator: torch.Generator) -> None:
        for n in (3, 4, 5, 6, 3, 4, 5, 6):
            q, k, v = (torch.randn(1, s, 2, 8, generator=generator) for s in (1, n, n))
            found = tilewise.attention_kv(q, k, v, torch.tensor([n], dtype=torch.int32), backend="reference")
            assert_close(found, tilewise.attention(q, k, v, backend="reference"))

    in_four_threads(work)
