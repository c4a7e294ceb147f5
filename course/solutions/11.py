def span(
    first: int, rows: int, n_q: int, n_k: int, block: int
) -> tuple[int, int]:
    offset = n_k - n_q
    seen_by_all = min(max(first + offset + 1, 0), n_k)
    seen_by_some = min(max(first + rows - 1 + offset + 1, 0), n_k)
    return seen_by_all // block, -(-seen_by_some // block)
