"""Head dims that are no power of two, and those above 256, on the Hopper kernels: within the budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise
from tests import budget
from tests.cases import Case, make, run
from tilewise.errors import AttentionError

DIMS = (
    *((72, 40), (80, 80), (96, 96), (96, 64), (128, 96), (136, 72), (160, 160), (192, 192), (192, 128), (192, 96)),
    *((264, 264), (320, 72), (384, 264), (512, 512)),
)
PLAIN = Case(1, 150, 150, 2, 2, 64, 64, "bfloat16", lse_gradient=False)
LENGTHS = ((5, 0), (0, 60), (145, 210), (64, 80), (300, 300))
CASES = {
    "packed": replace(PLAIN, batch=5, n_q=514, n_k=650, lengths=LENGTHS, heads=4, kv_heads=1, after=0),
    "causal": replace(PLAIN, n_q=999, n_k=999, heads=4, kv_heads=4, after=0),
    "window": replace(PLAIN, n_q=1000, n_k=777, before=130, after=30, dtype="float16", lse_gradient=True),
    "full": replace(PLAIN, n_q=700, n_k=1100, batch=2),
    "MQA": replace(PLAIN, n_q=512, n_k=500, heads=16, kv_heads=1, after=0),
    "negative scale": replace(PLAIN, n_q=130, n_k=77, scale=-0.2, after=0),
}


def fill_free_memory() -> None:
    """Fills memory that the next call will allocate with NaN."""
    large = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(6)]
    small = [torch.full((n,), torch.nan, device="cuda") for n in (64, 512, 4096, 40_000, 120_000) for _ in range(8)]
    del large, small


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_within_budget(dims: tuple[int, int], name: str) -> None:
    inputs = make(replace(CASES[name], d=dims[0], dv=dims[1]), "cuda")
    fill_free_memory()
    try:
        budget.check(run(inputs, "hopper"), inputs)
    except AttentionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["packed", "full"])
@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 192), (192, 128), (512, 512)], ids=str)
def test_the_same_bits(dims: tuple[int, int], name: str) -> None:
    inputs = make(replace(CASES[name], d=dims[0], dv=dims[1]), "cuda")
    try:
        first, second = (run(inputs, "hopper", deterministic=True) for _ in range(2))
    except AttentionError as error:
        pytest.skip(str(error))
    budget.check(first, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 192), (192, 128), (512, 512)], ids=str)
def test_softcap(dims: tuple[int, int]) -> None:
    """No worse than the portable kernels, against float64."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    q, k, v, dout = (torch.randn(2, 333, *x, device="cuda", generator=generator).bfloat16() for x in shapes)

    def results(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (3 * q, k, v)]
        out = tilewise.attention(*leaves, causal=True, softcap=5.0, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact = results("reference", torch.float64)
    try:
        ours = results("hopper", torch.bfloat16)
    except AttentionError as error:
        pytest.skip(str(error))
    for truth, mine, portable in zip(exact, ours, results("triton", torch.bfloat16), strict=True):
        errors = [(x.double() - truth).abs().max().item() for x in (mine, portable)]
        assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize("d", [96, 192, 512])
def test_nan_in_masked_keys(d: int) -> None:
    q, k, v, dout = (torch.randn(1, 200, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def results() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = tilewise.attention(*leaves, window=(50, 0), backend="hopper")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    try:
        before = results()
    except AttentionError as error:
        pytest.skip(str(error))
    k[:, 100], v[:, 100] = torch.nan, torch.nan
    after = results()
    blind = torch.tensor([i < 100 or i > 150 for i in range(200)], device="cuda")
    for a, b in zip(before[:2], after[:2], strict=True):
        torch.testing.assert_close(a[:, blind], b[:, blind], atol=2e-2, rtol=2e-2)  # two steps of bfloat16
        assert b[:, ~blind].isnan().any()


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_finite_gradients_are_not_computed_again(d: int) -> None:
    """The NaN repair reads q, k and v; without it the postprocess reads the sums alone."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper import backward_launches as hopper
    from tilewise.request import BackwardInputs, Request, Spec

    torch.manual_seed(d)
    q, k, v, dout = (torch.randn(1, 500, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    request, grads = Request(q, k, v, Spec(d**-0.5, None, 0)), tuple(torch.empty_like(q) for _ in range(3))
    space = hopper.new_workspace(DeviceMemory(q.device), hopper.call_shape(request), None)
    launches = hopper.backward_launches(request, BackwardInputs(out, lse, dout, None), grads, space, 132)
    *first, last = launches.values()
    for launch in first:
        launch()
    for x in (q, k, v):
        x.fill_(torch.nan)
    last()
    assert all(x.isfinite().all() for x in grads)
