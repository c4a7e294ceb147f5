import math

import torch
from tilewise_lab.learn import expect


def play(answer, q, k, v, ranks):
    """All ranks in turn: what each has sent goes to the next, until all have returned."""
    running = [
        answer.rank_attention(*shard, ranks)
        for shard in zip(q, k, v, strict=True)
    ]
    if not all(hasattr(one, "send") for one in running):
        return None, 0
    done, box, messages = [None] * ranks, [None] * ranks, 0
    while any(x is None for x in done):
        sent = [None] * ranks
        for r, one in enumerate(running):
            if done[r] is None:
                try:
                    sent[r] = one.send(box[r])
                    messages += 1
                except StopIteration as end:
                    done[r] = end.value
        box = sent[-1:] + sent[:-1]
        if messages > 10 * ranks * ranks:
            break
    return done, messages


def check(answer):
    torch.manual_seed(4)
    for ranks in (1, 2, 5):
        q, k, v = (
            torch.randn(ranks * 3, 4, dtype=torch.float64) * 3
            for _ in range(3)
        )
        s = q @ k.mT / math.sqrt(4)
        done, messages = play(
            answer, q.chunk(ranks), k.chunk(ranks), v.chunk(ranks), ranks
        )
        expect(
            done is not None,
            "rank_attention must be a generator: it needs a `yield`",
            "rank_attention 必须是生成器：里面要有 `yield`",
        )
        expect(
            all(isinstance(x, tuple) for x in done),
            f"with {ranks} ranks, not every rank returns (o, lse)",
            f"{ranks} 个 rank 时，并不是每个都返回了 (o, lse)",
        )
        o, lse = (torch.cat([x[i] for x in done]) for i in range(2))
        exact = torch.softmax(s, -1) @ v
        own = torch.cat(
            [
                torch.softmax(a, -1) @ b
                for a, b in zip(
                    block_diagonal(s, ranks), v.chunk(ranks), strict=True
                )
            ]
        )
        if ranks > 1:
            expect(
                not torch.allclose(o, own),
                "each rank has only seen its own keys: what is received must be attended to and merged",
                "每个 rank 只看了自己的键：收到的键也要做注意力并合并",
            )
        expect(
            torch.allclose(o, exact),
            f"{ranks} ranks: o is off by {(o - exact).abs().max():.1e}; merge with weights exp(L_a - L), and pass on what was received",
            f"{ranks} 个 rank：o 相差 {(o - exact).abs().max():.1e}；合并的权重是 exp(L_a - L)，并且要把收到的传下去",
        )
        expect(
            torch.allclose(lse, s.logsumexp(-1)),
            f"{ranks} ranks: lse is wrong",
            f"{ranks} 个 rank：lse 不对",
        )
        expect(
            messages <= ranks * (ranks - 1),
            f"{messages} messages; {ranks - 1} from each rank are enough: the last one would bring your own keys back",
            f"发了 {messages} 条消息；每个 rank 发 {ranks - 1} 条就够了：最后一条只会把自己的键带回来",
        )


def block_diagonal(s, ranks):
    return [rows.chunk(ranks, 1)[r] for r, rows in enumerate(s.chunk(ranks))]
