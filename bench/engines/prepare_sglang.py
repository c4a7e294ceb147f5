"""Packs SGLang 0.5.17 and what it imports into one archive, for a machine without network.

    python bench/engines/prepare_sglang.py FOLDER

FOLDER/sglang_site.tar.xz is for Python 3.12 on x86_64 with torch 2.11 (CUDA 13), torchvision and triton 3.6, which it
does not contain. It has transformers 5.12.1, which SGLang 0.5.17 pins: with 5.17 importing SGLang fails. SGLang's files
are unchanged. Of sglang-kernel only the operators for sm_90 are packed, without machine code for other GPUs and without
FlashAttention-3 (1.1 GB). IPython, xgrammar and FlashInfer are stubs: SGLang imports their names, and nothing here
calls them. SGLANG_IS_FLASHINFER_AVAILABLE=false has to be set.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SGLANG, KERNEL = "sglang==0.5.17", "sglang_kernel==0.4.5"  # the newest with torch 2.11, and the kernels that it pins
PACKAGES = """
aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 annotated_doc==0.0.6 annotated_types==0.8.0 anyio==4.16.0
apache_tvm_ffi==0.1.11 attrs==26.1.0 certifi==2026.10.18 charset_normalizer==3.5.2 click==8.5.1
compressed_tensors==0.20.0 dill==0.4.1 distro==1.9.0 einops==0.8.2 fastapi==0.136.3 frozenlist==1.8.0 gguf==0.19.0
h11==0.16.0 httpcore==1.0.9 httpx==0.28.1 idna==3.20 jiter==0.19.0 loguru==0.7.3 msgspec==0.22.0 multidict==7.2.1
nvidia_ml_py==13.615.71 openai==2.6.1 orjson==3.13.0 partial_json_parser==0.2.1.1.post7 pillow==13.0.0 propcache==0.5.4
psutil==7.2.2 pybase64==1.5.1 pydantic==2.12.5 pydantic_core==2.41.5 python_multipart==0.0.33 pyzmq==27.3.0
requests==2.34.2 sentencepiece==0.2.3 setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0 tokenizers==0.22.2
transformers==5.12.1 typing_inspection==0.4.5 urllib3==2.8.0 uvicorn==0.54.0 uvloop==0.23.0 xxhash==4.1.0 yarl==1.25.1
"""
LEFT_OUT = (  # of SGLang: servers in Rust, image and video generation, benchmarks, sources of kernels for other models
    ".so", "sglang/multimodal_gen/", "sglang/benchmark/", "sglang/test/", "sglang/eval/",
    "sglang/kernels/jit/csrc/attention/", "sglang/kernels/jit/csrc/moe/", "sglang/kernels/jit/benchmark/",
    "sglang/kernels/ops/moe/trtllm_lora_temp/data/",
)  # fmt: skip
ANY_NAME = """
from pydantic import BaseModel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().setdefault(name, type(name, (BaseModel,), {}))
"""
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": ANY_NAME,
    "flashinfer/__init__.py": ANY_NAME,
    "flashinfer/sampling.py": ANY_NAME,
    "xgrammar/__init__.py": '__version__ = "0.2.1"\n' + ANY_NAME,
    "xgrammar/structural_tag.py": ANY_NAME,
}
PLATFORMS = (5, 12, 17, 24, 26, 27, 28, 31, 34)  # versions of glibc
LIMIT = 50_000_000


def wheel(package: str, folder: Path, arch: str) -> Path:
    """The wheel of name==version, downloaded if it is not in the folder."""
    name, _, version = package.partition("==")
    pattern = f"{name}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        places = [f"manylinux_2_{n}_{arch}" for n in PLATFORMS] + [f"manylinux2014_{arch}", f"manylinux1_{arch}", "any"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        command += ["--python-version", "3.12", "--implementation", "cp"]
        command += [x for abi in ("cp312", "abi3", "none") for x in ("--abi", abi)]
        subprocess.run([*command, *(x for p in places for x in ("--platform", p)), package], check=True)
    return next(folder.glob(pattern))


def unpack(path: Path, site: Path, without: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not any(name.startswith(x) if x.endswith("/") else name.endswith(x) for x in without):
                archive.extract(name, site)


def fatbins(data: bytearray) -> Iterator[list[tuple[int, int, int, int]]]:
    """Of every fat binary in a shared object: (kind, architecture, offset, size) of its entries. Kind 1 is PTX, 2 is
    machine code."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    base = rows[names][4]
    for row in rows:
        if data[base + row[0] : data.index(b"\0", base + row[0])] != b".nv_fatbin":
            continue
        at, stop = row[4], row[4] + row[5]
        while (at := data.find(struct.pack("<I", 0xBA55ED50), at, stop)) >= 0:
            _, version, head, length = struct.unpack_from("<IHHQ", data, at)
            if version != 1 or head != 16:
                at += 4
                continue
            entries, x, at = [], at + head, at + head + length
            while x < at:
                kind, _, head, size = struct.unpack_from("<HHIQ", data, x)
                entries.append((kind, struct.unpack_from("<I", data, x + 28)[0], x + head, size))
                x += head + size
            yield entries


def prune(path: Path, arch: int = 90) -> None:
    """Overwrites device code that a GPU of this architecture does not use with zeros. Offsets and headers stay."""
    data, kept, gone = bytearray(path.read_bytes()), Counter[str](), Counter[str]()
    for entries in fatbins(data):
        native = [e for e in entries if e[0] == 2 and e[1] == arch]
        keep = native or sorted((e for e in entries if e[0] == 1 and e[1] <= arch), key=lambda e: e[1])[-1:]
        for e in entries:
            (kept if e in keep else gone)[f"{'ptx' if e[0] == 1 else 'sm'}_{e[1]}"] += e[3]
            if e not in keep:
                data[e[2] : e[2] + e[3]] = bytes(e[3])
    path.write_bytes(data)
    print(f"{path.name}: kept {dict(kept)}, overwrote {dict(gone)} (bytes)")


def fill(site: Path, wheels: Path, arch: str) -> None:
    for package in PACKAGES.split():
        unpack(wheel(package, wheels, arch), site)
    unpack(wheel(SGLANG, wheels, "x86_64"), site, LEFT_OUT)
    if arch == "x86_64":  # elsewhere the pack is for tests without a GPU
        others = ("flash_ops.abi3.so", "flashmla_ops.abi3.so", "spatial_ops.abi3.so", "sgl_kernel/sm100/")
        infllm = "infllm_ops.cpython-310-x86_64-linux-gnu.so"
        unpack(wheel(KERNEL, wheels, arch), site, (*others, infllm, "triton_kernels/"))
        prune(site / "sgl_kernel/sm90/common_ops.abi3.so")
    for name, text in STUBS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    for path in [*site.rglob("*.pyi"), *site.rglob("*.pyx"), *site.rglob("*.pxd")]:
        path.unlink()
    for path in [*site.glob("*.data"), *site.glob("bin")]:
        shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="x86_64", help="aarch64: for tests without a GPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "sglang_packing")
    given = parser.parse_args()
    wheels, site = given.work / given.arch, given.work / f"site_{given.arch}"
    wheels.mkdir(parents=True, exist_ok=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    fill(site, wheels, given.arch)
    out = given.folder / "sglang_site.tar.xz"
    with lzma.open(out, "wb", preset=6) as x, tarfile.open(fileobj=x, mode="w") as tar:
        tar.add(site, arcname=".")
    unpacked = sum(p.stat().st_size for p in site.rglob("*") if p.is_file())
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; unpacked ({site}) {unpacked / 1e6:.1f} MB")
    if out.stat().st_size > LIMIT:
        sys.exit(f"larger than {LIMIT / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
