import torch

from tilewise_lab.learn import expect


def check(answer):
    x = torch.randn(5, 7)
    got = answer.log_softmax(x)
    expect(got.shape == x.shape, f"shape {tuple(got.shape)}; x has {tuple(x.shape)}")
    expect(
        torch.allclose(got.exp().sum(-1), torch.ones(5), atol=1e-5), "its exponentials must add up to 1 in every row"
    )
    expect(torch.allclose(got, torch.log_softmax(x, -1), atol=1e-5), "wrong even for small numbers")
    large = answer.log_softmax(torch.tensor([1000.0, 0.0]))
    expect(not large.isnan().any(), "x = [1000, 0] gives nan: subtract the maximum before exp")
    small = answer.log_softmax(torch.tensor([0.0, -1000.0]))
    expect(small.isfinite().all(), "x = [0, -1000] gives -inf: that is log(softmax(x)); keep x_i outside the log")
    expect(torch.allclose(small, torch.tensor([0.0, -1000.0])), f"x = [0, -1000] gives {small.tolist()}")
