import torch

from tilewise_lab.learn import compare, expect


def softmax(answer):
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64)
    e = torch.exp(x)
    compare(
        "softmax(x)",
        answer.softmax(x),
        torch.softmax(x, -1),
        (
            e / e.sum(),
            "you divide by the sum over the whole matrix; each row has its own: sum(-1, keepdim=True)",
            "你除以了整个矩阵的和；每一行有自己的和：sum(-1, keepdim=True)",
        ),
        (
            torch.exp(x - x.amax(-1, keepdim=True))
            / torch.exp(x - x.amax(-1, keepdim=True)).sum(),
            "you divide by the sum over the whole matrix; each row has its own: sum(-1, keepdim=True)",
            "你除以了整个矩阵的和；每一行有自己的和：sum(-1, keepdim=True)",
        ),
        (
            torch.exp(x - x.amax(-1, keepdim=True)),
            "your result equals exp(x - max): the division by the sum of the row is missing",
            "你的结果等于 exp(x - max)：漏了除以这一行的和",
        ),
    )
    large = answer.softmax(torch.tensor([[1000.0, 0.0]]))
    expect(
        not large.isnan().any(),
        "x = [1000, 0] gives nan: exp overflows; subtract the maximum of the row before exp",
        "x = [1000, 0] 得到 nan：exp 溢出了；取 exp 之前先减去这一行的最大值",
    )
    low = answer.softmax(torch.tensor([[1000.0, 999.0], [-1000.0, -1001.0]]))
    expect(
        not low.isnan().any(),
        "a row of -1000 next to one of 1000 gives nan: each row needs its own maximum, amax(-1, keepdim=True)",
        "一行在 1000 附近、另一行在 -1000 附近时得到 nan：每一行要减自己的最大值，amax(-1, keepdim=True)",
    )


def log_softmax(answer):
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64)
    compare(
        "log_softmax(x)",
        answer.log_softmax(x),
        torch.log_softmax(x, -1),
        (
            torch.softmax(x, -1),
            "this is softmax itself, without the log",
            "这是 softmax 本身，没有取对数",
        ),
        (
            x
            - torch.log(
                torch.exp(x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True)
            ),
            "the maximum was subtracted inside the sum and not outside: subtract it from x_i too, or add it to the log",
            "最大值只在求和里减了：x_i 也要减去它，或者把它加到对数上",
        ),
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
    compare("log_softmax([0, -1000])", small, torch.tensor([0.0, -1000.0]))


def masked_softmax(answer):
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    seen = torch.rand(4, 6) < 0.6
    seen[:, 0] = True
    afterwards = torch.softmax(x, -1) * seen
    compare(
        "masked_softmax(x, seen)",
        answer.masked_softmax(x, seen),
        torch.softmax(x.masked_fill(~seen, -torch.inf), -1),
        (
            afterwards,
            "you masked after softmax: the rows no longer add up to 1; put -inf in place of hidden scores first",
            "你在 softmax 之后才遮盖：每一行的和不再是 1；应先把看不到的分数换成 -inf",
        ),
        (
            torch.softmax(x * seen, -1),
            "hidden scores are 0 here, and exp(0) = 1: they must be -inf",
            "看不到的分数在这里变成了 0，而 exp(0) = 1：应为 -inf",
        ),
    )
    low = torch.tensor([[-2e6, -2e6 - 1, 5.0]], dtype=torch.float64)
    some = torch.tensor([[True, True, False]])
    expect(
        answer.masked_softmax(low, some)[0, 2] == 0,
        "valid scores of -2e6 lose to a hidden one: -1e6 is not -inf",
        "有效分数是 -2e6 时输给了被遮住的：-1e6 不等于 -inf",
    )
    none = answer.masked_softmax(x, torch.zeros(4, 6).bool())
    expect(
        not none.isnan().any(),
        "a row that sees nothing gives nan: -inf - (-inf), and 0 / 0; subtract 0 and divide by 1 there",
        "一个元素也看不到的行得到 nan：-inf - (-inf)，以及 0 / 0；这时减 0、除以 1",
    )
    expect(
        not none.any(),
        "a row that sees nothing must get zeros, not the mean",
        "一个元素也看不到的行，权重应为 0，而不是平均",
    )


EXERCISES = (softmax, log_softmax, masked_softmax)
