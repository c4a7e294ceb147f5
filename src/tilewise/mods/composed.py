"""torch's elementary functions that are made of others, as expressions.

Each is a function in torch's own terms, called with traced values (see `trace`), so that its derivative and its kernels
follow. Ties and branches are chosen so that the derivative is right where torch's is finite: no abs(x) where the slope
at 0 is not 0, and what is not selected may be infinite or nan.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, where

from .expr import Expr
from .functions import COMPOSED, Argument
from .trace import Traced, expression_of

LN2 = math.log(2)
HUGE = 1e9  # beyond it 1 + x * x is x * x, also in float64


def atan2(y: Tensor, x: Tensor) -> Tensor:
    at_zero = where(y > 0, math.pi / 2, where(y < 0, -math.pi / 2, 0.0))
    angle = torch.atan(y / x)
    return where(x > 0, angle, where(x < 0, angle + where(y < 0, -math.pi, math.pi), at_zero))


def sinh(x: Tensor) -> Tensor:
    small = torch.expm1(x)
    return where(torch.abs(x) < 1, 0.5 * (small + small / (small + 1.0)), 0.5 * (torch.exp(x) - torch.exp(-x)))


def asinh(x: Tensor) -> Tensor:
    def positive(x: Tensor) -> Tensor:
        near = torch.log1p(x + x * x / (1 + torch.sqrt(1 + x * x)))
        return where(x > HUGE, torch.log(x) + LN2, near)

    return where(x < 0, -positive(-x), positive(x))


def acosh(x: Tensor) -> Tensor:
    above = x - 1.0
    near = torch.log1p(above + torch.sqrt(above * (above + 2)))
    return where(x > HUGE, torch.log(x) + LN2, near)


def sinc(x: Tensor) -> Tensor:
    angle = math.pi * x
    return where(x == 0, 1.0, torch.sin(angle) / angle)


def logit(x: Tensor, eps: Any = None) -> Tensor:
    x = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(x / (1 - x))


def isfinite(x: Tensor) -> Tensor:
    return torch.abs(x) < math.inf


def finite_maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger one, from which logaddexp measures; its derivative cancels there."""
    most = torch.maximum(a, b)
    return where(isfinite(most), most, 0.0)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    most = finite_maximum(a, b)
    return most + torch.log(torch.exp(a - most) + torch.exp(b - most))


def logaddexp2(a: Tensor, b: Tensor) -> Tensor:
    most = finite_maximum(a, b)
    return most + torch.log2(torch.exp2(a - most) + torch.exp2(b - most))


def trunc(x: Tensor) -> Tensor:
    return where(x < 0, -torch.floor(-x), torch.floor(x))


def round_(x: Tensor) -> Tensor:
    """To the nearest, and halves to the even one."""
    below = torch.floor(x)
    rest = x - below
    return where((rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)), below + 1, below)


def sign(x: Tensor) -> Tensor:
    return where(x > 0, 1, 0) - where(x < 0, 1, 0)


def softplus(x: Tensor, beta: Any = 1.0, threshold: Any = 20.0) -> Tensor:
    scaled = x * beta
    return where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


def log_sigmoid(x: Tensor) -> Tensor:
    return -softplus(-x, 1.0, 50.0)


def threshold(x: Tensor, threshold: Any, value: Any) -> Tensor:
    return where(x > threshold, x, value)


def hardsigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x / 6 + 0.5, 0.0, 1.0)


def elu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    return where(x > 0, x, alpha * torch.expm1(x))


# By torch's names, with torch's names of the arguments.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tan": lambda x: torch.sin(x) / torch.cos(x),
    "asin": lambda x: torch.atan(x / torch.sqrt((1 - x) * (1 + x))),
    "acos": lambda x: 2 * torch.atan(torch.sqrt((1 - x) / (1 + x))),
    "atan2": atan2,
    "sinh": sinh,
    "cosh": lambda x: 0.5 * (torch.exp(x) + torch.exp(-x)),
    "asinh": asinh,
    "acosh": acosh,
    "atanh": lambda x: 0.5 * (torch.log1p(x) - torch.log1p(-x)),
    "log10": lambda x: torch.log2(x) * math.log10(2),
    "erfc": lambda x: 1.0 - torch.erf(x),
    "sinc": sinc,
    "logit": logit,
    "xlogy": lambda x, y: where((x == 0) & (y == y), 0.0, x * torch.log(y)),
    "logaddexp": logaddexp,
    "logaddexp2": logaddexp2,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "hypot": lambda x, y: torch.sqrt(x * x + y * y),
    "float_power": lambda x, exponent: (1.0 * x) ** exponent,
    "positive": lambda x: x,
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "ceil": lambda x: -torch.floor(-x),
    "trunc": trunc,
    "frac": lambda x: x - trunc(x),
    "round": round_,
    "fmod": lambda a, b: a - torch.div(a, b, rounding_mode="trunc") * b,
    "sign": sign,
    "isnan": lambda x: x != x,
    "isinf": lambda x: torch.abs(x) == math.inf,
    "isfinite": isfinite,
    "fmax": lambda a, b: where(a != a, b, where(b != b, a, torch.maximum(a, b))),
    "fmin": lambda a, b: where(a != a, b, where(b != b, a, torch.minimum(a, b))),
    "heaviside": lambda x, values: where(x == 0, values, where(x > 0, 1.0, 0.0)),
    "clamp_min": lambda x, min: torch.maximum(x, min),
    "clamp_max": lambda x, max: torch.minimum(x, max),
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "rsub": lambda x, other, alpha=1: other - alpha * x,
    "lerp": lambda start, end, weight: start + weight * (end - start),
    "addcmul": lambda x, tensor1, tensor2, value=1: x + value * tensor1 * tensor2,
    "addcdiv": lambda x, tensor1, tensor2, value=1: x + value * tensor1 / tensor2,
    "silu": lambda x: x * torch.sigmoid(x),
    "softplus": softplus,
    "log_sigmoid": log_sigmoid,
    "mish": lambda x: x * torch.tanh(softplus(x)),
    "softsign": lambda x: x / (1 + torch.abs(x)),
    "tanhshrink": lambda x: x - torch.tanh(x),
    "softshrink": lambda x, lambd=0.5: where(x > lambd, x - lambd, where(x < -lambd, x + lambd, 0.0)),
    "hardshrink": lambda x, lambd=0.5: where((x >= -lambd) & (x <= lambd), 0.0, x),
    "threshold": threshold,
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: torch.clamp(x, min_val, max_val),
    "relu6": lambda x: torch.clamp(x, 0.0, 6.0),
    "hardsigmoid": hardsigmoid,
    "hardswish": lambda x: x * hardsigmoid(x),
    "leaky_relu": lambda x, negative_slope=0.01: where(x > 0, x, negative_slope * x),
    "elu": elu,
    "celu": lambda x, alpha=1.0: where(x > 0, x, alpha * torch.expm1(x / alpha)),
    "selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772),
}
ALIASES = """
    fix:trunc sgn:sign arcsin:asin arccos:acos arctan2:atan2 arcsinh:asinh arccosh:acosh arctanh:atanh
    logsigmoid:log_sigmoid _threshold:threshold
"""
FUNCTIONS |= {alias: FUNCTIONS[name] for alias, name in (pair.split(":") for pair in ALIASES.split())}


def _composed(function: Callable[..., Any]) -> Callable[..., Expr | None]:
    signature = inspect.signature(function)

    def made(args: Sequence[Expr], named: Mapping[str, Argument]) -> Expr | None:
        """None where torch's function of this name takes other arguments."""
        keywords = {name: Traced(x) for name, x in named.items() if isinstance(x, Expr)}
        if len(keywords) < len(named):
            return None
        try:
            given = signature.bind(*map(Traced, args), **keywords)
        except TypeError:
            return None
        return expression_of(function(*given.args, **given.kwargs))

    return made


COMPOSED.update({name: _composed(function) for name, function in FUNCTIONS.items()})
