"""Partial results form a commutative monoid, and differentiable even where nothing is seen."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import tilewise
from tilewise import AttentionError
from tilewise.merging import State, union


def attend(s: torch.Tensor, v: torch.Tensor) -> State:
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def three() -> tuple[State, State, State]:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    lse = 20 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    o[0, 1], lse[0, 1] = 0.0, -torch.inf  # one of three saw nothing
    o[:, 2], lse[:, 2] = 0.0, -torch.inf  # nobody saw anything
    a, b, c = zip(o, lse, strict=True)
    return a, b, c


def test_union_of_keys() -> None:
    s, v = torch.randn(6, 10, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    assert_close(union(attend(s[:, :4], v[:4]), attend(s[:, 4:], v[4:])), attend(s, v))


def test_associative() -> None:
    a, b, c = three()
    assert_close(union(union(a, b), c), union(a, union(b, c)))


@pytest.mark.parametrize(("x", "y"), [(0, 1), (0, 2), (1, 2)])
def test_commutative(x: int, y: int) -> None:
    states = three()
    assert_close(union(states[x], states[y]), union(states[y], states[x]), rtol=0, atol=0)


@pytest.mark.parametrize("x", range(3))
def test_identity(x: int) -> None:
    o, lse = three()[x]
    nothing = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    assert_close(union((o, lse), nothing), (o, lse), rtol=0, atol=0)
    assert_close(union(nothing, (o, lse)), (o, lse), rtol=0, atol=0)


def test_far_apart_does_not_overflow() -> None:
    one, two = torch.ones(1, 1), 2 * torch.ones(1, 1)
    o, lse = union((one, torch.tensor([-1e4])), (two, torch.tensor([1e4])))
    assert (o.item(), lse.item()) == (2, 1e4)


def test_an_infinite_lse_outweighs_all_others() -> None:
    logs = torch.tensor([[torch.inf, torch.inf, 0.0], [5.0, torch.inf, -torch.inf]])
    tensors = [x.clone().requires_grad_() for x in (torch.ones(3, 1), logs[0], 2 * torch.ones(3, 1), logs[1])]
    o, lse = union((tensors[0], tensors[1]), (tensors[2], tensors[3]))
    assert lse.tolist() == [torch.inf, torch.inf, 0.0]
    assert o[0] == 1 and o[1].isnan() and o[2] == 1  # noqa: PT018
    (o[0] + o[2] + lse[2]).sum().backward()
    assert all(x.grad is not None and x.grad[[0, 2]].isfinite().all() for x in tensors)
    nothing = torch.zeros(3, 1), torch.full((3,), -torch.inf)
    assert_close(union((o, lse), nothing), (o, lse), equal_nan=True)


def test_low_precision_rounds_once() -> None:
    o_a, o_b = torch.randn(2, 64, 32, dtype=torch.bfloat16)
    lse_a, lse_b = torch.randn(2, 64)
    o, lse = union((o_a, lse_a), (o_b, lse_b))
    exact, _ = union((o_a.float(), lse_a), (o_b.float(), lse_b))
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(o, exact.bfloat16())


def test_gradcheck() -> None:
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 2), (3,)] * 2]
    torch.autograd.gradcheck(lambda a, x, b, y: union((a, x), (b, y)), tensors)


def test_gradient_where_nothing_is_seen() -> None:
    (o_a, lse_a), (o_b, lse_b), _ = three()
    tensors = [x.clone().requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    o, lse = union((tensors[0], tensors[1]), (tensors[2], tensors[3]))
    (o.sum() + lse[lse > -torch.inf].sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def test_as_many_parts_as_there_are() -> None:
    """In any number, in bfloat16 rounded once, in the layout that attention returns, even where tokens == heads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 4, 8) for _ in range(3))
    whole = tilewise.attention(q, k, v, return_lse=True)
    cuts = [slice(n, n + 1) for n in range(4)]
    parts = [tilewise.attention(q, k[:, cut], v[:, cut], return_lse=True) for cut in cuts]
    with pytest.warns(UserWarning, match="as many tokens as heads, taken as 'bshd'; expected layout='bhsd', if"):
        found = tilewise.merge(*parts)
    assert_close(found, whole)
    assert_close(tilewise.merge(*parts, layout="bshd"), whole)
    rounded = [(out.bfloat16(), lse) for out, lse in parts]
    exact, _ = tilewise.merge(*((out.float(), lse) for out, lse in rounded), layout="bshd")
    assert torch.equal(tilewise.merge(*rounded, layout="bshd")[0], exact.bfloat16())
    assert tilewise.merge(parts[0], layout="bshd") == parts[0]


def test_nan_of_a_part_that_saw_nothing_stays_there() -> None:
    out, lse = torch.randn(2, 1, 3, 2, 8), torch.randn(2, 1, 2, 3)
    out[0, 0, 1], lse[0, 0, :, 1] = torch.nan, -torch.inf
    found, total = tilewise.merge(*zip(out.requires_grad_(), lse.requires_grad_(), strict=True))
    assert_close(found[0, 1], out[1, 0, 1])
    assert_close(total[0, :, 1], lse[1, 0, :, 1])
    (found.sum() + total.sum()).backward()
    assert out.grad is not None and lse.grad is not None  # noqa: PT018
    assert out.grad.isfinite().all() and lse.grad.isfinite().all()  # noqa: PT018


def test_parts_with_their_heads_first() -> None:
    """Even where tokens == heads, and no shape tells."""
    q, k, v = (torch.randn(2, 4, 4, 8) for _ in range(3))
    whole = tilewise.attention(q, k, v, return_lse=True, layout="bhsd")
    parts = [
        tilewise.attention(q, k[:, :, cut], v[:, :, cut], return_lse=True, layout="bhsd")
        for cut in (slice(1), slice(1, 4))
    ]
    assert_close(tilewise.merge(*parts, layout="bhsd"), whole)
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    with pytest.raises(tilewise.AttentionError, match="layout='bhsd'"):
        tilewise.merge((out, lse), (out, lse))
    with pytest.raises(tilewise.AttentionError, match=r"out \(B, H, S, D\)"):
        tilewise.merge((out, lse.mT), (out, lse), layout="bhsd")
    with pytest.raises(tilewise.AttentionError, match="layout: found 'hsd'"):
        tilewise.merge((out, lse), layout="hsd")


@pytest.mark.parametrize("packed", [False, True])
def test_a_layout_that_only_strides_tell_must_be_given(packed: bool) -> None:
    """As many tokens as heads: the shapes of both layouts are the same, and the numbers would be wrong in silence."""
    q, k, v = (torch.randn(2, 4, 4, 8) for _ in range(3))
    cuts = slice(1), slice(1, 4)
    parts = [tilewise.attention(q, k[:, :, x], v[:, :, x], return_lse=True, layout="bhsd") for x in cuts]
    whole = tilewise.attention(q, k, v, return_lse=True, layout="bhsd")
    if packed:
        whole, *parts = ((out[0], lse[0]) for out, lse in (whole, *parts))
    with pytest.raises(AttentionError, match=r"layout of part 0.*as many tokens as heads.*layout='bhsd'"):
        tilewise.merge(*parts)
    assert_close(tilewise.merge(*parts, layout="bhsd"), whole)
    with pytest.warns(UserWarning, match="taken as 'bshd'"):  # a copy has no strides to tell
        tilewise.merge(*((out.contiguous(), lse) for out, lse in parts))
    swapped = [(out.transpose(-3, -2), lse) for out, lse in parts]
    assert_close(tilewise.merge(*swapped, layout="bshd"), (whole[0].transpose(-3, -2), whole[1]))
    ours = [(out.transpose(-3, -2).contiguous().transpose(-3, -2), lse) for out, lse in parts]
    assert_close(tilewise.merge(*ours, layout="bhsd"), whole)
    one = torch.randn(2, 1, 1, 8).transpose(1, 2), torch.randn(2, 1, 1)
    tilewise.merge(one, one)  # of one token and one head both layouts are the same


def test_packed_parts() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 6], dtype=torch.int32)
    three = torch.tensor([0, 3], dtype=torch.int32)
    whole = tilewise.attention_varlen(q, k, v, cu, cu, return_lse=True)
    parts = [
        tilewise.attention_varlen(q, k[cut], v[cut], cu, three, return_lse=True) for cut in (slice(3), slice(3, 6))
    ]
    assert_close(tilewise.merge(*parts), whole)
