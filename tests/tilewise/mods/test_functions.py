"""What a mod may call, beside torch: values, slopes and the gradients of what it reads."""

from __future__ import annotations

import inspect
import linecache
import math
import re
import zlib
from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import DEVICE, INTERPRETED
from tests.tilewise.mods.test_expr import PLACE, S
from tests.tilewise.mods.test_trace import made as followed
from tilewise.mods import composed, expr, text

BODIES = [
    "torch.erf(score)",
    "torch.log1p(score * score) * torch.special.log1p(abs(score) / 1000)",
    "torch.expm1(score) * torch.special.expm1(score / 1000)",
    "torch.nn.functional.gelu(score)",
    "torch.nn.functional.gelu(score, approximate='tanh') + torch.nn.functional.gelu(score * 2, approximate='none')",
    "torch.nn.functional.relu(score, inplace=False) + score.clamp(min=-0.5, max=None)",
    "torch.div(score, 0.4, rounding_mode=None) + torch.div(q_idx, 2)",
    "score * torch.div(q_idx - kv_idx, 3, rounding_mode='floor') + torch.div(score, 0.3, rounding_mode='floor')",
    "score * torch.div(q_idx - kv_idx, -3, rounding_mode='trunc') + torch.div(score, 0.3, rounding_mode='trunc')",
    "torch.where(torch.logical_xor(score > 0, q_idx), score, 2 * score)",
    "torch.where((score > 0) ^ (q_idx > kv_idx) ^ True, score, 2 * score)",
    "score * torch.bitwise_or(torch.bitwise_left_shift(q_idx, 2), torch.bitwise_and(kv_idx, 1).bitwise_not())",
    "score * torch.bitwise_xor(q_idx, 6) + torch.bitwise_right_shift(q_idx - kv_idx, 1) * score",
    "score * ((q_idx - kv_idx & 6) ^ ~q_idx | (1 << kv_idx)) - (score * 0.1) * (-5 >> q_idx)",
    "score * ((q_idx > kv_idx) & q_idx | (q_idx == 1) << 3)",
]


F = "torch.nn.functional"
COMPOSED = [
    "torch.sin(torch.cos(score)) + torch.tan(b) + torch.tan(score)",  # as torch tests its own
    "torch.asin(score / 9) + torch.acos(score / 9) + torch.arcsin(score / 8) * torch.arccos(score / 8)",
    "torch.atan(score) * torch.arctan(3 * score) + torch.atan2(score, score * score - 1)",
    "torch.arctan2(score, -score) * score",
    "torch.sinh(score) + torch.cosh(score / 3) + torch.sinh(score * 1e-3)",
    "torch.asinh(score) + torch.arcsinh(score * 1e3) + torch.atanh(score / 9) * torch.arctanh(score / 8)",
    "torch.acosh(score * score + 1.1) * torch.arccosh(abs(score) + 2)",
    "torch.log10(abs(score)) + torch.erfc(score) + torch.special.erfc(score / 2) + torch.sinc(score)",
    "torch.logit(score / 20 + 0.5) + torch.special.logit(score, eps=0.2) + torch.special.expit(score)",
    "torch.xlogy(score, abs(score)) + torch.logaddexp(score, score / 3) + torch.logaddexp2(score, 1 - score)",
    "torch.square(score) + torch.reciprocal(score) + torch.hypot(score, score + 2) + score.square().rsqrt()",
    "torch.float_power(abs(score), 1.5) + torch.positive(score) + torch.deg2rad(score) + torch.rad2deg(score)",
    "torch.ceil(score) * score + torch.trunc(3 * score) * score + torch.fix(score) + torch.frac(2 * score)",
    "torch.round(3 * score) * score + torch.round(kv_idx / 2) + torch.fmod(score, 0.7) + torch.fmod(q_idx - kv_idx, 3)",
    "torch.sign(score) * score * score + torch.sgn(score) + torch.sign(q_idx - kv_idx) * score",
    "torch.where(torch.isnan(score) | torch.isinf(score) | ~torch.isfinite(score), 0.0, score)",
    "torch.fmax(score, 0.2 - score) + torch.fmin(torch.where(q_idx > 1, float('nan'), 0.1), score)",
    "torch.heaviside(q_idx - kv_idx, kv_idx) * score",
    "score.clamp_min(-0.3) + torch.clamp_max(score, max=0.4) + score.masked_fill(q_idx > kv_idx, 2.0)",
    "torch.rsub(score, 2.0, alpha=3) + torch.lerp(score, 2 * score, 0.3)",
    "torch.addcmul(score, score, score, value=2) + torch.addcdiv(score, score, abs(score) + 1, value=0.5)",
    "torch.where(torch.greater(score, 0) & torch.less_equal(q_idx, kv_idx), score, score.not_equal(0) * 2 * score)",
    f"{F}.silu(score) + {F}.softplus(score) + {F}.softplus(score, beta=2.0, threshold=1.0)",
    f"{F}.logsigmoid(score) + {F}.logsigmoid(30 * score) + {F}.mish(score) + {F}.softsign(score)",
    f"{F}.tanhshrink(score) + {F}.softshrink(score) * 2 + {F}.hardshrink(score, 0.3) + {F}.threshold(score, 0.1, 0.2)",
    f"{F}.hardtanh(score, -0.4, 0.6) + {F}.relu6(3 * score) + {F}.hardsigmoid(score) + {F}.hardswish(score)",
    f"{F}.leaky_relu(score, 0.2) + {F}.elu(score, alpha=0.5) + {F}.celu(score, 0.7) + {F}.selu(score)",
    "score * (q_idx - kv_idx).to(score.dtype) + score.to(torch.float32) + (score > 0).to(torch.int64).type_as(score)",
    "score * (score > 0).float() + torch.where(q_idx.bool(), score.double(), score.type(torch.float64))",
]


def made(body: str) -> Any:
    """A mod with this body, from a file of its own."""
    text = f"def mod(score, b, h, q_idx, kv_idx):\n    return {body}\n"
    name = f"<test {zlib.crc32(body.encode())}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch}
    exec(compile(text, name, "exec"), space)
    return tilewise.score_mod(space["mod"])


@pytest.mark.parametrize("body", BODIES + COMPOSED)
def test_they_are_torchs(body: str) -> None:
    """Read or followed, it is one program; its slope is what autograd makes of torch's own."""
    mod = made(body)()
    assert mod.key == followed(body)().key
    assert text.read(mod.key).root is mod.program.root
    b, h, i, j = (torch.as_tensor(x) for x in PLACE)
    score = S.clone().requires_grad_()
    expected = eval(body, {"torch": torch, "score": score, "b": b, "h": h, "q_idx": i, "kv_idx": j})
    torch.testing.assert_close(mod(S, *PLACE), expected.detach())
    (slope,) = torch.autograd.grad(expected.sum(), score)
    place = expr.Place(*PLACE, 4, 5)
    (found,) = expr.evaluate([mod.program.derivative], place, S, (), (), torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64).expand(S.shape), slope)


def test_each_function_is_one_of_them() -> None:
    called = set(re.findall(r"[.](\w+)", " ".join(COMPOSED)))
    assert {name.removeprefix("_") for name in composed.FUNCTIONS} - called == {"log_sigmoid"}  # F.logsigmoid's name


WITHIN = {  # where each is computed by kernels: inside its domain, away from 0 where it is infinite
    "acosh": (1.0, 50.0),
    "arccosh": (1.0, 50.0),
    "log10": (1e-3, 50.0),
    "logit": (0.01, 0.99),
    "reciprocal": (0.1, 9.0),
    **dict.fromkeys(("asin", "acos", "arcsin", "arccos", "atanh", "arctanh"), (-0.999, 0.999)),
}
ONE = [  # that need one argument, and are called by this name
    name
    for name, f in composed.FUNCTIONS.items()
    if not name.startswith(("is", "_", "log_"))
    and sum(p.default is p.empty for p in inspect.signature(f).parameters.values()) == 1
]


@pytest.mark.parametrize("names", [ONE[n : n + 6] for n in range(0, len(ONE), 6)], ids=" ".join)
def test_kernels_compute_them(names: list[str], backend: str) -> None:
    """Of one key, whose lse is its score. A head for each function."""
    torchs = [getattr(torch, name, None) or getattr(torch.nn.functional, name) for name in names]
    rows = [torch.linspace(*WITHIN.get(name, (-9.0, 9.0)), 32) for name in names]
    body = "score"
    for n, name in enumerate(names):
        home = "torch" if hasattr(torch, name) else "torch.nn.functional"
        body = f"torch.where(h == {n}, {home}.{name}(t[h, q_idx]).float(), {body})"
    text = f"def mod(score, b, h, q_idx, kv_idx, t):\n    return {body}\n"
    space: dict[str, Any] = {"torch": torch}
    exec(text, space)
    t = torch.stack(rows).to(DEVICE)
    q = torch.zeros(1, 32, len(names), 16, device=DEVICE)
    mod = tilewise.score_mod(space["mod"])(t)
    _, lse = tilewise.attention(q, q[:, :1], q[:, :1], score_mod=mod, return_lse=True, backend=backend)
    expected = torch.stack([f(x).double() for f, x in zip(torchs, t.double(), strict=True)])
    torch.testing.assert_close(lse[0].double(), expected, rtol=1e-5, atol=2e-6)


@tilewise.score_mod
def by_head(score, b, h, q_idx, kv_idx, t):
    x = t[h, q_idx]
    bent = torch.expm1(x) if h == 0 else torch.erf(x) if h == 1 else torch.log1p(x)
    gelu = torch.nn.functional.gelu(x) if h == 3 else torch.nn.functional.gelu(x, approximate="tanh")
    return bent if h < 3 else gelu


def by_head_of_torch(t: torch.Tensor) -> torch.Tensor:
    gelu = torch.nn.functional.gelu
    return torch.stack(
        [torch.expm1(t[0]), torch.erf(t[1]), torch.log1p(t[2]), gelu(t[3]), gelu(t[4], approximate="tanh")]
    )


X = [-0.999, -0.5, -1e-3, -1e-6, 0.0, 1e-7, 1e-5, 1e-4, 1e-2, 0.3, 1.0, 3.0, 80.0]


def test_on_every_backend(backend: str) -> None:
    """Of one key, whose lse is its score: to float32's rounding, next to 0 too; or twice as far off as torch's, whose
    own erf is off by 2e-7 on some CPUs."""
    values = torch.tensor(X, device=DEVICE).expand(5, -1)
    t, exact = values.clone().requires_grad_(), values.double().requires_grad_()
    q = torch.zeros(1, len(X), 5, 16, device=DEVICE)
    _, lse = tilewise.attention(q, q[:, :1], q[:, :1], score_mod=by_head(t), return_lse=True, backend=backend)
    expected = by_head_of_torch(exact)
    limit = 2 * (by_head_of_torch(values).double() - expected).abs() + 3e-6 * expected.abs() + 1e-9
    assert ((lse[0].double() - expected).abs() <= limit).all()
    slopes = (torch.autograd.grad(y.sum(), x)[0].double() for y, x in ((lse, t), (expected, exact)))
    torch.testing.assert_close(*slopes, rtol=3e-6, atol=1e-9)


@tilewise.score_mod
def far(score, b, h, q_idx, kv_idx, t):
    x = torch.expm1(t[q_idx]) if h == 0 else torch.log1p(abs(t[q_idx]))
    return torch.where(x > 1e4, 1e4, x)


def test_far_out(backend: str) -> None:
    """Where a part of the formula is infinite: no nan."""
    x = torch.tensor([-math.inf, -200.0, 200.0, 3e38, math.inf], device=DEVICE)
    q = torch.zeros(1, len(x), 2, 16, device=DEVICE)
    _, lse = tilewise.attention(q, q[:, :1], q[:, :1], score_mod=far(x), return_lse=True, backend=backend)
    expected = torch.stack([torch.expm1(x), torch.log1p(x.abs())]).clamp(max=1e4)
    torch.testing.assert_close(lse[0], expected)


ZERO = 0.0


@tilewise.score_mod
def by_sign(score, b, h, q_idx, kv_idx, x):
    return torch.where(1 / x > 0, score, 2 * score) + torch.where(x / x == 0, 100.0, 0.0)


@tilewise.score_mod
def over_zero(score, b, h, q_idx, kv_idx):
    """Infinite where the score is above 0, nan where it is 0; and what is a constant before any kernel runs."""
    far = (score / ZERO > 0) & (score / -ZERO < 0) & (1 / ZERO > 0) & (-1 / ZERO < 0) & ~(ZERO / ZERO == 0)
    return torch.where(far & ~(1.0 % ZERO == 0) & (1.0 // ZERO > 0), score, 2 * score)


@pytest.mark.parametrize("x", [0.0, -0.0, 2.0])
def test_division_by_zero_is_infinite(x: float, backend: str) -> None:
    """As torch has it, of 0.0 and -0.0 in calls one after the other; Python raises."""
    if INTERPRETED and backend == "triton" and math.copysign(1, x) < 0:
        pytest.skip("in Triton's interpreter the number -0.0 is 0.0")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1, 16, device=DEVICE) for _ in range(3))
    scale = 0.25 * (2 if math.copysign(1, x) < 0 else 1)
    expected = tilewise.attention(q, k, v, scale=scale, backend="reference")
    found = tilewise.attention(q, k, v, score_mod=by_sign(x), backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    score = torch.tensor([-1.0, 0.0, 1.0])
    torch.testing.assert_close(by_sign(x)(score, 0, 0, 0, 0), score * scale / 0.25)


def test_division_by_zero_written_out(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1, 16, device=DEVICE) for _ in range(3))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    weights = torch.softmax(torch.where(s > 0, s, 2 * s), -1)
    found = tilewise.attention(q, k, v, score_mod=over_zero(), backend=backend)
    torch.testing.assert_close(found, torch.einsum("bhij,bjhd->bihd", weights, v), rtol=1e-4, atol=1e-5)
