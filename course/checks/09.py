from tilewise_lab.learn import expect
from tilewise_lab.machine.pipeline import pipelined, sequential, slots


def check(answer):
    expect(
        answer.finish(1, [1, 1, 1, 1]) == 4,
        "one iteration alone takes the sum of its stages",
        "单独一个迭代的耗时是各阶段之和",
    )
    got = answer.finish(7, [1, 1, 1, 1])
    expect(
        got != slots(sequential(7)),
        "28: nothing overlaps; an iteration may enter a stage while the one before is in the next",
        "28：毫无重叠；前一个迭代进入下一阶段时，后一个就可以进入这一阶段",
    )
    expect(
        got == slots(pipelined(7)),
        f"7 iterations of 4 equal stages take 10, not {got}",
        f"4 个等长阶段、7 个迭代应为 10，而不是 {got}",
    )
    expect(
        answer.finish(5, [1, 3, 1]) == 1 + 5 * 3 + 1,
        "the slowest stage sets the pace: 1 + 5·3 + 1",
        "最慢的阶段决定节奏：1 + 5·3 + 1",
    )
    for n, durations in ((4, [2, 5, 1, 3]), (3, [4]), (10, [1, 2, 3, 4])):
        exact = sum(durations) + (n - 1) * max(durations)
        expect(
            answer.finish(n, durations) == exact,
            f"finish({n}, {durations}) is {exact}",
            f"finish({n}, {durations}) 应为 {exact}",
        )
