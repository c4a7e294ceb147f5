"""The profiles of the portable kernels agree with what they launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise.backends.common import tiles
from tilewise.request import Gpu
from tilewise_lab.costs import profiles
from tilewise_lab.costs.cost import Call

CALL = Call(2, 4096, 4096, 8, 2, 128, 128)


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("d", [40, 64, 200])
def test_tiles_are_those_of_the_tables(arch: int, d: int) -> None:
    call, gpu = replace(CALL, d=d, dv=d), Gpu("cuda", arch)
    found = [*profiles.triton_forward(call, gpu), *profiles.triton_backward(call, gpu)]
    assert [x.name for x in found] == ["forward", "key", "query"]
    assert [x.tile for x in found] == [tiles.tile(x.name, arch, 2, x.width) for x in found]
    assert [x.is_forward for x in found] == [True, False, False]
    assert [x.by_key for x in found] == [False, True, False]


def test_only_few_queries_of_a_dense_call_share_their_keys() -> None:
    gpu = Gpu("cuda", 90)
    (few,) = profiles.triton_forward(replace(CALL, n_q=1), gpu)
    assert few.splits is not None
    assert few.splits(8, 132) == tiles.parts_of_keys(8, 4096, few.tile.block_n, 132) > 1
    (many,) = profiles.triton_forward(CALL, gpu)
    (packed,) = profiles.triton_forward(replace(CALL, n_q=1, lengths=((1, 4096),)), gpu)
    assert many.splits is packed.splits is None
