"""The `tilewise` command: a table of subcommands, each imported only when it is called.

A subcommand is a module with two functions:

    configure(parser)    adds its arguments to an argparse parser
    run(options) -> int  does the work and returns the exit status; an AttentionError is said in one line, and is 2;
                         so is a file that cannot be read or written
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

CALLED = os.environ.get("TILEWISE_CALLED", "tilewise")  # what was typed: `./run`, from a checkout
# What `pip install 'tilewise[cli]'` and `'tilewise[docs]'` bring.
EXTRAS = {"rich": "cli"} | dict.fromkeys(("sphinx", "furo", "myst_parser", "sphinx_copybutton", "docutils"), "docs")


@dataclass(frozen=True)
class Command:
    module: str
    summary: str


COMMANDS = {
    "demo": Command("tilewise_lab.demo", "check and time attention on this machine, and draw the results"),
    "selftest": Command(
        "tilewise_lab.selftest", "two minutes: calls checked against float64, speed beside torch's, a report to paste"
    ),
    "bench": Command("tilewise_lab.bench", "check attention, then time it against other libraries, in turns"),
    "explore": Command("tilewise_lab.explore", "an interactive page on how attention is computed, live or as a file"),
    "explain": Command(
        "tilewise_lab.explain.command", "what a call costs on a GPU, what limits it, what would make it faster"
    ),
    "plan": Command("tilewise_lab.plan", "compare ways to divide a long sequence among GPUs, and advise one"),
    "warm": Command("tilewise_lab.warm", "compile a model's kernels before its first step, with or without its GPU"),
    "fuzz": Command("tilewise_lab.fuzz.command", "random calls: each must give a right answer, or an AttentionError"),
    "docs": Command(
        "tilewise_lab.docs", "build the documentation: guides, reference, course and results, in English and Chinese"
    ),
    "show-mask": Command("tilewise_lab.show_mask", "draw a mask and its tiles: empty, partial, full"),
    "trace": Command("tilewise_lab.trace.command", "show softmax, attention or autograd step by step"),
    "learn": Command("tilewise_lab.learn.command", "a course on FlashAttention: lessons that run, and exercises"),
}


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in COMMANDS:
        return _top_level(name, rest)
    command = COMMANDS[name]
    from tilewise.errors import AttentionError  # imports torch, which takes seconds; --help and --version do without

    try:
        module = import_module(command.module)
        parser = argparse.ArgumentParser(prog=f"{CALLED} {name}", description=_sentence(command.summary))
        module.configure(parser)
        return int(module.run(parser.parse_args(rest)))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"{CALLED} {name} needs {error.name}: pip install 'tilewise[{extra}]'", file=sys.stderr)
        return 2
    except AttentionError as error:
        print(f"{CALLED} {name}: {error}", file=sys.stderr)
        return 2
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        if error.filename is None:
            raise
        print(f"{CALLED} {name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _top_level(word: str, rest: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog=CALLED,
        usage=f"{CALLED} <command> [options]",
        description="Exact attention for PyTorch, computed tile by tile.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
        + f"\n\n`{CALLED} <command> --help` says more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewise {_version()}")
    if not word.startswith("-"):
        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
        parser.error(f"no command {word!r}; {hint}")
    parser.parse_args([word, *rest])
    return 0


def _version() -> str:
    """`tilewise.__version__`, without importing the library."""
    package = importlib.util.find_spec("tilewise")
    assert package is not None
    assert package.origin is not None
    return str(runpy.run_path(str(Path(package.origin).with_name("version.py")))["__version__"])


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
