"""How kernels come to be compiled: in which order, by whom, and what is left as it was found. Nothing is compiled."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import tilewise.kernels
from tilewise.kernels import triton_private
from tilewise.kernels.compiling import compiled

if triton_private.active_mode is None:
    pytest.skip("this Triton compiles one kernel after the other", allow_module_level=True)


class Kernel:
    """A kernel that is 'compiled' by being told of: first built, alone, then whatever comes after."""

    def __init__(self, name: str, parameters: int, told: list[str], error: Exception | None = None) -> None:
        self.name, self.params, self.told, self.error = name, [None] * parameters, told, error
        self.build = triton_private.in_turn(self.built)
        self.hit = False

    def built(self) -> None:
        self.told.append(f"{self.name} begins")
        time.sleep(0.01)
        if self.error:
            raise self.error
        self.told.append(f"{self.name} ends")

    def compile(self) -> str:
        if not self.hit:
            self.build()
        return self.name

    def is_gluon(self) -> bool:
        return self.name == "forward"

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        assert options == ({"sanitize_overflow": False} if self.is_gluon() else {})
        return triton_private.active_mode.get().submit(self.name, self.compile, lambda kernel: None)


class Made(NamedTuple):
    kernel: Kernel
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    monkeypatch.setattr(triton_private, "_compiler", None)


def names(told: list[str]) -> list[str]:
    """Of those that were built, if no two were at once."""
    found = [line.removesuffix(" begins") for line in told[::2]]
    assert told == [f"{name} {what}" for name in found for what in ("begins", "ends")]
    return found


def test_the_largest_are_built_first_alone_and_a_backward_before_its_forward():
    told: list[str] = []
    forward, repair = Kernel("forward", 9, told), Kernel("repair", 5, told)
    backward, start = Kernel("backward", 9, told), Kernel("start", 2, told)

    def ahead() -> list[Made]:
        assert told == []
        return [Made(x) for x in (forward, repair, start, backward)]

    assert compiled([Made(forward), Made(repair)], ahead) == ["forward", "repair"]
    assert compiled([Made(start), Made(backward)]) == ["start", "backward"]
    assert names(told) == ["backward", "forward", "repair", "start"]


def test_what_fails_or_is_in_the_cache_holds_nobody_up_and_lets_nobody_overtake():
    told: list[str] = []
    kernels = [Kernel(str(n), 9 - n, told) for n in range(6)]
    kernels[1].hit = True
    assert compiled([Made(x) for x in kernels]) == [x.name for x in kernels]
    assert names(told) == ["0", "2", "3", "4", "5"]

    wrong = Kernel("wrong", 3, told, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        compiled([Made(wrong), Made(Kernel("after", 2, told))])
    wrong.error = None
    assert compiled([Made(wrong)]) == ["wrong"]  # who asks again is not told of an old error


def test_an_error_on_the_way_leaves_nobody_waiting():
    told: list[str] = []
    kernel = Kernel("forward", 1, told)

    def ahead() -> list[Made]:
        raise RuntimeError("no backward")

    with pytest.raises(RuntimeError, match="no backward"):
        compiled([Made(kernel)], ahead)
    assert compiled([Made(kernel)]) == ["forward"]
    assert names(told) == ["forward"]


def test_threads_that_ask_for_the_same_share_it():
    told: list[str] = []
    kernels = [Kernel(str(n), 3, told) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compiled([Made(x) for x in kernels]), range(8)))
    assert found == [["0", "1", "2", "3"]] * 8
    assert sorted(names(told)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_again_if_it_was(collecting):
    seen: list[bool] = []
    kernel = Kernel("forward", 1, [])
    kernel.build = triton_private.in_turn(lambda: seen.append(gc.isenabled()))
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        compiled([Made(kernel)])
        assert seen == [False]
        assert gc.isenabled() == collecting
        kernel.build()  # by a thread that compiles for somebody else
        assert seen == [False, collecting]
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.slow
def test_the_key_of_triton_is_its_own():
    """In a process without ours, which takes it from what was written down at its installation, if anything was."""
    own = "from triton.runtime.cache import triton_key; print(triton_key())"
    ours = "from tilewise.kernels import triton_private as ours; ours.quick_key(); from triton.runtime import cache;"
    ours += "print(cache.triton_key(), cache.triton_key.__name__ == '<lambda>')"
    found = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for code in (own, ours)]
    assert found[1] == [*found[0], "True"]


@pytest.mark.parametrize("state", ["as installed", "younger", "longer", "not written down", "not hashed"])
def test_a_hash_that_was_written_down_is_taken_of_what_has_not_changed(state, tmp_path):
    file = tmp_path / "triton" / "_C" / "libtriton.so"
    record = tmp_path / "triton-3.6.0.dist-info" / "RECORD"
    for path in (file, record):
        path.parent.mkdir(parents=True)
    file.write_bytes(b"abc")
    digest = urlsafe_b64encode(sha256(b"abc").digest()).decode().rstrip("=")
    digest = "" if state == "not hashed" else f"sha256={digest}"
    name = "triton/_C/other.so" if state == "not written down" else "triton/_C/libtriton.so"
    record.write_text(f"triton/__init__.py,sha256=x,7\n{name},{digest},3\n")
    if state == "longer":
        file.write_bytes(b"abcd")
    os.utime(record, (1000, 1000))
    os.utime(file, (1001, 1001) if state == "younger" else (999, 999))
    assert triton_private.recorded(file) == (sha256(b"abc").hexdigest() if state == "as installed" else None)


KEYS = """
import sys
import triton
from tilewise.kernels import triton_private
from tilewise.kernels.hopper import launch
from tilewise.kernels.portable import kv_launch
triton_private.same_key()
modules = [module for name, module in sys.modules.items() if name.startswith("tilewise.kernels")]
every = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, triton.JITFunction)}
named = sorted((f"{x.fn.__module__}.{x.fn.__qualname__}", x) for x in every.values())
for _, x in named[:: int(sys.argv[1])]:
    x.cache_key
for name, x in named:
    print(name, x.cache_key)
    read = {(n, str(value)) for (n, _), (value, _) in x.used_global_vals.items() if "constexpr" in str(type(value))}
    assert len(read) == len({n for n, _ in read}), "two constants of one name, whose order is that of addresses"
"""


def test_a_kernel_has_the_same_key_whichever_came_before_it():
    """What one process has compiled, others find."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    found = [
        subprocess.check_output([sys.executable, "-c", KEYS, step], text=True, env=environment) for step in ("1", "-1")
    ]
    assert len(found[0].splitlines()) > 100
    assert found[0] == found[1]


def test_kernels_are_read_as_they_are_written() -> None:
    """Every function of every module of kernels, line for line; and of others, as inspect has it."""
    seen = 0
    for module in modules():
        for x in vars(module).values():
            function = getattr(x, "fn", None)
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                assert triton_private.lines_of(function) == inspect.getsourcelines(function), function.__qualname__
                seen += 1
    assert seen > 150
    assert triton_private.lines_of(modules) == inspect.getsourcelines(modules)


def modules() -> list[Any]:
    names = (info.name for info in pkgutil.walk_packages(tilewise.kernels.__path__, "tilewise.kernels."))
    return [importlib.import_module(name) for name in names]
