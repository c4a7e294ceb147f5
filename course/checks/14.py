from tilewise_lab.learn import expect


def check(answer):
    expect(
        answer.phases(0, 2)[0] == 0 and answer.phases(3, 2)[0] == 1,
        "buffers are used in turn: iteration % buffers",
        "缓冲区轮流使用：iteration % buffers",
    )
    for buffers in (1, 2, 3, 4):
        fills = [0] * buffers
        for iteration in range(4 * buffers):
            buffer, full, empty = answer.phases(iteration, buffers)
            expect(
                buffer == iteration % buffers,
                f"iteration {iteration} of {buffers} buffers uses buffer {iteration % buffers}",
                f"{buffers} 个缓冲区时，第 {iteration} 次迭代用缓冲区 {iteration % buffers}",
            )
            expect(
                full == fills[buffer] % 2,
                f"iteration {iteration}: the {fills[buffer] + 1}. fill of its buffer completes phase {fills[buffer] % 2}",
                f"第 {iteration} 次迭代：它的缓冲区第 {fills[buffer] + 1} 次填充，完成的是相位 {fills[buffer] % 2}",
            )
            expect(
                empty == 1 - full,
                f"iteration {iteration}: the producer waits for the release *before*, the other phase",
                f"第 {iteration} 次迭代：生产者等待的是*上一次*释放，即另一个相位",
            )
            fills[buffer] += 1
