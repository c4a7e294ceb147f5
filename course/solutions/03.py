import math
from collections.abc import Iterator

State = tuple[float, float]


def merge(a: State, b: State) -> State:
    m = max(a[0], b[0])
    if m == -math.inf:
        return m, 0.0
    return m, a[1] * math.exp(a[0] - m) + b[1] * math.exp(b[0] - m)


def denominator(xs: Iterator[float]) -> State:
    m, l = -math.inf, 0.0
    for x in xs:
        m_new = max(m, x)
        l = l * math.exp(m - m_new) + math.exp(x - m_new)
        m = m_new
    return m, l


def weighted_mean(pairs: Iterator[tuple[float, float]]) -> float:
    m, l, o = -math.inf, 0.0, 0.0
    for x, v in pairs:
        m_new = max(m, x)
        factor, weight = math.exp(m - m_new), math.exp(x - m_new)
        m, l, o = m_new, l * factor + weight, o * factor + weight * v
    return o / l
