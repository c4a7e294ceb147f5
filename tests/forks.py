"""New processes that need not import torch: each is forked from one that has imported torch and tilewise, and nothing
has run in that one. For tests that need a process without the state, the Triton or the variables of their own.

Triton is not imported yet: it reads TRITON_INTERPRET when it is, so a process may set it. What torch itself reads at
its import, and the seeds of random numbers and of Python's hashes, are those of the first process.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(
    *arguments: str,
    input: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python as `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)` would: arguments are
    -c SCRIPT ... or -m MODULE ...."""
    request = pickle.dumps((arguments, dict(environment() if env is None else env), str(cwd or Path.cwd())))
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input.encode())
        given.seek(0)
        with theirs:
            fds = [given.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(server(), [len(request).to_bytes(8, "big")], fds)
            server().sendall(request)
        ours.settimeout(timeout)
        status = ours.recv(1)  # empty: it was killed
        out.seek(0)
        err.seek(0)
        code = status[0] if status else -1
        return subprocess.CompletedProcess(arguments, code, out.read().decode(), err.read().decode())


def environment(triton: str = "") -> dict[str, str]:
    """The variables of this process without the interpreter, with the Triton in a folder or the installed one."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = find_spec("tilewise")
    assert found is not None
    sources = Path(str(found.origin)).parents[1]  # this process's, which may be a changed copy (course/mutations.py)
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (triton, str(sources), str(ROOT))))}


@cache
def server() -> socket.socket:
    """The socket of the process that forks; it ends when this one closes the socket, at the latest at its end."""
    ours, theirs = socket.socketpair()
    script = f"from tests.forks import serve; serve({theirs.fileno()})"
    with theirs:
        subprocess.Popen([sys.executable, "-c", script], pass_fds=[theirs.fileno()], env=environment(), cwd=ROOT)
    return ours


def serve(fd: int) -> None:
    import tilewise  # noqa: F401 - and torch: this is what the others need not import

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=fd) as requests:
        while True:
            size, fds, *_ = socket.recv_fds(requests, 8, 4)
            if not size:
                return
            request = b""
            while len(request) < int.from_bytes(size, "big"):
                request += requests.recv(int.from_bytes(size, "big") - len(request))
            if os.fork() == 0:
                requests.close()
                run(*pickle.loads(request), fds)
            for one in fds:
                os.close(one)


def run(arguments: Sequence[str], env: Mapping[str, str], cwd: str, fds: Sequence[int]) -> None:
    """In the forked process: does what Python does at its start, then the work, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, one in enumerate(fds[:3]):
        os.dup2(one, place)
        os.close(one)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [x for x in env.get("PYTHONPATH", "").split(os.pathsep) if x and x not in sys.path]
    kind, what, *rest = arguments
    code = 1
    try:
        if kind == "-m":
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [kind, *rest]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(what, "<string>", "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(fds[3], bytes([code & 255]))
    os._exit(code)
