from tilewise_lab.learn import expect
from tilewise_lab.machine.coalesce import strided, touched


def check(answer):
    expect(
        answer.lines(4096, 4, 1) == 1,
        "32 neighbouring floats are 128 bytes: one line",
        "32 个相邻的浮点数是 128 字节：一行",
    )
    expect(
        answer.lines(4096, 4, 0) == 32,
        "in a column of 4096 floats every lane is a line of its own",
        "一行有 4096 个浮点数时，按列读取，每个 lane 各占一行",
    )
    for columns in (1, 2, 8, 31, 32, 33, 100, 4096):
        for itemsize in (1, 2, 4, 8):
            for axis in (0, 1):
                exact = touched(
                    strided(1 if axis else columns), itemsize
                ).lines
                got = answer.lines(columns, itemsize, axis)
                expect(
                    got == exact,
                    f"lines({columns}, {itemsize}, {axis}) is {exact}, not {got}",
                    f"lines({columns}, {itemsize}, {axis}) 应为 {exact}，而不是 {got}",
                )
