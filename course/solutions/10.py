def best_batch(
    tokens: int, heads: int, tile: int, slots: int, limit: int
) -> int:
    def busy(batch: int) -> float:
        blocks = -(-tokens // tile) * heads * batch
        waves = -(-blocks // slots)
        return blocks / (waves * slots)

    return max(range(1, limit + 1), key=lambda batch: (busy(batch), -batch))
