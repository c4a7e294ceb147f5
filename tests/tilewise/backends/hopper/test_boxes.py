"""Grids of tokens that the Hopper forward reads and writes in boxes: the kernel in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import each_once
from tilewise import sparse
from tilewise.validation.dense import checked_request

pytestmark = pytest.mark.usefixtures("triton_runs")
emulator = pytest.importorskip("tilewise_lab.emulator")
hopper = pytest.importorskip("tilewise.backends.hopper.launches")

from tilewise.backends.common.launch import DeviceMemory  # noqa: E402
from tilewise.backends.registry import BACKENDS  # noqa: E402
from tilewise.sparse.neighborhood_attention import Window, _kept_layout  # noqa: E402

NAMED = {backend.name: backend for backend in BACKENDS}
CASES: dict[str, dict[str, Any]] = {
    "wide window": {"space": (16, 32), "sizes": (5, 9)},
    "columns first": {"space": (32, 16), "sizes": (7, 3), "heads": 2, "kv_heads": 1, "batch": 2},
    "causal, 128": {"space": (16, 32), "sizes": (3, 5), "causal": (True, False), "d": 128},
}


def run(q: Tensor, k: Tensor, v: Tensor, windows: tuple[Window, ...], words: bool) -> tuple[Tensor, Tensor]:
    """(out, lse in the order of boxes)"""
    layout = _kept_layout(windows, torch.device("cpu"))
    assert layout.token_boxes
    request = checked_request(*(x.flatten(1, 2) for x in (q, k, v)), (), (), {"mask_mod": layout.mask})
    request = request._replace(spec=request.spec._replace(token_boxes=layout.token_boxes))
    if words:
        request = request._replace(blocks=(*request.blocks, *NAMED["hopper"].evaluated_mask(request)))
    memory = DeviceMemory(q.device)
    out = torch.full_like(request.q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[3], out.shape[1]), torch.nan)
    state = hopper.new_state(memory, request)._replace(mask_words=hopper.new_words(request, memory))
    launches = hopper.words_launches(request, state.mask_words)
    assert not (words and launches)
    for launch in launches:
        launch()
    (forward,) = hopper.forward_launches(request, out, lse, state, 2)
    emulator.launch(*forward)
    return out.unflatten(1, q.shape[1:3]), lse


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_other_backends_keep_nothing_of_a_mask(name: str) -> None:
    mask = _kept_layout((Window(16, 5, 1, False), Window(32, 9, 1, False)), torch.device("cpu")).mask
    q = torch.zeros(1, 512, 1, 8)
    assert NAMED[name].evaluated_mask(checked_request(q, q, q, (), (), {"mask_mod": mask})) == ()


def inputs(
    space: tuple[int, int],
    sizes: tuple[int, int],
    causal: tuple[bool, bool] = (False, False),
    d: int = 64,
    heads: int = 1,
    kv_heads: int = 1,
    batch: int = 1,
) -> tuple[list[Tensor], tuple[Window, ...]]:
    torch.manual_seed(0)
    rows = torch.randn(batch, *space, heads + 2 * kv_heads, d).half()  # strides of a joint projection
    windows = tuple(Window(n, size, 1, ends) for n, size, ends in zip(space, sizes, causal, strict=True))
    return list(rows.split((heads, kv_heads, kv_heads), 3)), windows


@each_once(name=CASES, words=[False, True])
def test_as_permuted(name: str, words: bool) -> None:
    x, windows = inputs(**CASES[name])
    sizes, causal = [w.kernel_size for w in windows], [w.causal for w in windows]
    expected = sparse.neighborhood(*(t.double() for t in x), kernel_size=sizes, causal=causal)
    out, _ = run(*x, windows, words)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


def test_hidden_nan() -> None:
    x, windows = inputs((16, 32), (5, 9))
    clean, lse = run(*x, windows, True)
    x[2][0, 3, 20, 0, 5] = torch.nan
    out, again = run(*x, windows, True)
    row, column = torch.arange(16)[:, None], torch.arange(32)
    starts = (row - 2).clamp(0, 11), (column - 4).clamp(0, 23)
    sees = (starts[0] <= 3) & (starts[0] + 5 > 3) & (starts[1] <= 20) & (starts[1] + 9 > 20)
    assert out[0, sees, 0, 5].isnan().all()
    torch.testing.assert_close(out[0, ~sees], clean[0, ~sees], atol=2e-3, rtol=0)
    assert torch.equal(again, lse)
