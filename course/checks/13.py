import torch
from tilewise_lab.derivation import attention, gradient
from tilewise_lab.learn import expect


def check(answer):
    torch.manual_seed(2)
    q, k, v, do = (torch.randn(8, 4, dtype=torch.float64) for _ in range(4))
    o, lse = attention.fa2(q, k, v, rows=4, columns=4)
    delta = (do * o).sum(-1)
    exact = gradient.naive(q, k, v, do)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for i in (slice(0, 4), slice(4, 8)):
        for j in (slice(0, 2), slice(2, 8)):
            a, b, c = answer.block_gradients(
                q[i], k[j], v[j], do[i], lse[i], delta[i]
            )
            expect(
                a.shape == q[i].shape
                and b.shape == k[j].shape
                and c.shape == v[j].shape,
                "dQ, dK, dV have the shapes of q, k, v",
                "dQ、dK、dV 的形状与 q、k、v 相同",
            )
            dq[i] += a
            dk[j] += b
            dv[j] += c
    expect(
        torch.allclose(dv, exact[2]),
        "dV = Pᵀ dO with P = exp(S - lse)",
        "dV = Pᵀ dO，其中 P = exp(S - lse)",
    )
    expect(
        not torch.allclose(dq, 2 * exact[0]),
        "the 1/√D belongs to dQ and dK as well",
        "dQ 和 dK 里也要有 1/√D",
    )
    expect(
        torch.allclose(dq, exact[0]),
        "dQ = dS K / √D with dS = P ∘ (dO Vᵀ - delta)",
        "dQ = dS K / √D，其中 dS = P ∘ (dO Vᵀ - delta)",
    )
    expect(
        torch.allclose(dk, exact[1]),
        "dK = dSᵀ Q / √D",
        "dK = dSᵀ Q / √D，用的是 dS 的转置",
    )
