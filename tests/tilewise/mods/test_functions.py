"""What a mod may call, beside torch: values, slopes and the gradients of what it reads."""

from __future__ import annotations

import linecache
import math
import zlib
from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import DEVICE
from tests.tilewise.mods.test_expr import PLACE, S
from tests.tilewise.mods.test_trace import made as followed
from tilewise.mods import expr, text

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


def made(body: str) -> Any:
    """A mod with this body, from a file of its own."""
    text = f"def mod(score, b, h, q_idx, kv_idx):\n    return {body}\n"
    name = f"<test {zlib.crc32(body.encode())}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch}
    exec(compile(text, name, "exec"), space)
    return tilewise.score_mod(space["mod"])


@pytest.mark.parametrize("body", BODIES)
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
    (found,) = expr.evaluate([mod.program.slope], place, S, (), (), torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64).expand(S.shape), slope)


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
