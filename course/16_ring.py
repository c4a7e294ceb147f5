# %% [markdown]
# # 16. The ring: one sequence on many GPUs
#
# A sequence too long for one GPU is divided by its tokens: of $R$ ranks each holds $N / R$ rows of $Q$, $K$ and $V$,
# and owns its rows of $O$. But every query wants to see every key, and the keys are elsewhere. Lesson 15 sent nothing
# anywhere: a processor could read all of the cache. Here the keys themselves must travel, and the merge says that they
# may come in any order and any pieces:
#
# $$(O, L) = (O_0, L_0) \oplus (O_1, L_1) \oplus \cdots \oplus (O_{R-1}, L_{R-1})$$
#
# where $(O_a, L_a)$ is the attention of my queries over the keys of rank $a$, and $\oplus$ is the merge. So let the
# keys go around a ring: in every step each rank attends to the keys it has, merges, and passes them on to its
# neighbour. After $R$ steps every rank has seen all keys, and no rank ever held more than two shards.
#
# Ranks are written as a list here, and a message as a rotation of that list. That is all there is to it:

# %% [markdown] lang="zh"
# # 16. 环：许多 GPU 上的一个序列
#
# 一个序列长到一块 GPU 放不下，就按 token 分开：$R$ 个 rank，每个持有 $Q$、$K$、$V$ 的 $N / R$ 行，并负责 $O$ 的那些行。可是每个查询都要看到每个键，而键在别处。第 15 课不需要传送任何东西：处理器都能读到整个缓存。这里键本身必须移动，而合并告诉我们，它们可以按任意顺序、任意分段到来：
#
# $$(O, L) = (O_0, L_0) \oplus (O_1, L_1) \oplus \cdots \oplus (O_{R-1}, L_{R-1})$$
#
# 其中 $(O_a, L_a)$ 是我的查询对 rank $a$ 的键的注意力，$\oplus$ 就是合并。那就让键沿着一个环转：每一步，每个 rank 对手上的键做注意力，合并，再把键传给邻居。$R$ 步之后，每个 rank 都看过了所有的键，而且没有一个 rank 同时持有超过两份。
#
# 这里用一个列表表示各个 rank，用列表的轮转表示消息。全部就是这些：

# %%
import math

import torch

from tilewise_lab.costs.devices import device
from tilewise_lab.learn import picture, say, show


def attend(q, k, v, hide=None):
    """(O, L) of some keys, for all rows of q."""
    s = q @ k.T / math.sqrt(q.shape[-1])
    if hide is not None:
        s = s.masked_fill(hide, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
    return p @ v, lse


def merge(a, b):
    (o_a, lse_a), (o_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)
    return o_a * torch.exp(lse_a - pivot)[:, None] + o_b * torch.exp(
        lse_b - pivot
    )[:, None], lse


def ring(q, k, v, where=None):
    """q, k, v: a list with the shard of every rank. where: the positions of
    each shard's tokens, if causal."""
    ranks = len(q)
    state = [
        (
            torch.zeros_like(x),
            torch.full((len(x),), -torch.inf, dtype=x.dtype),
        )
        for x in q
    ]
    travelling = list(zip(k, v, range(ranks), strict=True))
    for step in range(ranks):
        for r in range(ranks):  # all at once, on a real machine
            k_a, v_a, a = travelling[r]
            hide = (
                None
                if where is None
                else where[a][None, :] > where[r][:, None]
            )
            state[r] = merge(state[r], attend(q[r], k_a, v_a, hide))
        if step < ranks - 1:
            # rank r sends to r + 1
            travelling = travelling[-1:] + travelling[:-1]
    return state


torch.manual_seed(0)
n, d, ranks = 24, 8, 4
q, k, v = (torch.randn(n, d, dtype=torch.float64) for _ in range(3))
exact, exact_lse = attend(q, k, v)
found = ring(q.chunk(ranks), k.chunk(ranks), v.chunk(ranks))
show(
    [say("step", "步"), *(f"rank {r}" for r in range(ranks))],
    [
        [
            t,
            *(
                say(f"keys of {(r - t) % ranks}", f"{(r - t) % ranks} 的键")
                for r in range(ranks)
            ),
        ]
        for t in range(ranks)
    ],
    say("the keys that each rank has", "每个 rank 手上的键"),
)

# %% tags=["check"]
assert torch.allclose(torch.cat([o for o, _ in found]), exact)
assert torch.allclose(torch.cat([lse for _, lse in found]), exact_lse)

# %% [markdown]
# ## Causal: the last rank does all the work
#
# With a causal mask, rank 0 holds the first tokens, which see almost nothing, and the last rank those which see
# everything. All wait for the last. The work of a rank is the number of pairs (query, key) that its rows see; count
# it. Deal the tokens **zigzag** instead: cut the sequence into $2 R$ stretches and give rank $r$ the stretch $r$ and
# the stretch $2 R - 1 - r$, an early and a late one. Then all have the same.

# %% [markdown] lang="zh"
# ## 因果掩码：活都落在最后一个 rank 上
#
# 有因果掩码时，rank 0 持有最前面的 token，几乎什么都看不到；最后一个 rank 持有的 token 什么都看得到。大家都在等最后一个。一个 rank 的工作量，就是它的各行看得到的（查询，键）对数；数一数。换成**之字形**的发法：把序列切成 $2 R$ 段，rank $r$ 拿第 $r$ 段和第 $2 R - 1 - r$ 段，一段靠前，一段靠后。这样大家就一样多了。


# %%
def contiguous(n, ranks):
    return list(torch.arange(n).chunk(ranks))


def zigzag(n, ranks):
    stretches = torch.arange(n).chunk(2 * ranks)
    return [
        torch.cat([stretches[r], stretches[2 * ranks - 1 - r]])
        for r in range(ranks)
    ]


def pairs(where):
    # the query at position i sees i + 1 keys
    return [int((rows + 1).sum()) for rows in where]


layouts = {"contiguous": contiguous(n, ranks), "zigzag": zigzag(n, ranks)}
names = {
    "contiguous": say("contiguous", "连续"),
    "zigzag": say("zigzag", "之字形"),
}
show(
    [
        "",
        *(f"rank {r}" for r in range(ranks)),
        say("all wait for", "大家都要等"),
    ],
    [
        [
            names[name],
            *pairs(where),
            say(
                f"{max(pairs(where)) * ranks / sum(pairs(where)):.2f} × the "
                "mean",
                "平均的 "
                f"{max(pairs(where)) * ranks / sum(pairs(where)):.2f} 倍",
            ),
        ]
        for name, where in layouts.items()
    ],
    say("pairs that each rank computes", "每个 rank 计算多少对"),
)
causal = torch.arange(n)[None, :] > torch.arange(n)[:, None]
exact, exact_lse = attend(q, k, v, causal)
errors = []
for name, where in layouts.items():
    shards = ([x[rows] for rows in where] for x in (q, k, v))
    o = torch.empty_like(exact)
    o[torch.cat(where)] = torch.cat(
        [o for o, _ in ring(*shards, where=where)]
    )
    errors.append((o - exact).abs().max())
    print(names[name], f"{errors[-1]:.1e}")


# %% tags=["figure"]
def draw(axes):
    for name, where in layouts.items():
        axes.plot(range(ranks), pairs(where), "o-", label=name)
    axes.set(
        xlabel="rank",
        ylabel="pairs",
        ylim=(0, None),
        xticks=range(ranks),
        title="Causal work of each rank, by layout",
    )
    axes.legend()


picture(
    "16_work",
    draw,
    alt=say(
        "Pairs that each rank computes under a causal mask: with "
        "contiguous shards the work grows from the first rank to the "
        "last; with the zigzag layout all ranks have the same.",
        "因果掩码下每个 rank 计算的对数：连续分片时，从第一个 rank 到"
        "最后一个不断增加；zigzag 分片时各 rank 相同。",
    ),
)

# %% tags=["check"]
assert max(errors) < 1e-12
assert len(set(pairs(layouts["zigzag"]))) == 1

# %% [markdown]
# ## Is the wire fast enough?
#
# While a rank computes on the keys it has, the next ones are already under way: what counts is whether they arrive in
# time. In a step a rank does $4 n^2 H D$ FLOPs for $n = N / R$ tokens and $H$ heads, and receives $4 n H_k D$ bytes
# ($K$ and $V$ in 16 bit, for $H_k$ heads of keys). With $F$ FLOP/s and $B$ bytes/s the wire is hidden if
#
# $$\frac{4 n^2 H D}{F} \ge \frac{4 n H_k D}{B} \quad \text{that is} \quad n \ge \frac{F}{B} \cdot \frac{H_k}{H}$$
#
# The number of ranks is not in it: what matters is how many tokens *each* has. (A causal mask halves the work, and
# doubles the bound.)

# %% [markdown] lang="zh"
# ## 线够快吗？
#
# 一个 rank 在对手上的键做计算时，下一批键已经在路上：关键是能不能按时到。每一步，一个 rank 为 $n = N / R$ 个 token、$H$ 个头做 $4 n^2 H D$ 次浮点运算，收到 $4 n H_k D$ 字节（$K$ 和 $V$，16 位，$H_k$ 个键头）。算力 $F$ FLOP/s，带宽 $B$ 字节/s，传输被完全掩盖的条件是
#
# $$\frac{4 n^2 H D}{F} \ge \frac{4 n H_k D}{B} \quad \text{that is} \quad n \ge \frac{F}{B} \cdot \frac{H_k}{H}$$
#
# 里面没有 rank 的个数：要紧的是*每个* rank 有多少 token。（因果掩码让工作量减半，这个界就翻倍。）

# %%
flops = 0.6 * device("H200").flops("bfloat16")  # what a good kernel reaches
rows = []
for name, bandwidth in (
    ("NVLink, 450 GB/s", 450e9),
    ("InfiniBand, 50 GB/s", 50e9),
):
    for heads, kv_heads in ((32, 32), (32, 8)):
        rows.append(
            [
                name,
                f"{heads} / {kv_heads}",
                f"{flops / bandwidth * kv_heads / heads:,.0f}",
            ]
        )
show(
    say(
        ["link", "heads of queries / keys", "tokens per rank that hide it"],
        ["连接", "查询头 / 键头", "每个 rank 要多少 token 才盖得住"],
    ),
    rows,
)

# %% [markdown]
# ## The backward goes around too
#
# Lesson 13 needs of a block of keys nothing but the merged $L$ and $\delta = \mathrm{rowsum}(dO \circ O)$ of its rows,
# and each rank has these for its own rows. So the keys go around once more, and with them travel their gradients: each
# rank adds what its queries contribute, and after a full round $dK$ and $dV$ are home. Nothing is differentiated piece
# by piece.

# %% [markdown] lang="zh"
# ## 反向也绕环走
#
# 第 13 课对一块键的计算，需要的只是各行合并后的 $L$ 和 $\delta = \mathrm{rowsum}(dO \circ O)$，而每个 rank 都有自己那些行的。所以键再绕一圈，它们的梯度跟着一起走：每个 rank 加上自己的查询的贡献，绕完一整圈，$dK$ 和 $dV$ 就回到了家。没有任何东西是逐段求导的。


# %%
def ring_backward(q, k, v, state, do, where):
    ranks, scale = len(q), 1 / math.sqrt(q[0].shape[-1])
    dq = [torch.zeros_like(x) for x in q]
    travelling = [
        [k[r], v[r], torch.zeros_like(k[r]), torch.zeros_like(v[r]), r]
        for r in range(ranks)
    ]
    for _ in range(ranks):
        for r in range(ranks):
            k_a, v_a, dk, dv, a = travelling[r]
            o, lse = state[r]
            p = torch.exp(q[r] @ k_a.T * scale - lse[:, None])
            p = p.masked_fill(where[a][None, :] > where[r][:, None], 0.0)
            ds = (
                p
                * (do[r] @ v_a.T - (do[r] * o).sum(-1, keepdim=True))
                * scale
            )
            dq[r] += ds @ k_a
            dk += ds.T @ q[r]
            dv += p.T @ do[r]
        travelling = travelling[-1:] + travelling[:-1]
    # after R hops everything is home
    return (dq, [x[2] for x in travelling], [x[3] for x in travelling])


where = layouts["zigzag"]
do = torch.randn(n, d, dtype=torch.float64)
shards = [[x[rows] for rows in where] for x in (q, k, v)]
found = ring_backward(
    *shards, ring(*shards, where=where), [do[rows] for rows in where], where
)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
expected = torch.autograd.grad(attend(*leaves, causal)[0], leaves, do)
for name, a, b in zip(("dQ", "dK", "dV"), found, expected, strict=True):
    gathered = torch.empty_like(b)
    gathered[torch.cat(where)] = torch.cat(a)
    print(name, f"{(gathered - b).abs().max():.1e}")

# %% tags=["check"]
for a, b in zip(found, expected, strict=True):
    assert torch.allclose(torch.cat(a), b[torch.cat(where)])

# %% [markdown]
# ## In the library
#
# `tilewise.distributed` does this with torch.distributed between processes, for any mask, for packed documents and
# lengths that nothing divides; `rehearse` plays all ranks in one process, so that a plan can be tried without a
# cluster.

# %% [markdown] lang="zh"
# ## 在库里
#
# `tilewise.distributed` 用 torch.distributed 在进程之间做这件事，支持任意掩码、打包的文档，长度也不必整除；`rehearse` 在一个进程里扮演所有的 rank，没有集群也能试一个方案。

# %%
from tilewise import distributed

plan = distributed.plan(4, seqlen=n, causal=True, strategy="ring")
print(plan)
batch = [x[None, :, None].float() for x in (q, k, v)]
out = distributed.rehearse(*batch, plan=plan)

# %% tags=["check"]
import tilewise

assert plan.layout == "zigzag"
assert torch.allclose(out, tilewise.attention(*batch, causal=True), atol=1e-6)
assert torch.allclose(out[0, :, 0].double(), exact, atol=1e-5)

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `zigzag(n, ranks)`, which tokens each rank holds;
# `rank_attention(q, k, v, ranks)`, the part of *one* rank as a generator, whose `yield` sends keys and values to its
# neighbour and gives what was received; and `causal_rank(q, k, v, rank, ranks)`, the same with a causal mask. The
# checker runs all ranks side by side, and counts the messages. Get them with `tilewise learn 16 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `zigzag(n, ranks)`，即每个 rank 拿哪些 token；写出 `rank_attention(q, k, v, ranks)`，即*一个* rank 要做的事，写成生成器，`yield` 把键和值发给邻居，返回的是收到的东西；再写出 `causal_rank(q, k, v, rank, ranks)`，加上因果掩码。批改程序让所有 rank 一起运行，并清点消息数。用 `tilewise learn 16 --exercise` 取得它们。
