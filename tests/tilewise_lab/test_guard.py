"""The guard of the interpreter: what it lets pass and what not."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="watches Triton's interpreter")


def copy(x: torch.Tensor, out: torch.Tensor, n: int, far: int = 4, races: bool = True) -> None:
    from tests.tilewise.backends.probes import copy_probe
    from tilewise_lab import guard

    with guard.watched(races):
        copy_probe[(2,)](x, out, n, far, N=4)


def test_what_lies_within() -> None:
    x, out = torch.arange(8.0), torch.zeros(8)
    copy(x, out, 8)
    assert torch.equal(out, x)
    copy(x[:7], out[:7], 7)


def test_a_load_behind_the_end() -> None:
    with pytest.raises(Exception, match=r"copy_probe, program 1: load of 4 bytes 0 bytes past the end of x"):
        copy(torch.zeros(8)[:7], torch.zeros(8), 8)


def test_a_store_behind_the_end() -> None:
    with pytest.raises(Exception, match=r"copy_probe, program 0: store of 8 bytes 0 bytes past the end of out"):
        copy(torch.zeros(8).long(), torch.zeros(9).long()[:3], 8)


def test_a_view_ends_where_its_last_place_does() -> None:
    x = torch.zeros(4, 4)
    copy(x[:2, :3].t(), torch.zeros(8), 7)
    with pytest.raises(Exception, match="past the end of x"):
        copy(x[:2, :3].t(), torch.zeros(8), 8)


def test_two_programs_write_one_place() -> None:
    with pytest.raises(Exception, match="programs 0 and 1 write one place of out"):
        copy(torch.zeros(8), torch.zeros(8), 8, far=3)
    copy(torch.zeros(8), torch.zeros(8), 8, far=3, races=False)


def test_a_program_reads_what_another_writes() -> None:
    from tests.tilewise.backends.probes import neighbour_probe
    from tilewise_lab import guard

    with guard.watched():
        neighbour_probe[(1,)](torch.zeros(1), 1)
        with pytest.raises(Exception, match="program 0 reads what 1 writes, in x"):
            neighbour_probe[(3,)](torch.zeros(3), 3)


def test_a_program_may_read_what_was_released() -> None:
    from tests.tilewise.backends.probes import last_program_probe
    from tilewise_lab import guard

    x, counter, out = (torch.zeros(n, dtype=torch.int32) for n in (4, 1, 1))
    with guard.watched():
        last_program_probe[(4,)](x, counter, out, SEM="acq_rel")
        assert out.item() == 10
        with pytest.raises(Exception, match="program 3 reads what 0 writes, in x"):
            last_program_probe[(4,)](x, counter.zero_(), out, SEM="relaxed")


def test_afterwards_nobody_watches() -> None:
    from tests.tilewise.backends.probes import copy_probe

    copy_probe[(2,)](torch.zeros(8)[:7], torch.zeros(8), 8, 4, N=4)
