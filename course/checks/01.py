from tilewise_lab.costs.cost import Call, traffic
from tilewise_lab.learn import expect


def check(answer):
    for n, d, itemsize, dtype in (
        (1024, 64, 2, "float16"),
        (4096, 128, 2, "bfloat16"),
        (64, 64, 4, "float32"),
    ):
        call = Call(1, n, n, 1, 1, d, d, dtype=dtype)
        exact = call.flops() / traffic(call).naive
        got = answer.intensity(n, d, itemsize)
        expect(
            not 1.3 < got / exact < 2.5,
            "too much: S is written and read, and so is P: four passes over (n, n)",
            "太大了：S 要写一次、读一次，P 也一样：一共四遍 (n, n)",
        )
        expect(
            abs(got / exact - 0.5) > 0.01,
            "half of it: a multiply-add is 2 FLOPs",
            "只有一半：一次乘加是 2 FLOP",
        )
        expect(
            abs(got / exact - 1) < 1e-6,
            f"intensity({n}, {d}, {itemsize}) is {exact:.4f}, not {got:.4f}",
            f"intensity({n}, {d}, {itemsize}) 应为 {exact:.4f}，而不是 {got:.4f}",
        )
