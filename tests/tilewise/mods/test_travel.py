"""Mods and block masks in other processes: pickled, copied, saved, exported, sent to workers; and nothing but data."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tilewise
from tests.forks import python
from tilewise import AttentionError, mods
from tilewise.mods import text
from tilewise.mods.blocks import restored_block_mask
from tilewise.mods.program import PROGRAMS, restored_mod

SRC = Path(tilewise.__file__).parents[1]


def local_mod() -> mods.Mod:
    """Of a function that no other process could import."""

    @tilewise.score_mod
    def bent(score, b, h, q_idx, kv_idx, table, slope):
        return torch.where(q_idx >= kv_idx, score * slope, score + table[h] * (kv_idx - q_idx) - 1e-3)

    return bent(torch.tensor([0.5, 0.25]), 1.5)


def local_mask() -> mods.BlockMask:
    ids = torch.arange(64) // 24
    return tilewise.block_mask(mods.document(ids=ids), 64, 64, block=(16, 32), causal=True)


def saved(x: object, weights_only: bool) -> object:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": lambda x: saved(x, False),
    "weights_only": lambda x: saved(x, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back(way: str) -> None:
    q = torch.randn(1, 64, 2, 8)
    mod, mask = local_mod(), local_mask()
    expected = tilewise.attention(q, q, q, causal=True, score_mod=mod, mask_mod=mask)
    mod, mask = WAYS[way]((mod, mask))
    assert torch.equal(tilewise.attention(q, q, q, causal=True, score_mod=mod, mask_mod=mask), expected)
    assert mod.name == "bent"


def test_a_module_that_holds_one_is_copied() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mod, self.unbound = local_mod(), mods.alibi

    copied = copy.deepcopy(Holder())
    assert copied.mod.key == local_mod().key
    assert copied.unbound is mods.alibi
    assert pickle.loads(pickle.dumps(mods.alibi)) is mods.alibi


def in_a_fresh_process(script: str, *arguments: str) -> str:
    done = python("-c", textwrap.dedent(script), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fresh_process_that_has_not_defined_it(tmp_path: Path) -> None:
    file = tmp_path / "mod.pickle"
    mod = local_mod()
    file.write_bytes(pickle.dumps(mod))
    script = """
        import pickle, sys, torch
        print(pickle.load(open(sys.argv[1], "rb"))(torch.ones(1), 0, 1, 2, 3).item())
    """
    assert float(in_a_fresh_process(script, str(file))) == mod(torch.ones(1), 0, 1, 2, 3).item()


def test_what_is_pickled_names_only_ours() -> None:
    """No module of the sender, no source, nothing to execute."""
    named = {arg for op, arg, _ in pickletools.genops(pickle.dumps(local_mod(), 0)) if op.name == "GLOBAL"}
    ours = {name for name in named if not name.startswith(("torch", "collections", "_codecs"))}
    assert ours == {"tilewise.mods.program restored_mod"}


class Bent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mod, self.mask = local_mod(), local_mask()

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, q, q, causal=True, softcap=3.0, score_mod=self.mod, mask_mod=self.mask)


def test_exported_and_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    module, q = Bent(), torch.randn(1, 64, 2, 8)
    torch.export.save(torch.export.export(module, (q,), strict=False), tmp_path / "bent.pt2")
    torch.save((q, module(q)), tmp_path / "expected.pt")
    script = """
        import sys, torch, tilewise
        q, expected = torch.load(sys.argv[1] + "/expected.pt")
        print(torch.equal(torch.export.load(sys.argv[1] + "/bent.pt2").module()(q), expected))
    """
    assert in_a_fresh_process(script, str(tmp_path)) == "True"


class Masks(Dataset):
    def __init__(self) -> None:
        self.mod, self.mask = local_mod(), local_mask()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, n: int) -> tuple[mods.Mod, mods.BlockMask]:
        return self.mod, self.mask


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(context: str) -> None:
    """Sent there with the dataset, and back with what it returns."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    loader = DataLoader(Masks(), batch_size=None, num_workers=1, multiprocessing_context=context)
    for mod, mask in loader:
        assert mod.key == local_mod().key
        assert torch.equal(mask.tiles, local_mask().tiles)


SOFTCAP = mods.softcap(2.0).key


@pytest.mark.parametrize("mod", [mods.softcap(2.0), mods.alibi(torch.ones(2)), mods.strided_sparse(3), local_mod()])
def test_text_is_read_as_it_was_written(mod: mods.Mod) -> None:
    parts = text.read(mod.key)
    assert text.write(parts) == mod.key
    assert parts.root is mod.program.root


@pytest.mark.parametrize(
    "key",
    [
        "",
        "softcap",
        SOFTCAP.replace("tanh", "system"),
        SOFTCAP.replace("tanh", "__import__"),
        SOFTCAP.replace("div 1 0", "div 1 9"),
        SOFTCAP.replace("div 1 0", "div 1 -1"),
        SOFTCAP.replace("number:0", "number:1"),
        SOFTCAP.replace("number:0", "index:q"),
        SOFTCAP.replace("number:0", "index:i"),
        SOFTCAP.replace("number:0", "load:0:float"),
        SOFTCAP.replace("const:1.0", "const:os"),
        SOFTCAP.replace("const:1.0", "const:1.00"),
        SOFTCAP.replace("const:1.0", f"const:{2**63}"),
        SOFTCAP.replace("tanh 2", "tanh 2 2"),
        SOFTCAP.replace("4 7", "4 7 7"),
        SOFTCAP.replace("4 7", ""),
        "tilewise1;;0;0" + ";score" * 5000,
        "tilewise2" + SOFTCAP[9:],
    ],
)
def test_text_that_is_no_program_is_refused(key: str) -> None:
    with pytest.raises(AttentionError, match="a program"):
        PROGRAMS[key]
    assert key not in PROGRAMS


def test_deep_programs() -> None:
    """As deep as they are allowed to be: no recursion limit is met, when read or when evaluated."""
    chain = "".join(f";exp {n}" for n in range(4000))
    program = PROGRAMS[f"tilewise1;;0;4000;score{chain}"]
    assert program.derivative is not None
    with pytest.raises(AttentionError, match="a program"):
        PROGRAMS[f"tilewise1;;0;5000;score{''.join(f';exp {n}' for n in range(5000))}"]


def test_saved_parts_must_fit() -> None:
    kind, key, tensors, numbers, name = local_mod()
    for wrong in (
        ("mask", key, tensors, numbers, name),
        (kind, key, (torch.ones(2, 2),), numbers, name),
        (kind, key, (torch.ones(2).int(),), numbers, name),
        (kind, key, (), numbers, name),
        (kind, key, tensors, (), name),
        (kind, key, tensors, ("1.5",), name),
        (kind, key + ";os", tensors, numbers, name),
    ):
        with pytest.raises(AttentionError):
            restored_mod(*wrong)


@pytest.mark.parametrize("place", range(4))
def test_saved_lists_must_stay_inside(place: int) -> None:
    mask = local_mask()
    for value in (-1, 4 * 64, 4):
        lists = [x.clone() for x in mask.lists]
        lists[place][-1] = value
        with pytest.raises(AttentionError, match="a saved block mask"):
            restored_block_mask(*mask._replace(lists=tuple(lists)))
