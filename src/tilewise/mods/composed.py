"""torch's elementary functions that are made of others, as expressions.

Each is a plain function in torch's own words, called with values that note what is done to them (see `trace`), so that
its derivative and its kernels follow. Ties and branches are chosen so that the derivative is right where torch's is
finite: no abs(x) where the slope at 0 is not 0, and what is not selected may be infinite or nan.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewise.mods.expr import Expr
from tilewise.mods.functions import COMPOSED, Word
from tilewise.mods.trace import expressed, noted

LN2 = math.log(2)
HUGE = 1e9  # beyond it 1 + x * x is x * x, also in float64


def tan(x: Any) -> Any:
    return torch.sin(x) / torch.cos(x)


def asin(x: Any) -> Any:
    return torch.atan(x / torch.sqrt((1 - x) * (1 + x)))


def acos(x: Any) -> Any:
    return 2 * torch.atan(torch.sqrt((1 - x) / (1 + x)))


def atan2(y: Any, x: Any) -> Any:
    at_zero = torch.where(y > 0, math.pi / 2, torch.where(y < 0, -math.pi / 2, 0.0))
    angle = torch.atan(y / x)
    return torch.where(x > 0, angle, torch.where(x < 0, angle + torch.where(y < 0, -math.pi, math.pi), at_zero))


def sinh(x: Any) -> Any:
    small = torch.expm1(x)
    return torch.where(torch.abs(x) < 1, 0.5 * (small + small / (small + 1.0)), 0.5 * (torch.exp(x) - torch.exp(-x)))


def cosh(x: Any) -> Any:
    return 0.5 * (torch.exp(x) + torch.exp(-x))


def asinh(x: Any) -> Any:
    def positive(x: Any) -> Any:
        near = torch.log1p(x + x * x / (1 + torch.sqrt(1 + x * x)))
        return torch.where(x > HUGE, torch.log(x) + LN2, near)

    return torch.where(x < 0, -positive(-x), positive(x))


def acosh(x: Any) -> Any:
    above = x - 1.0
    near = torch.log1p(above + torch.sqrt(above * (above + 2)))
    return torch.where(x > HUGE, torch.log(x) + LN2, near)


def atanh(x: Any) -> Any:
    return 0.5 * (torch.log1p(x) - torch.log1p(-x))


def log10(x: Any) -> Any:
    return torch.log2(x) * math.log10(2)


def erfc(x: Any) -> Any:
    return 1.0 - torch.erf(x)


def sinc(x: Any) -> Any:
    angle = math.pi * x
    return torch.where(x == 0, 1.0, torch.sin(angle) / angle)


def logit(x: Any, eps: Any = None) -> Any:
    x = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(x / (1 - x))


def xlogy(x: Any, y: Any) -> Any:
    return torch.where((x == 0) & (y == y), 0.0, x * torch.log(y))


def logaddexp(a: Any, b: Any) -> Any:
    most = torch.maximum(a, b)
    most = torch.where(isfinite(most), most, 0.0)  # of which the derivative cancels
    return most + torch.log(torch.exp(a - most) + torch.exp(b - most))


def logaddexp2(a: Any, b: Any) -> Any:
    most = torch.maximum(a, b)
    most = torch.where(isfinite(most), most, 0.0)
    return most + torch.log2(torch.exp2(a - most) + torch.exp2(b - most))


def square(x: Any) -> Any:
    return x * x


def reciprocal(x: Any) -> Any:
    return 1.0 / x


def hypot(x: Any, y: Any) -> Any:
    return torch.sqrt(x * x + y * y)


def float_power(x: Any, exponent: Any) -> Any:
    return (1.0 * x) ** exponent


def positive(x: Any) -> Any:
    return x


def deg2rad(x: Any) -> Any:
    return x * (math.pi / 180)


def rad2deg(x: Any) -> Any:
    return x * (180 / math.pi)


def ceil(x: Any) -> Any:
    return -torch.floor(-x)


def trunc(x: Any) -> Any:
    return torch.where(x < 0, -torch.floor(-x), torch.floor(x))


def frac(x: Any) -> Any:
    return x - trunc(x)


def round_(x: Any) -> Any:
    """To the nearest, and halves to the even one."""
    below = torch.floor(x)
    rest = x - below
    return torch.where((rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)), below + 1, below)


def fmod(a: Any, b: Any) -> Any:
    return a - torch.div(a, b, rounding_mode="trunc") * b


def sign(x: Any) -> Any:
    return torch.where(x > 0, 1, 0) - torch.where(x < 0, 1, 0)


def isnan(x: Any) -> Any:
    return x != x


def isinf(x: Any) -> Any:
    return torch.abs(x) == math.inf


def isfinite(x: Any) -> Any:
    return torch.abs(x) < math.inf


def fmax(a: Any, b: Any) -> Any:
    return torch.where(a != a, b, torch.where(b != b, a, torch.maximum(a, b)))


def fmin(a: Any, b: Any) -> Any:
    return torch.where(a != a, b, torch.where(b != b, a, torch.minimum(a, b)))


def heaviside(x: Any, values: Any) -> Any:
    return torch.where(x == 0, values, torch.where(x > 0, 1.0, 0.0))


def clamp_min(x: Any, min: Any) -> Any:
    return torch.maximum(x, min)


def clamp_max(x: Any, max: Any) -> Any:
    return torch.minimum(x, max)


def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return torch.where(mask, value, x)


def rsub(x: Any, other: Any, alpha: Any = 1) -> Any:
    return other - alpha * x


def lerp(start: Any, end: Any, weight: Any) -> Any:
    return start + weight * (end - start)


def addcmul(x: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return x + value * tensor1 * tensor2


def addcdiv(x: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return x + value * tensor1 / tensor2


def silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


def softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


def log_sigmoid(x: Any) -> Any:
    return -softplus(-x, 1.0, 50.0)


def mish(x: Any) -> Any:
    return x * torch.tanh(softplus(x))


def softsign(x: Any) -> Any:
    return x / (1 + torch.abs(x))


def tanhshrink(x: Any) -> Any:
    return x - torch.tanh(x)


def softshrink(x: Any, lambd: Any = 0.5) -> Any:
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, 0.0))


def hardshrink(x: Any, lambd: Any = 0.5) -> Any:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, x)


def threshold(x: Any, threshold: Any, value: Any) -> Any:
    return torch.where(x > threshold, x, value)


def hardtanh(x: Any, min_val: Any = -1.0, max_val: Any = 1.0) -> Any:
    return torch.clamp(x, min_val, max_val)


def relu6(x: Any) -> Any:
    return torch.clamp(x, 0.0, 6.0)


def hardsigmoid(x: Any) -> Any:
    return torch.clamp(x / 6 + 0.5, 0.0, 1.0)


def hardswish(x: Any) -> Any:
    return x * hardsigmoid(x)


def leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    return torch.where(x > 0, x, negative_slope * x)


def elu(x: Any, alpha: Any = 1.0) -> Any:
    return torch.where(x > 0, x, alpha * torch.expm1(x))


def celu(x: Any, alpha: Any = 1.0) -> Any:
    return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))


def selu(x: Any) -> Any:
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        tan, asin, acos, atan2, sinh, cosh, asinh, acosh, atanh, log10, erfc, sinc, logit, xlogy, logaddexp, logaddexp2,
        square, reciprocal, hypot, float_power, positive, deg2rad, rad2deg, ceil, trunc, frac, fmod, sign, isnan, isinf,
        isfinite, fmax, fmin, heaviside, clamp_min, clamp_max, masked_fill, rsub, lerp, addcmul, addcdiv, silu,
        softplus, log_sigmoid, mish, softsign, tanhshrink, softshrink, hardshrink, threshold, hardtanh, relu6,
        hardsigmoid, hardswish, leaky_relu, elu, celu, selu,
    )
}  # fmt: skip
FUNCTIONS |= {
    "round": round_, "fix": trunc, "sgn": sign, "arcsin": asin, "arccos": acos, "arctan2": atan2, "arcsinh": asinh,
    "arccosh": acosh, "arctanh": atanh, "logsigmoid": log_sigmoid, "_threshold": threshold,
}  # fmt: skip


def _composed(name: str) -> Callable[..., Expr | None]:
    function = FUNCTIONS[name]
    signature = inspect.signature(function)

    def made(args: Sequence[Expr], named: Mapping[str, Word]) -> Expr | None:
        """None where torch's function of this name takes other arguments."""
        words = {word: noted(x) for word, x in named.items() if isinstance(x, Expr)}
        if len(words) < len(named):
            return None
        try:
            given = signature.bind(*map(noted, args), **words)
        except TypeError:
            return None
        return expressed(function(*given.args, **given.kwargs))

    return made


COMPOSED.update({name: _composed(name) for name in FUNCTIONS})
