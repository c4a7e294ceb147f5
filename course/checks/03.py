import math
import random

from tilewise_lab.learn import expect


def state(xs):
    m = max(xs, default=-math.inf)
    return m, sum(math.exp(x - m) for x in xs if x > -math.inf)


def close(a, b):
    return a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-9, abs_tol=1e-12)


def check(answer):
    a, b = [3.0, 2.0], [5.0, 1.0]
    got = answer.merge(state(a), state(b))
    mixed = state(a)[1] + state(b)[1]
    expect(not math.isclose(got[1], mixed), "l_a and l_b were taken under different maxima: correct each before adding")
    expect(close(got, state(a + b)), f"merging [3, 2] with [5, 1] gives {got}; it is {state(a + b)}")
    expect(close(answer.merge(state(b), state(a)), state(a + b)), "the other way round it must be the same")
    empty = -math.inf, 0.0
    both = answer.merge(empty, empty)
    expect(not math.isnan(both[1]), "two empty states give nan: -inf - (-inf) is no number; take 0 for that maximum")
    expect(close(both, empty), f"two empty states give {both}, not (-inf, 0)")
    expect(close(answer.merge(empty, state(a)), state(a)), "merging with nothing must change nothing")
    for _ in range(50):
        xs = [random.uniform(-700, 700) for _ in range(random.randint(0, 9))]
        expect(close(answer.denominator(xs), state(xs)), f"denominator({xs}) is {state(xs)}")
