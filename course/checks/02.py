import torch
from tilewise_lab.learn import expect


def check(answer):
    x = torch.randn(5, 7)
    got = answer.log_softmax(x)
    expect(
        got.shape == x.shape,
        f"shape {tuple(got.shape)}; x has {tuple(x.shape)}",
        f"形状是 {tuple(got.shape)}；x 的是 {tuple(x.shape)}",
    )
    expect(
        torch.allclose(got.exp().sum(-1), torch.ones(5), atol=1e-5),
        "its exponentials must add up to 1 in every row",
        "每一行的指数加起来必须等于 1",
    )
    expect(
        torch.allclose(got, torch.log_softmax(x, -1), atol=1e-5),
        "wrong even for small numbers",
        "连小的数都不对",
    )
    large = answer.log_softmax(torch.tensor([1000.0, 0.0]))
    expect(
        not large.isnan().any(),
        "x = [1000, 0] gives nan: subtract the maximum before exp",
        "x = [1000, 0] 得到 nan：取 exp 之前先减去最大值",
    )
    small = answer.log_softmax(torch.tensor([0.0, -1000.0]))
    expect(
        small.isfinite().all(),
        "x = [0, -1000] gives -inf: that is log(softmax(x)); keep x_i outside the log",
        "x = [0, -1000] 得到 -inf：那是 log(softmax(x))；让 x_i 留在 log 外面",
    )
    expect(
        torch.allclose(small, torch.tensor([0.0, -1000.0])),
        f"x = [0, -1000] gives {small.tolist()}",
        f"x = [0, -1000] 得到 {small.tolist()}",
    )
