"""The Hopper kernels where their results are parts of a sum: float32, straight from the registers; and where mods go by
the place of a call in a larger one. In the emulator."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.tilewise_lab.emulator.test_terms import backward, forward
from tilewise.mods.builtin import alibi
from tilewise.request import BackwardInputs, Request, Spec

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")


def tensors(d: int, dv: int, n: int = 100) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(d + dv)
    shapes = ((2, d), (1, d), (1, dv), (2, dv))
    q, k, v, dout = (torch.randn(1, n, *shape, dtype=torch.bfloat16) for shape in shapes)
    return q, k, v, dout


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 40), (192, 192), (256, 256)])
def test_results_are_not_rounded(d, dv):
    q, k, v, dout = tensors(d, dv)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attention(*leaves, causal=True, scale=d**-0.5, return_lse=True)
    exact = (out.detach(), *torch.autograd.grad((out * dout.double()).sum(), leaves))
    bwd_inputs = BackwardInputs(out.detach().bfloat16(), lse.detach().float(), dout, None)
    errors = []
    for partial in (False, True):
        call = Request(q, k, v, Spec(d**-0.5, None, 0, partial=partial))
        found = (forward(call)[0], *backward(call, bwd_inputs))
        assert {x.dtype for x in found} == {torch.float32 if partial else torch.bfloat16}
        errors.append([float((x.double() - y).square().mean()) for x, y in zip(found, exact, strict=True)])
    assert all(part < rounded for rounded, part in zip(*errors, strict=True))


def test_a_call_knows_its_place():
    """Keys 40 to 100 and queries 60 to 100 of a call with ALiBi, alone."""
    q, k, v, _ = tensors(64, 64)
    mod = alibi(torch.tensor([0.3, 0.1]))
    words = {"score_mod": mod.key, "score_numbers": mod.numbers, "score_tensors": 1}
    offsets = torch.tensor([[0, 0, 60, 40, 1, 100, 100]], dtype=torch.int32)
    part = Request(
        q[:, 60:],
        k[:, 40:],
        v[:, 40:],
        Spec(0.125, None, 0, **words),
        score=mod.tensors,
        position_offsets=offsets,
    )
    expected = tilewise.attention(q[:, 60:], k[:, 40:], v[:, 40:], causal=True, score_mod=mod, scale=0.125)
    # the distance is the same there, since both count from the end
    torch.testing.assert_close(forward(part)[0].float(), expected.float(), atol=2e-2, rtol=2e-2)
    moved = part._replace(position_offsets=offsets + torch.tensor([0, 0, 0, 20, 0, 0, 0], dtype=torch.int32))
    assert not torch.allclose(forward(moved)[0].float(), expected.float(), atol=2e-2)
