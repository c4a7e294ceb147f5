import math
import random

from tilewise_lab.learn import compare, expect


def state(xs):
    m = max(xs, default=-math.inf)
    return m, float(sum(math.exp(x - m) for x in xs if x > -math.inf))


def merge(answer):
    (m_a, l_a), (m_b, l_b) = a, b = state([3.0, 2.0]), state([5.0, 1.0])
    both = state([3.0, 2.0, 5.0, 1.0])
    compare(
        "merge(state([3, 2]), state([5, 1]))",
        answer.merge(a, b),
        both,
        (
            (m_b, l_a + l_b),
            "your l is l_a + l_b, taken under different maxima: multiply each by exp(m_old - m_new) before adding",
            "你的 l 是 l_a + l_b，它们以不同的最大值为基准：相加之前要各自乘以 exp(m_old - m_new)",
        ),
        (
            (m_b, l_a * math.exp(m_b - m_a) + l_b),
            "the sign of the exponent is wrong: the factor is exp(m_old - m_new), at most 1",
            "指数的符号反了：因子是 exp(m_old - m_new)，不大于 1",
        ),
    )
    compare(
        "merge(state([5, 1]), state([3, 2]))",
        answer.merge(b, a),
        both,
        (
            (m_b, l_a + l_b),
            "only the first l was corrected: the second may have the smaller maximum, as here",
            "只修正了第一个 l：第二个的最大值也可能较小，就像这里",
        ),
    )
    empty = -math.inf, 0.0
    both = answer.merge(empty, empty)
    expect(
        not math.isnan(both[1]),
        "two empty states give nan: -inf - (-inf) is no number; return (-inf, 0) for them",
        "两个空状态得到 nan：-inf - (-inf) 不是数；这时应返回 (-inf, 0)",
    )
    compare("merge(empty, empty)", both, empty)
    compare("merge(empty, state([3, 2]))", answer.merge(empty, a), a)


def denominator(answer):
    xs = [3.0, 2.0, 5.0, 1.0]
    passes = [sum(math.exp(x - max(xs[: n + 1])) for n, x in enumerate(xs))]
    compare(
        "denominator([3, 2, 5, 1])",
        answer.denominator(iter(xs)),
        state(xs),
        (
            (5.0, passes[0]),
            "your l equals the sum without the factor exp(m_old - m_new): l₃ = 2.367879 instead of 1.185122",
            "你的 l 等于漏掉因子 exp(m_old - m_new) 的结果：l₃ = 2.367879，而不是 1.185122",
        ),
        (
            (5.0, 0.0),
            "l is 0: did you read the numbers twice? They can be read once",
            "l 是 0：是否读了两遍？这些数只能读一遍",
        ),
    )
    below = [-3.0, -5.0]
    compare(
        "denominator([-3, -5])",
        answer.denominator(iter(below)),
        state(below),
        (
            (0.0, sum(map(math.exp, below))),
            "the maximum started at 0: start at m = -inf",
            "最大值从 0 开始了：应从 m = -inf 开始",
        ),
    )
    compare("denominator([])", answer.denominator(iter([])), (-math.inf, 0.0))
    numbers = random.Random(0)
    for _ in range(20):
        xs = [
            numbers.uniform(-700, 700) for _ in range(numbers.randint(1, 9))
        ]
        compare(f"denominator({xs})", answer.denominator(iter(xs)), state(xs))


def weighted_mean(answer):
    xs, vs = [3.0, 2.0, 5.0, 1.0], [1.0, -2.0, 0.5, 4.0]
    weights = [math.exp(x - 5) for x in xs]
    l, o = sum(weights), sum(w * v for w, v in zip(weights, vs, strict=True))
    m, stale = -math.inf, 0.0
    for x, v in zip(xs, vs, strict=True):
        m = max(m, x)
        stale += math.exp(x - m) * v
    compare(
        "weighted_mean(x = [3, 2, 5, 1], v = [1, -2, 0.5, 4])",
        float(answer.weighted_mean(iter(zip(xs, vs, strict=True)))),
        o / l,
        (
            stale / l,
            "your output equals the result without the factor exp(m_old - m_new) on o: o must be corrected as l is",
            "你的输出等于 o 漏掉因子 exp(m_old - m_new) 的结果：o 要和 l 一样修正",
        ),
        (o, "the division by l at the end is missing", "漏了最后除以 l"),
        (
            sum(vs) / 4,
            "that is the plain mean: v is weighed with exp(x - m)",
            "这是普通的平均：v 要以 exp(x - m) 加权",
        ),
    )
    numbers = random.Random(1)
    pairs = [
        (numbers.uniform(-900, 900), numbers.uniform(-1, 1))
        for _ in range(50)
    ]
    most = max(x for x, _ in pairs)
    weights = [math.exp(x - most) for x, _ in pairs]
    exact = sum(
        w * v for w, (_, v) in zip(weights, pairs, strict=True)
    ) / sum(weights)
    compare(
        "weighted_mean(pairs), -900 <= x <= 900",
        float(answer.weighted_mean(iter(pairs))),
        exact,
    )


EXERCISES = (merge, denominator, weighted_mean)
