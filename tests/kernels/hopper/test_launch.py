"""What the launcher makes of a call, on tensors that lie on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import config, dispatch
from tilewise.spec import Spec, Terms

pytest.importorskip("triton")


def launches(q: Any, after: int | None = None) -> tuple[Any, list[Any]]:
    from tilewise.kernels.hopper.launch import forward_launches, new_state

    out, lse, state = (
        torch.empty_like(q),
        torch.empty(q.shape[0], q.shape[2], q.shape[1]),
        new_state(torch.device("cpu")),
    )
    k, v = torch.empty_like(q), torch.empty_like(q)
    tensors = (q, k, v, None, None, out, lse, *state)
    return tensors, forward_launches(q, k, v, out, lse, None, None, Spec(0.1, None, after), state, 132)


def test_a_second_launch_repairs_only_where_rows_see_different_keys():
    q = torch.empty(2, 256, 4, 128, dtype=torch.bfloat16)
    assert len(launches(q)[1]) == 1
    assert len(launches(q, after=0)[1]) == 2


def test_a_replayed_descriptor_points_at_the_new_tensor():
    from tilewise.kernels import replay

    seen = []

    class Binary:
        def __getitem__(self, grid):
            return lambda *args: seen.append(args)

    q = torch.empty(2, 256, 4, 128, dtype=torch.bfloat16)
    tensors, (made,) = launches(q)
    step = replay._step(made, Binary(), tensors)
    assert not [x for x in step.args if isinstance(x, torch.Tensor) or hasattr(x, "base")]
    others, (other,) = launches(torch.empty_like(q))
    step(others)
    for ours, theirs in zip(seen[0][:4], other.args[:4], strict=True):
        assert ours.base is theirs.base
        assert (ours.shape, ours.strides, ours.block_shape) == (theirs.shape, theirs.strides, theirs.block_shape)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        (lambda q: q, None),
        (lambda q: q.float(), "float32"),
        (lambda q: torch.empty(2, 64, 4, 320, dtype=q.dtype), "256"),
        (lambda q: torch.empty(2, 64, 4, 36, dtype=q.dtype), "multiples of 8"),
        (lambda q: q.transpose(1, 3), "contiguous"),
        (lambda q: torch.empty(2 * 64 * 4 * 128 + 1, dtype=q.dtype)[1:].view(2, 64, 4, 128), "16 bytes"),
        (lambda q: q[:, :, :1].expand(2, 64, 4, 128), "16 bytes"),
    ],
)
def test_what_it_does_not_take(change, obstacle):
    q = change(torch.empty(2, 64, 4, 128, dtype=torch.bfloat16))
    found = dispatch.hopper_obstacle(q, q, q, Spec(0.1), capability=90)
    assert found is None if obstacle is None else obstacle in found


def test_terms_and_other_gpus_go_to_the_portable_kernels():
    q = torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
    assert dispatch.choose(q, q, q, Spec(0.1), 90).backend == "hopper"
    assert dispatch.choose(q, q, q, Spec(0.1), 80).backend == "triton"
    assert dispatch.choose(q, q, q, Spec(0.1), 90, Terms(sinks=torch.zeros(4))).backend == "triton"


@pytest.mark.parametrize(("d", "expected"), [(64, 32), (96, 32), (128, 64), (192, 64), (256, 128), (130, 16), (40, 16)])
def test_the_tail_covers_the_head_dim(d, expected):
    from tilewise.kernels.hopper.launch import padded, tail

    block = padded(d)
    assert tail(d, block) == expected
    assert block // 2 + tail(d, block) >= d


def test_short_causal_calls_have_their_own_row():
    assert config.hopper_tile(64, banded=True, keys=512).warpgroups == 2
    assert config.hopper_tile(64, banded=False, keys=512).warpgroups == 3
