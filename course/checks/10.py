from tilewise_lab.costs.waves import waves
from tilewise_lab.learn import expect


def check(answer):
    for tokens, heads, tile, slots, limit in (
        (1000, 12, 128, 132, 16),
        (2048, 8, 128, 108, 32),
        (77, 5, 64, 132, 40),
    ):
        busy = {
            b: waves(-(-tokens // tile) * heads * b, slots).efficiency
            for b in range(1, limit + 1)
        }
        exact = min(busy, key=lambda b: (-busy[b], b))
        got = answer.best_batch(tokens, heads, tile, slots, limit)
        expect(
            1 <= got <= limit,
            f"{got} is not in 1 .. {limit}",
            f"{got} 不在 1 .. {limit} 之内",
        )
        expect(
            got == exact,
            f"{tokens} tokens, {heads} heads, tile {tile}, {slots} slots: batch {exact} keeps {busy[exact]:.1%} busy, {got} {busy[got]:.1%}",
            f"{tokens} 个 token，{heads} 个头，tile {tile}，{slots} 个 slot：batch {exact} 的忙碌比例是 {busy[exact]:.1%}，{got} 是 {busy[got]:.1%}",
        )
