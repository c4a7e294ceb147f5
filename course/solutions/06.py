def hbm_bytes(
    n: int, d: int, rows: int, columns: int, order: str, itemsize: int = 4
) -> int:
    matrix, statistic = n * d, n
    if order == "fa1":
        each_block_of_keys = (
            matrix + 2 * matrix + 2 * 2 * statistic
        )  # q in; o, m and l in and out
        elements = 2 * matrix + n // columns * each_block_of_keys
    else:
        elements = matrix + n // rows * 2 * matrix + matrix + statistic
    return itemsize * elements
