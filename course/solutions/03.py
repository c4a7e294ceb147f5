import math

State = tuple[float, float]


def merge(a: State, b: State) -> State:
    m = max(a[0], b[0])
    if m == -math.inf:
        return m, 0.0
    return m, a[1] * math.exp(a[0] - m) + b[1] * math.exp(b[0] - m)


def denominator(xs: list[float]) -> State:
    state = -math.inf, 0.0
    for x in xs:
        state = merge(state, (x, 1.0))
    return state
