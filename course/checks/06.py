from tilewise_lab import trace
from tilewise_lab.learn import expect


def check(answer):
    for order in ("fa2", "fa1"):
        for n, d, rows, columns in (
            (16, 4, 4, 4),
            (24, 8, 4, 8),
            (32, 4, 16, 2),
        ):
            total = trace.attention(
                n, n, d=d, rows=rows, columns=columns, order=order
            )["totals"]
            exact = sum(total["loaded"].values()) + sum(
                total["stored"].values()
            )
            got = answer.hbm_bytes(n, d, rows, columns, order)
            expect(
                got == exact,
                f"{order}, n {n}, d {d}, blocks of {rows} and {columns}: {exact} bytes, not {got}",
                f"{order}，n {n}，d {d}，块大小 {rows} 和 {columns}：应为 {exact} 字节，而不是 {got}",
            )
