"""Compiles a kernel for any target without a GPU, and reads its registers, spills, shared memory and instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.backends.common.offline import binary_for


@dataclass(frozen=True)
class Compiled:
    registers: int
    spills: int
    shared: int
    warps: int
    instructions: Counter[str]
    warnings: list[str] = field(default_factory=list)
    sass: str = field(default="", repr=False)
    asm: Any = field(default=None, repr=False)


def compile_for(arch: int | str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    """The kernel compiled as by a launch on `arch`: 90 (sm_90), "gfx942". Tensors may be on any device."""
    binary = binary_for(arch, kernel, args, options)
    return inspect(binary, arch) if isinstance(arch, int) else inspect_hip(binary)


def inspect_hip(binary: Any) -> Compiled:
    """Resources from the assembly text of an AMD kernel. `spills` is in bytes of one thread."""
    text = binary.asm["amdgcn"]
    counts = {name: int(_search(rf"\.{name}:\s+(\d+)", text)) for name in ("vgpr_count", "vgpr_spill_count")}
    return Compiled(
        registers=counts["vgpr_count"],
        spills=4 * counts["vgpr_spill_count"],
        shared=binary.metadata.shared,
        warps=binary.metadata.num_warps,
        instructions=Counter(re.findall(r"^\s+([a-z]\w+)", text, re.MULTILINE)),
        asm=binary.asm,
    )


def inspect(binary: Any, capability: int) -> Compiled:
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(binary.asm["ptx"])
        log = _tool(get_ptxas(capability).path, "-v", f"--gpu-name={name}", str(ptx), "-o", str(cubin))
        sass = _tool(knobs.nvidia.nvdisasm.path, "-c", str(cubin))
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)", sass)
    return Compiled(
        registers=int(_search(r"Used (\d+) registers", log)),
        spills=int(_search(r"(\d+) bytes spill stores", log)) + int(_search(r"(\d+) bytes spill loads", log)),
        shared=binary.metadata.shared,
        warps=binary.metadata.num_warps,
        instructions=Counter(opcodes),
        warnings=[line for line in log.splitlines() if "Potential Performance Loss" in line],
        sass=sass,
        asm=binary.asm,
    )


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _search(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the assembler's log has no {pattern!r}:\n{text}")
    return found.group(1)
