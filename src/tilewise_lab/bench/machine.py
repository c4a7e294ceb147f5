"""Where and with what a result was measured. Names of people's machines and folders stay out of it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise_lab.bench.measure import nvidia_smi


def facts(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": name(device),
        "kind": device.type,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "tilewise": tilewise.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": distribution("triton"),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
        "driver": asked(device, "driver_version") if cuda else None,
        "power limit, W": asked(device, "power.limit") if cuda else None,
        "clock limit, MHz": asked(device, "clocks.max.sm") if cuda else None,
        "threads": torch.get_num_threads(),
    }


def name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()} CPU, {torch.get_num_threads()} threads"


def processor() -> str:
    """Linux tells x86's name in a file and Arm's through lscpu; elsewhere the architecture must do."""
    try:
        for line in subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines():
            if line.startswith("Model name:"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.machine()


def slug(device: str) -> str:
    """
    >>> slug("NVIDIA H200"), slug("Neoverse-N1 CPU, 2 threads")
    ('nvidia-h200', 'neoverse-n1-cpu-2-threads')
    """
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return "-".join(words)


def distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of a checkout, marked where files differ from it; TILEWISE_COMMIT tells it for a bare copy of one."""
    here = Path(__file__).parent
    told = os.environ.get("TILEWISE_COMMIT")
    if told:
        return told

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("rev-parse", "--is-inside-work-tree") != "true" or not git("ls-files", str(Path(__file__))):
            return None
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def asked(device: torch.device, field: str) -> str | None:
    process = nvidia_smi(device, f"--query-gpu={field}")
    return (process.communicate()[0].strip() or None) if process else None
