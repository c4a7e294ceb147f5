import math

import torch

from tilewise_lab.learn import compare, expect, say
from tilewise_lab.trace.graph import Value


def tanh(answer):
    for v in (-2.0, 0.3):
        x = Value(v)
        y = answer.tanh(x)
        t = math.tanh(v)
        compare(f"tanh({v})", float(y.value), t)
        y.backward()
        compare(
            say(f"the derivative of tanh at {v}", f"tanh 在 {v} 处的导数"),
            float(x.gradient),
            1 - t * t,
            (
                1.0,
                "your local derivative is 1: it is 1 - tanh²",
                "你的局部导数是 1：应为 1 - tanh²",
            ),
            (
                t,
                "your local derivative is tanh itself: it is 1 - tanh²",
                "你的局部导数是 tanh 本身：应为 1 - tanh²",
            ),
            (
                1 - v * v,
                "you squared x: the derivative is 1 - tanh(x)²",
                "你平方的是 x：导数是 1 - tanh(x)²",
            ),
            (
                0.0,
                "no gradient arrives: made_from must name x",
                "没有梯度传到：made_from 里要有 x",
            ),
        )
    x = Value(0.5)
    both = answer.tanh(x) + answer.tanh(x)
    both.backward()
    compare(
        say(
            "the gradient of an input that is used twice",
            "用了两次的输入的梯度",
        ),
        float(x.gradient),
        2 * (1 - math.tanh(0.5) ** 2),
    )


def maximum(answer):
    for a, b in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0)):
        x, y = Value(a), Value(b)
        z = answer.maximum(x, y) * 3.0
        z.backward()
        expect(
            z.value == 3 * max(a, b),
            f"maximum({a}, {b}) is {max(a, b)}",
            f"maximum({a}, {b}) 应为 {max(a, b)}",
        )
        compare(
            say(
                f"the gradients of 3 · maximum({a}, {b})",
                f"3 · maximum({a}, {b}) 的梯度",
            ),
            (float(x.gradient), float(y.gradient)),
            (3.0, 0.0) if a >= b else (0.0, 3.0),
            (
                (3.0, 3.0),
                "both inputs get the gradient: only the larger one changes the result",
                "两个输入都得到了梯度：只有较大的会改变结果",
            ),
            (
                (0.0, 3.0),
                "equal inputs: the gradient goes to x",
                "两者相等：梯度归 x",
            ),
            (
                (3.0, 0.0),
                "the gradient always goes to x: it belongs to the larger input",
                "梯度总是给了 x：应归较大的输入",
            ),
            (
                (1.5, 1.5),
                "the gradient is divided: here it goes to x alone",
                "梯度平分了：这里只归 x",
            ),
        )


def linear_backward(answer):
    torch.manual_seed(0)
    for n, k, m in ((4, 4, 4), (5, 3, 2)):
        x, w, dy = (
            torch.randn(*shape, dtype=torch.float64)
            for shape in ((n, k), (k, m), (n, m))
        )
        dx, dw, db = answer.linear_backward(x, w, dy)
        square = n == m
        compare(
            "dX",
            dx,
            dy @ w.T,
            (
                dy @ w if square else None,
                "your dX equals dY W: the transpose is missing, dX = dY Wᵀ",
                "你的 dX 等于 dY W：漏了转置，dX = dY Wᵀ",
            ),
            (
                w @ dy if square else None,
                "the product is the wrong way round: dX = dY Wᵀ",
                "乘法的顺序反了：dX = dY Wᵀ",
            ),
        )
        compare(
            "dW",
            dw,
            x.T @ dy,
            (
                x @ dy if square else None,
                "your dW equals X dY: the transpose is missing, dW = Xᵀ dY",
                "你的 dW 等于 X dY：漏了转置，dW = Xᵀ dY",
            ),
            (
                dy.T @ x,
                "your dW is transposed: it has the shape of W, dW = Xᵀ dY",
                "你的 dW 转置了：形状应与 W 相同，dW = Xᵀ dY",
            ),
        )
        compare(
            "db",
            db,
            dy.sum(0),
            (
                dy,
                "b was added to every row: add up its gradients over the rows",
                "b 加到了每一行上：要把各行的梯度加起来",
            ),
            (
                dy.mean(0),
                "this is the mean over the rows: it is the sum",
                "这是各行的平均：应为和",
            ),
            (
                dy.sum(1),
                "you summed over the columns: b is added to every row, sum over the rows",
                "你沿列求和了：b 加到每一行上，应沿行求和",
            ),
        )


EXERCISES = (tanh, maximum, linear_backward)
