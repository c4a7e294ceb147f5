from tilewise_lab.learn import expect
from tilewise_lab.machine.coalesce import strided, touched


def check(answer):
    expect(answer.lines(4096, 4, 1) == 1, "32 neighbouring floats are 128 bytes: one line")
    expect(answer.lines(4096, 4, 0) == 32, "in a column of 4096 floats every lane is a line of its own")
    for columns in (1, 2, 8, 31, 32, 33, 100, 4096):
        for itemsize in (1, 2, 4, 8):
            for axis in (0, 1):
                exact = touched(strided(1 if axis else columns), itemsize).lines
                got = answer.lines(columns, itemsize, axis)
                expect(got == exact, f"lines({columns}, {itemsize}, {axis}) is {exact}, not {got}")
