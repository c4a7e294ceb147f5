"""Parts that become one in place, on a CPU and by the kernel of GPUs, against `tilewise.merge` in float64."""

from __future__ import annotations

import json

import pytest
import torch

import tilewise
from tests.conftest import HAS_TRITON
from tests.forks import python
from tilewise.distributed.calls import Rows, merge_

INF = torch.inf


def joined(backend: str, device: str, tensors: list[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
    """out and lse, on a CPU or by the kernel."""
    if backend == "reference":
        merge_(*tensors[:2], rows, *tensors[2:])
        return tensors[:2]
    from tilewise.backends.common.merge_kernel import join_

    tensors = [x.to(device) for x in tensors]
    join_(*tensors, rows.ranges[0][0], None if rows.indices is None else rows.indices.to(tensors[0].device))
    return [x.cpu() for x in tensors[:2]]


def parts(n: int, m: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """out and lse of 2 batch rows, n tokens and 3 heads, and those of m tokens to join them; some saw nothing."""
    torch.manual_seed(n)
    found = []
    for tokens in (n, m):
        out, lse = torch.randn(2, tokens, 3, 5, dtype=dtype), 40 * torch.randn(2, 3, tokens, dtype=dtype)
        lse[:, :, ::3] = -INF
        lse[:, 1] = -INF
        out[(lse == -INF).mT] = 0
        found += [out, lse]
    return found


@pytest.mark.parametrize("ranges", [((0, 11),), ((4, 9),), ((0, 2), (5, 8), (10, 11))], ids=str)
def test_a_part_joins_in_place(ranges, backend, device):
    rows = Rows.of(ranges, 11)
    index = torch.cat([torch.arange(a, b) for a, b in rows.ranges])
    out, lse, out_part, lse_part = parts(11, len(index))
    exact_out, exact_lse = out.double(), lse.double()
    own = exact_out[:, index], exact_lse[:, :, index]
    exact_out[:, index], exact_lse[:, :, index] = tilewise.merge(own, (out_part.double(), lse_part.double()))
    out, lse = joined(backend, device, [out, lse, out_part, lse_part], rows)
    torch.testing.assert_close(out.double(), exact_out, atol=3e-7, rtol=3e-7)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-6, rtol=3e-7)


def test_what_has_no_end_has_no_end(backend, device):
    """An lse of +inf stays one, whoever had it; nothing else is nan."""
    out, out_part = torch.ones(1, 4, 1, 2), torch.full((1, 4, 1, 2), 2.0)
    lse, lse_part = torch.tensor([[[INF, 0.0, INF, -INF]]]), torch.tensor([[[0.0, INF, INF, 1.0]]])
    out, lse = joined(backend, device, [out, lse, out_part, lse_part], Rows.of([(0, 4)], 4))
    assert lse.flatten().tolist() == [INF, INF, INF, 1.0]
    assert out[0, 3, 0].tolist() == [2.0, 2.0]


def test_float64_stays_float64_and_no_rows_are_no_rows():
    out, lse, out_part, lse_part = parts(7, 7, torch.float64)
    expected = tilewise.merge((out.clone(), lse.clone()), (out_part, lse_part))
    merge_(out, lse, Rows.of([(0, 7)], 7), out_part, lse_part)
    torch.testing.assert_close((out, lse), expected, atol=1e-14, rtol=1e-13)
    merge_(out, lse, Rows.of([], 7), out_part[:, :0], lse_part[:, :, :0])
    torch.testing.assert_close((out, lse), expected, atol=1e-14, rtol=1e-13)


COMPILE = """
import json, torch
from tilewise_lab.costs.compiled import compile_for
from tilewise.backends.common.merge_kernel import join_launch
found = []
for arch, dv, indexed in ((80, 128, False), (90, 128, False), (100, 80, True), ("gfx942", 512, True)):
    x, lse = torch.empty(1, 64, 4, dv, device="meta"), torch.empty(1, 4, 64, device="meta")
    made = join_launch(x, lse, x, lse, 0, torch.empty(64, dtype=torch.int64, device="meta") if indexed else None)
    found.append((arch, dv, compile_for(arch, made.kernel, made.args, made.options).spills))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_the_kernel_compiles_for_every_target():
    done = python("-c", COMPILE, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    assert not [x for x in found if x[2]]
