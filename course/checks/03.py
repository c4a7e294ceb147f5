import math
import random

from tilewise_lab.learn import expect


def state(xs):
    m = max(xs, default=-math.inf)
    return m, sum(math.exp(x - m) for x in xs if x > -math.inf)


def close(a, b):
    return a[0] == b[0] and math.isclose(
        a[1], b[1], rel_tol=1e-9, abs_tol=1e-12
    )


def check(answer):
    a, b = [3.0, 2.0], [5.0, 1.0]
    got = answer.merge(state(a), state(b))
    mixed = state(a)[1] + state(b)[1]
    expect(
        not math.isclose(got[1], mixed),
        "l_a and l_b were taken under different maxima: correct each before adding",
        "l_a 和 l_b 以不同的最大值为基准：相加之前要各自修正",
    )
    expect(
        close(got, state(a + b)),
        f"merging [3, 2] with [5, 1] gives {got}; it is {state(a + b)}",
        f"合并 [3, 2] 与 [5, 1] 得到 {got}；应为 {state(a + b)}",
    )
    expect(
        close(answer.merge(state(b), state(a)), state(a + b)),
        "the other way round it must be the same",
        "反过来合并，结果必须一样",
    )
    empty = -math.inf, 0.0
    both = answer.merge(empty, empty)
    expect(
        not math.isnan(both[1]),
        "two empty states give nan: -inf - (-inf) is no number; take 0 for that maximum",
        "两个空状态得到 nan：-inf - (-inf) 不是数；这时最大值用 0 代替",
    )
    expect(
        close(both, empty),
        f"two empty states give {both}, not (-inf, 0)",
        f"两个空状态得到 {both}，应为 (-inf, 0)",
    )
    expect(
        close(answer.merge(empty, state(a)), state(a)),
        "merging with nothing must change nothing",
        "与空状态合并，什么都不应改变",
    )
    for _ in range(50):
        xs = [random.uniform(-700, 700) for _ in range(random.randint(0, 9))]
        expect(
            close(answer.denominator(xs), state(xs)),
            f"denominator({xs}) is {state(xs)}",
            f"denominator({xs}) 应为 {state(xs)}",
        )
