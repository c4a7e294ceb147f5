import math

import torch

from tilewise_lab.learn import compare, expect


def zigzag(answer):
    for n, ranks in ((16, 2), (24, 4), (6, 3), (4, 1)):
        size = n // (2 * ranks)
        chunks = [list(range(at, at + size)) for at in range(0, n, size)]
        compare(
            f"zigzag({n}, {ranks})",
            [list(x) for x in answer.zigzag(n, ranks)],
            [chunks[r] + chunks[2 * ranks - 1 - r] for r in range(ranks)],
            (
                [chunks[2 * r] + chunks[2 * r + 1] for r in range(ranks)],
                "the shards are contiguous: the last rank has most of the causal work",
                "分片是连续的：因果掩码下最后一个 rank 的工作最多",
            ),
            (
                [chunks[r] + chunks[r + ranks] for r in range(ranks)],
                "rank r holds chunks r and r + ranks: later ranks have more work; the second is 2 · ranks - 1 - r",
                "rank r 拿了第 r 段和第 r + ranks 段：靠后的 rank 工作更多；第二段应为 2 · ranks - 1 - r",
            ),
            (
                [chunks[2 * ranks - 1 - r] + chunks[r] for r in range(ranks)],
                "the two chunks are in the wrong order: chunk r comes first",
                "两段的顺序反了：第 r 段在前",
            ),
        )


def play(running, ranks):
    """All ranks in turn: what each has sent goes to the next, until all have returned."""
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


def finished(done, messages, ranks, name):
    """(o, lse) of all ranks, or a hint why there is none."""
    expect(
        done is not None,
        f"{name} must be a generator: it needs a `yield`",
        f"{name} 必须是生成器：里面要有 `yield`",
    )
    expect(
        all(isinstance(x, tuple) for x in done),
        f"with {ranks} ranks, not every rank returns (o, lse)",
        f"{ranks} 个 rank 时，并不是每个都返回了 (o, lse)",
    )
    return (torch.cat([x[i] for x in done]) for i in range(2))


def few(messages, ranks):
    expect(
        messages <= ranks * (ranks - 1),
        f"{messages} messages; {ranks - 1} from each rank are enough: the last one would bring your own keys back",
        f"发了 {messages} 条消息；每个 rank 发 {ranks - 1} 条就够了：最后一条只会把自己的键带回来",
    )


def blocks(s, v, ranks):
    """Attention of every rank's queries to each rank's keys: outputs and logsumexps (ranks, N, ..)."""
    pairs = list(zip(s.chunk(ranks, 1), v.chunk(ranks), strict=True))
    return torch.stack(
        [torch.softmax(a, -1) @ b for a, b in pairs]
    ), torch.stack([a.logsumexp(-1) for a, _ in pairs])


def own(outs, ranks):
    return torch.cat([rows.chunk(ranks)[r] for r, rows in enumerate(outs)])


def rank_attention(answer):
    torch.manual_seed(4)
    for ranks in (1, 2, 5):
        q, k, v = (
            torch.randn(ranks * 3, 4, dtype=torch.float64) * 2
            for _ in range(3)
        )
        s = q @ k.mT / math.sqrt(4)
        running = [
            answer.rank_attention(*x, ranks)
            for x in zip(
                q.chunk(ranks), k.chunk(ranks), v.chunk(ranks), strict=True
            )
        ]
        done, messages = play(running, ranks)
        o, lse = finished(done, messages, ranks, "rank_attention")
        outs, _ = blocks(s, v, ranks)
        stuck = [
            torch.cat(
                [
                    rows.chunk(ranks, 1)[(r - hop) % ranks]
                    for hop in [0, *[1] * (ranks - 1)]
                ],
                1,
            )
            for r, rows in enumerate(s.chunk(ranks))
        ]
        values = [
            torch.cat(
                [
                    v.chunk(ranks)[(r - hop) % ranks]
                    for hop in [0, *[1] * (ranks - 1)]
                ]
            )
            for r in range(ranks)
        ]
        compare(
            f"ranks = {ranks}: o",
            o,
            torch.softmax(s, -1) @ v,
            (
                own(outs, ranks),
                "each rank has only seen its own keys: attend to what is received and merge",
                "每个 rank 只看了自己的键：收到的键也要做注意力并合并",
            ),
            (
                outs.sum(0),
                "the parts are added: merge with weights exp(L_a - L)",
                "各份直接相加了：合并的权重是 exp(L_a - L)",
            ),
            (
                outs.mean(0),
                "this is the mean of the parts: merge with weights exp(L_a - L)",
                "这是各份的平均：合并的权重是 exp(L_a - L)",
            ),
            (
                torch.softmax(2 * s, -1) @ v,
                "your output equals the result without the factor 1/√D",
                "你的输出等于漏掉因子 1/√D 的结果",
            ),
            (
                torch.cat(
                    [
                        torch.softmax(a, -1) @ b
                        for a, b in zip(stuck, values, strict=True)
                    ]
                ),
                "every message carries your own keys: pass on what was received",
                "每条消息发的都是自己的键：要把收到的传下去",
            ),
        )
        compare(
            f"ranks = {ranks}: lse",
            lse,
            s.logsumexp(-1),
            (
                s.logsumexp(-1) - math.log(ranks),
                "this is the mean: L = log Σ exp(L_a)",
                "这是平均：L = log Σ exp(L_a)",
            ),
        )
        few(messages, ranks)


def causal_rank(answer):
    torch.manual_seed(5)
    for ranks in (2, 1, 4):
        q, k, v = (
            torch.randn(ranks * 3, 4, dtype=torch.float64) for _ in range(3)
        )
        s, i = q @ k.mT / math.sqrt(4), torch.arange(ranks * 3)
        later, shard = i > i[:, None], i // 3
        running = [
            answer.causal_rank(*x, r, ranks)
            for r, x in enumerate(
                zip(
                    q.chunk(ranks),
                    k.chunk(ranks),
                    v.chunk(ranks),
                    strict=True,
                )
            )
        ]
        done, messages = play(running, ranks)
        o, _ = finished(done, messages, ranks, "causal_rank")

        def attend(hidden, s=s, v=v):
            return torch.softmax(s.masked_fill(hidden, -torch.inf), -1) @ v

        compare(
            f"ranks = {ranks}: o",
            o,
            attend(later),
            (
                attend(later & False),
                "your output equals attention without a mask",
                "你的输出等于没有掩码的注意力",
            ),
            (
                attend(shard > shard[:, None]),
                "inside your own shard, tokens see later ones: mask j > i there",
                "自己的分片之内，token 看到了之后的 token：那里要遮住 j > i",
            ),
            (
                attend(later & (shard == shard[:, None])),
                "shards of later ranks are attended to: only those of earlier ranks are seen",
                "对后面 rank 的分片也做了注意力：只看得到前面 rank 的分片",
            ),
            (
                attend((i % 3 > (i % 3)[:, None]) | (shard > shard[:, None])),
                "the mask is used for every shard: earlier shards are seen completely",
                "每个分片都用了掩码：前面的分片应完整看到",
            ),
            (
                attend(later | (shard < shard[:, None])),
                "each rank has only seen its own keys",
                "每个 rank 只看了自己的键",
            ),
            (
                attend(
                    later & (shard == shard[:, None])
                    | (shard < shard[:, None])
                ),
                "earlier and later ranks are exchanged: attend to the shards of earlier ranks",
                "前后的 rank 弄反了：应对前面 rank 的分片做注意力",
            ),
        )
        few(messages, ranks)


EXERCISES = (zigzag, rank_attention, causal_rank)
