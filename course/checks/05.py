import torch
from tilewise_lab.learn import expect


def attend(answer, s, v, block):
    n = s.shape[0]
    state = (
        s.new_full((n,), -torch.inf),
        s.new_zeros(n),
        s.new_zeros(n, v.shape[1]),
    )
    for s_j, v_j in zip(s.split(block, 1), v.split(block), strict=True):
        state = answer.step(state, s_j, v_j)
    return state


def check(answer):
    torch.manual_seed(1)
    s, v = (
        torch.randn(5, 12, dtype=torch.float64) * 10,
        torch.randn(12, 3, dtype=torch.float64),
    )
    exact = torch.softmax(s, -1) @ v
    m, l, o = attend(answer, s, v, 4)
    expect(
        m.shape == (5,) and l.shape == (5,) and o.shape == (5, 3),
        "return (m, l, o) in the shapes they came in",
        "返回 (m, l, o)，形状与传入时相同",
    )
    expect(
        torch.equal(m, s.amax(-1)),
        "m must be the maximum over all blocks, not over the last",
        "m 必须是所有块的最大值，而不是最后一块的",
    )
    expect(
        torch.allclose(l, torch.exp(s - m[:, None]).sum(-1)),
        "l must be corrected by exp(m_old - m_new) at each step",
        "每一步都要用 exp(m_old - m_new) 修正 l",
    )
    expect(
        not torch.allclose(o, exact),
        "do not divide inside the step: o is the numerator, the division comes at the end",
        "不要在步骤里做除法：o 是分子，最后才除",
    )
    expect(
        torch.allclose(o / l[:, None], exact),
        "o must be corrected by the same factor as l",
        "o 要用与 l 相同的因子修正",
    )
    masked = s.masked_fill(torch.rand(5, 12) < 0.4, -torch.inf)
    masked[2] = -torch.inf
    m, l, o = attend(answer, masked, v, 4)
    expect(
        not o.isnan().any() and not l.isnan().any(),
        "a row with only masked keys gives nan: exp(-inf - (-inf))",
        "键全部被遮住的行得到 nan：exp(-inf - (-inf))",
    )
    expect(
        m[2] == -torch.inf and l[2] == 0 and not o[2].any(),
        "such a row must stay (-inf, 0, 0)",
        "这样的行必须保持 (-inf, 0, 0)",
    )
    others = [0, 1, 3, 4]
    expect(
        torch.allclose(
            (o / l[:, None])[others], torch.softmax(masked[others], -1) @ v
        ),
        "wrong where keys are masked",
        "有键被遮住时不对",
    )
