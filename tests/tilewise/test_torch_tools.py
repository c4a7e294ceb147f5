"""Tools of torch that meet the op: FLOP counters, selective checkpoints, export, profilers; and nested tensors."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import tilewise


def qkv(*heads: int, n: int = 6) -> list[Tensor]:
    return [torch.randn(2, n, h, 8, requires_grad=True) for h in heads or (4, 4, 4)]


def test_flops_are_those_of_torchs_own() -> None:
    q, k, v = qkv(4, 2, 2)
    with FlopCounterMode(display=False) as counter:
        out = tilewise.attention(q, k, v, causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    shapes = [(2, 4, 6, 8)] * 3  # as torch counts them: keys repeated for their group, every pair
    assert forward == sdpa_flop_count(*shapes)
    assert counter.get_total_flops() - forward == sdpa_backward_flop_count(shapes[0], *shapes)


def test_flops_of_packed_sequences() -> None:
    x = torch.randn(10, 4, 8)
    cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    counter = FlopCounterMode(display=False)
    with counter:
        tilewise.attention_varlen(x, x, x, cu, cu)
    assert counter.get_total_flops() == 2 * 4 * (3 * 3 + 7 * 7) * 16


def test_flops_over_a_cache() -> None:
    """Keys that are in it, and the new ones; packed queries too."""
    k, v = torch.randn(2, 2, 16, 2, 8)
    lengths, cu = torch.tensor([5, 9], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    q, new = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 2, 8)
    with FlopCounterMode(display=False) as counter:
        tilewise.attention_kv(q, k, v, lengths, k_new=new, v_new=new)
        dense = counter.get_total_flops()
        tilewise.attention_kv(q.flatten(0, 1), k, v, lengths, cu_seqlens_q=cu)
    assert dense == 2 * 4 * 2 * (7 + 11) * 16
    assert counter.get_total_flops() - dense == 2 * 4 * (3 * 5 + 1 * 9) * 16


@pytest.mark.parametrize("kind", [FakeTensorMode, partial(torch.device, "meta")], ids=["fake", "meta"])
def test_flops_of_tensors_without_numbers(kind: Any) -> None:
    """Lengths that cannot be read are taken for equal; a cache for full."""
    with kind():
        x, offsets = torch.empty(10, 4, 8), torch.empty(3, dtype=torch.int32)
        q, k, lengths = torch.empty(2, 1, 4, 8), torch.empty(2, 16, 2, 8), torch.empty(2, dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            tilewise.attention_varlen(x, x, x, offsets, offsets)
            packed = counter.get_total_flops()
            tilewise.attention_kv(q, k, k, lengths)
            full = counter.get_total_flops()
            tilewise.attention_kv(q, k, k, lengths, token_table=torch.empty(2, 5, dtype=torch.int32))
    assert packed == 2 * 4 * 2 * 5 * 5 * 16
    assert full - packed == 2 * 4 * 2 * 16 * 16
    assert counter.get_total_flops() - full == 2 * 4 * 2 * 5 * 16


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpoints(save: bool) -> None:
    """A policy that keeps the op's results computes it once, another twice."""
    leaves = qkv()
    op = torch.ops.tilewise.forward.default

    def policy(ctx: Any, which: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if save and which is op else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    with FlopCounterMode(display=False) as counter:
        out = checkpoint(
            lambda *x: tilewise.attention(*x, causal=True).sin(), *leaves, use_reentrant=False, context_fn=context
        )
        grads = torch.autograd.grad(out.sum(), leaves)
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.tilewise.forward] == (1 if save else 2) * 2 * 2 * 4 * 36 * 16
    assert_close(grads, torch.autograd.grad(tilewise.attention(*leaves, causal=True).sin().sum(), leaves))


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, causal=True, softcap=5.0)

    inputs = tuple(x.detach() for x in qkv())
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(Layer(), inputs, dynamic_shapes=({1: length},) * 3)
    assert "tilewise.forward" in str(exported.graph)
    for n in (6, 9):
        given = [x.detach() for x in qkv(n=n)]
        assert_close(exported.module()(*given), Layer()(*given))


def test_profiles_name_it() -> None:
    leaves = qkv()
    with torch.profiler.profile() as profile:
        tilewise.attention(*leaves).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert (counts["tilewise::forward"], counts["tilewise::backward"]) == (1, 1)
    with torch.profiler.profile() as profile:
        out, lse = tilewise.attention(*leaves, return_lse=True)
        (out.sum() + lse.sum()).backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert (counts["tilewise::forward"], counts["tilewise::backward"]) == (1, 1)


def jagged(lengths: tuple[int, ...], heads: int, like: Any = None) -> Any:
    parts = [torch.randn(n, heads, 8) for n in lengths]
    made = torch.nested.nested_tensor(parts, layout=torch.jagged)
    if like is not None:
        made = torch.nested.nested_tensor_from_jagged(made.values(), like.offsets())
    return made.detach().requires_grad_()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_nested_tensors(layout: str) -> None:
    q = jagged((3, 5, 1), 4)
    k = jagged((3, 5, 1), 2, q)
    v = jagged((3, 5, 1), 2, q)
    given = [x if layout == "bshd" else x.transpose(1, 2) for x in (q, k, v)]
    out, lse = tilewise.attention(*given, causal=True, return_lse=True, layout=layout)
    assert out.is_nested
    assert out.shape == given[0].shape
    cu = q.offsets().int()
    values = [x.values().detach().requires_grad_() for x in (q, k, v)]
    expected, logs = tilewise.attention_varlen(*values, cu, cu, causal=True, return_lse=True)
    flat = out if layout == "bshd" else out.transpose(1, 2)
    assert_close(flat.values(), expected)
    assert_close(lse.transpose(1, 2).values(), logs.mT)
    flat.values().sin().sum().backward()
    expected.sin().sum().backward()
    for x, y in zip((q, k, v), values, strict=True):
        assert_close(x.grad.values(), y.grad)


def test_check_of_nested_tensors() -> None:
    q, many = jagged((3, 5, 1), 4), jagged((3, 5), 64)
    tilewise.check(q, q, q, causal=True)
    tilewise.check(*[q.transpose(1, 2)] * 3, layout="bhsd")
    tilewise.check(many, many, many)
    with pytest.raises(tilewise.AttentionError, match="window"):
        tilewise.check(q, q, q, window=(-1, 0))


def test_nested_keys_of_other_lengths() -> None:
    q, k = jagged((3, 5), 4), jagged((7, 5), 4)
    v = jagged((7, 5), 4, k)
    out = tilewise.attention(q, k, v, causal=True)
    for a, b, c, d in zip(out.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        assert_close(a, tilewise.attention(b[None], c[None], d[None], causal=True)[0])


def test_what_is_not_for_nested_tensors() -> None:
    q = jagged((3, 5), 4)
    dense = torch.randn(2, 5, 4, 8)
    strided = torch.nested.nested_tensor([torch.randn(3, 4, 8)])
    flat = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    for given, words in (((q, dense, dense), "of q, k and v"), ((strided,) * 3, "jagged"), ((flat,) * 3, "heads")):
        with pytest.raises(tilewise.AttentionError, match=words):
            tilewise.attention(*given)


LOADED = """
import sys, torch, tilewise
import torch._inductor.codecache  # of which the loader of torch 2.10 thinks that somebody has imported it
packaged = torch._inductor.aoti_load_package(sys.argv[1])
q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
torch.testing.assert_close(packaged(q, k, v), 2 * tilewise.attention(q, k, v, causal=True, softcap=20.0))
"""


@pytest.mark.slow
def test_aotinductor_packages_a_module(tmp_path: Path) -> None:
    """Compiled ahead of time, and loaded by a program that imports tilewise."""

    class Twice(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = tilewise.attention(q, k, v, causal=True, softcap=20.0)
            return 2 * out

    with torch.no_grad():
        exported = torch.export.export(Twice(), tuple(torch.randn(2, 16, 4, 8) for _ in range(3)))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "twice.pt2"))
    subprocess.run([sys.executable, "-c", LOADED, package], check=True)
