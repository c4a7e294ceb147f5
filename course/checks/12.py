import math

from tilewise_lab.learn import expect
from tilewise_lab.trace.graph import Value


def check(answer):
    for v in (-2.0, 0.0, 0.3):
        x = Value(v)
        y = answer.tanh(x)
        expect(
            math.isclose(y.value, math.tanh(v), abs_tol=1e-12),
            f"tanh({v}) is {math.tanh(v)}",
            f"tanh({v}) 应为 {math.tanh(v)}",
        )
        y.backward()
        expect(
            math.isclose(x.gradient, 1 - math.tanh(v) ** 2),
            f"the derivative of tanh at {v} is 1 - tanh² = {1 - math.tanh(v) ** 2}",
            f"tanh 在 {v} 处的导数是 1 - tanh² = {1 - math.tanh(v) ** 2}",
        )
    for a, b in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0)):
        x, y = Value(a), Value(b)
        z = answer.maximum(x, y) * 3.0
        z.backward()
        want = (3.0, 0.0) if a >= b else (0.0, 3.0)
        expect(
            z.value == 3 * max(a, b),
            f"maximum({a}, {b}) is {max(a, b)}",
            f"maximum({a}, {b}) 应为 {max(a, b)}",
        )
        expect(
            (x.gradient, y.gradient) == want,
            f"only the larger input of maximum({a}, {b}) gets the gradient",
            f"maximum({a}, {b}) 只有较大的输入得到梯度",
        )
    x = Value(0.5)
    both = answer.tanh(x) + answer.maximum(x, Value(0.0))
    both.backward()
    expect(
        math.isclose(x.gradient, 1 - math.tanh(0.5) ** 2 + 1),
        "an input used twice collects both gradients",
        "用了两次的输入要把两份梯度加起来",
    )
