# %% [markdown]
# # 15. Decoding: many processors for one query
#
# When a model writes text, each new token asks one question of a long past: one query, and $N$ keys in a cache. Lesson
# 5 gave each block of queries a processor. Here there is a single query per head, and most of the GPU would stand idle
# while a few processors read the whole cache. The way out is the merge of lesson 3: cut the *keys* into parts, give
# each part a processor, and put the results together.
#
# What can be put together? Of a part $a$ of the keys an attention of its own keeps $(O_a, L_a)$: its output, and the
# logsumexp of its scores. With $l_a = e^{L_a}$ the numerator of the part is $l_a O_a$. Numerators and denominators of
# disjoint sets of keys just add, so
#
# $$L = \log \sum_a e^{L_a} \quad O = \frac{\sum_a e^{L_a} O_a}{\sum_a e^{L_a}} = \sum_a e^{L_a - L} O_a$$
#
# As code, with the maximum taken out before the exponential (lesson 2), and a part without keys counting for nothing:

# %% [markdown] lang="zh"
# # 15. 解码：许多处理器，一个查询
#
# 模型写文章时，每个新 token 都要向很长的过去提一个问题：一个查询，缓存里有 $N$ 个键。第 5 课给每块查询一个处理器。这里每个头只有一个查询，少数几个处理器读完整个缓存，GPU 的大部分都闲着。出路就是第 3 课的合并：把*键*切成几份，每份一个处理器，再把结果合起来。
#
# 什么东西可以合起来？对键的一份 $a$ 单独做注意力，留下 $(O_a, L_a)$：它的输出，以及分数的 logsumexp。记 $l_a = e^{L_a}$，这一份的分子就是 $l_a O_a$。互不相交的键集，分子和分母直接相加，所以
#
# $$L = \log \sum_a e^{L_a} \quad O = \frac{\sum_a e^{L_a} O_a}{\sum_a e^{L_a}} = \sum_a e^{L_a - L} O_a$$
#
# 写成代码：取指数之前先减去最大值（第 2 课），没有键的那一份不起任何作用：

# %%
import math

import torch

import tilewise
from tilewise.backends.common import tiles
from tilewise_lab.costs.devices import device
from tilewise_lab.learn import picture, say, show


def attend(q, k, v):
    """(O, L) of some keys: q (H, D), k and v (H, n, D)."""
    s = torch.einsum("hd,hnd->hn", q, k) / math.sqrt(q.shape[-1])
    lse = s.logsumexp(-1)  # -inf where there are no keys
    p = torch.exp(s - lse[:, None])
    return torch.einsum("hn,hnd->hd", p, v), lse


def combine(parts):
    """(O, L) of all keys, from those of the parts: one small step at the
    end."""
    o, lse = (
        torch.stack([o for o, _ in parts]),
        torch.stack([lse for _, lse in parts]),
    )
    most = lse.amax(0)
    pivot = most.masked_fill(most == -torch.inf, 0.0)
    w = torch.exp(lse - pivot)  # what each part weighs
    l = w.sum(0)
    return (w[..., None] * o).sum(0) / l.masked_fill(l == 0, 1.0)[
        :, None
    ], pivot + l.log()


def split_kv(q, k, v, parts):
    """Each chunk could be another processor's."""
    return combine(
        [
            attend(q, k_a, v_a)
            for k_a, v_a in zip(
                k.chunk(parts, 1), v.chunk(parts, 1), strict=True
            )
        ]
    )


torch.manual_seed(0)
heads, n, d = 4, 1000, 32
q, k, v = (
    torch.randn(*shape, dtype=torch.float64)
    for shape in ((heads, d), (heads, n, d), (heads, n, d))
)
exact, exact_lse = attend(q, k, v)
for parts in (1, 2, 7, 64):
    o, lse = split_kv(q, k, v, parts)
    print(
        say(
            f"{parts} parts: {(o - exact).abs().max():.1e} from undivided",
            f"{parts} 段：与不分段相差 {(o - exact).abs().max():.1e}",
        )
    )
theirs = tilewise.merge(
    *(
        tilewise.attention(
            q[None, None],
            k_a[None].transpose(1, 2),
            v_a[None].transpose(1, 2),
            return_lse=True,
        )
        for k_a, v_a in zip(k.chunk(3, 1), v.chunk(3, 1), strict=True)
    )
)

# %% tags=["check"]
for parts in (1, 2, 7, 64):
    o, lse = split_kv(q, k, v, parts)
    assert torch.allclose(o, exact)
    assert torch.allclose(lse, exact_lse)
# the library's merge says the same
assert torch.allclose(theirs[0][0, 0], exact)

# %% [markdown]
# ## Two ways to get it wrong
#
# The mean of the parts' outputs is wrong: a part whose keys fit the query badly counts as much as one whose keys fit
# well. Weighing by the number of keys is wrong for the same reason. Only the $L_a$ know what a part is worth: that is
# why every attention here can return it (`return_lse=True`).

# %% [markdown] lang="zh"
# ## 两种错法
#
# 把各份的输出取平均是错的：键与查询不合的那一份，和键很合的那一份，算得一样重。按键的个数加权，错的原因相同。一份值多少，只有 $L_a$ 知道：所以这里的每个注意力都能把它返回来（`return_lse=True`）。

# %%
sizes = [100, 900]
pieces = [
    attend(q, k_a, v_a)
    for k_a, v_a in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True)
]
mean = (pieces[0][0] + pieces[1][0]) / 2
by_count = sum(
    size / n * o for size, (o, _) in zip(sizes, pieces, strict=True)
)
show(
    say(["", "largest error"], ["", "最大误差"]),
    [
        [
            say("mean of the outputs", "输出的平均"),
            f"{(mean - exact).abs().max():.1e}",
        ],
        [
            say("weighed by their keys", "按键的个数加权"),
            f"{(by_count - exact).abs().max():.1e}",
        ],
        [
            say("weighed by exp(L_a - L)", "按 exp(L_a - L) 加权"),
            f"{(combine(pieces)[0] - exact).abs().max():.1e}",
        ],
    ],
)
nothing = attend(q, k[:, :0], v[:, :0])

# %% tags=["check"]
assert (mean - exact).abs().max() > 1e-2
assert (by_count - exact).abs().max() > 1e-3
assert (nothing[1] == -torch.inf).all()
# parts without keys do no harm
assert torch.allclose(combine([nothing, *pieces, nothing])[0], exact)

# %% [markdown]
# ## How many parts?
#
# Decoding is bound by memory (lesson 10): each byte of the cache is used for one query. So the time is the cache's
# bytes over the bandwidth, *if* enough processors read at once. One sequence of 8 heads of keys is 8 programs on 132
# processors: most of the bandwidth is not asked for. As many parts as fill the processors, and not more: each part
# also writes $D + 1$ numbers and the merge reads them again, and a part should have some blocks of keys to stream.
#
# Below, a model with nothing in it but that: a processor alone draws little more than its share of the bandwidth,
# programs run in waves, and parts cost their partial results.

# %% [markdown] lang="zh"
# ## 分成几份？
#
# 解码受限于内存（第 10 课）：缓存的每个字节只为一个查询服务。所以耗时就是缓存的字节数除以带宽，*前提是*有足够多的处理器同时在读。一个序列、8 个键头，只有 8 个程序，而处理器有 132 个：大部分带宽根本没人要。份数要刚好填满处理器，不能更多：每份还要写出 $D + 1$ 个数，合并时再读一遍；而且每份总该有几块键可以流过。
#
# 下面的模型只考虑这些：单独一个处理器只能吃下比自己那份略多的带宽，程序一波一波地运行，每份都要付出部分结果的代价。

# %%
h200 = device("H200")


def seconds(programs, keys, parts, d=128, group=4, itemsize=2):
    """One query of each head; `group` query heads share a head of keys and
    values."""
    cache = programs * keys * 2 * d * itemsize
    working = min(programs * parts, h200.sms)
    reading = cache / min(
        h200.bandwidth, 1.25 * working * h200.bandwidth / h200.sms
    )
    in_waves = (
        -(-programs * parts // h200.sms) / (programs * parts / h200.sms)
        if programs * parts > h200.sms
        else 1
    )
    merging = (
        0
        if parts == 1
        else 2 * programs * group * parts * (d + 1) * 4 / h200.bandwidth
        + 4e-6
    )
    return reading * in_waves + merging


tried = [1, 2, 4, 8, 16, 32, 64]
rows = []
for batch, keys in ((1, 65536), (4, 8192), (16, 8192)):
    programs = 8 * batch
    chosen = tiles.parts_of_keys(programs, keys, 64, h200.sms)
    rows.append(
        [
            batch,
            keys,
            *(f"{seconds(programs, keys, p) * 1e6:.0f}" for p in tried),
            chosen,
        ]
    )
headers = [*say(["batch", "keys"], ["批", "键"]), *map(str, tried)]
show(
    [*headers, say("tilewise takes", "tilewise 的选择")],
    rows,
    say(
        "predicted us on an H200, by number of parts",
        "H200 上预测的微秒数，按段数",
    ),
)


# %% tags=["figure"]
def draw(axes):
    for batch, keys in ((1, 65536), (4, 8192), (16, 8192)):
        axes.loglog(
            tried,
            [seconds(8 * batch, keys, p) * 1e6 for p in tried],
            "o-",
            base=2,
            label=f"batch {batch}, {keys} keys",
        )
    axes.set(
        xlabel="parts",
        ylabel="us (model)",
        title="Decoding on 132 processors: divide until they are busy",
    )
    axes.legend()


picture(
    "15_parts",
    draw,
    alt=say(
        "Modelled decoding time over the number of parts, on two "
        "logarithmic axes: batch 1 with 65536 keys gets faster until "
        "16 parts, batch 4 until 4 parts; batch 16 does not, its "
        "processors are busy already.",
        "解码时间（模型）随分段数的变化（双对数坐标）：batch 1、65536 "
        "个键时，一直快到 16 段；batch 4 时快到 4 段；batch 16 时没有"
        "变快，处理器本来就是忙的。",
    ),
)

# %% tags=["check"]
assert seconds(8, 65536, 16) < seconds(8, 65536, 1) / 5
# one program for each processor
assert tiles.parts_of_keys(8, 65536, 64, 132) == 16
# the batch fills the GPU by itself
assert tiles.parts_of_keys(128, 8192, 64, 132) == 1

# %% [markdown]
# The model is crude, but its order is what was measured on an H200 (32 query heads on 8 of keys, $D = 128$): a batch
# of 1 with 65536 keys took 743 µs undivided and 77 µs with a part for each processor, a batch of 4 with 8192 keys 102
# and 47 µs; with a batch of 16 dividing gained nothing.
#
# ## In the library
#
# `tilewise.attention` divides the keys by itself where queries alone would leave the GPU idle, and
# `tilewise.attention_kv` does so over a cache, dense or in pages, with sequences of different lengths. How many parts
# a sequence gets depends on what else is in the batch, and with the parts the rounding. With `split=` the parts have a
# fixed size: then a sequence gets the same bits whatever company it is in.

# %% [markdown] lang="zh"
# 模型很粗糙，但它给出的顺序与 H200 上的实测相符（32 个查询头，8 个键头，$D = 128$）：batch 为 1、65536 个键，不分要 743 µs，每个处理器一份要 77 µs；batch 为 4、8192 个键，分别是 102 和 47 µs；batch 为 16 时，分了也没有好处。
#
# ## 在库里
#
# 如果光靠查询会让 GPU 闲着，`tilewise.attention` 会自己把键分开；`tilewise.attention_kv` 对缓存也这样做，缓存可以是连续的，也可以是分页的，各序列长度可以不同。一个序列分成几份，取决于同一批里还有什么，而舍入又取决于份数。用 `split=` 可以固定每份的大小：这样无论与谁同批，一个序列得到的每一位都相同。

# %%
batch, kv_heads, group, capacity = 3, 2, 4, 300
lengths = torch.tensor([300, 17, 120], dtype=torch.int32)
k_cache, v_cache = torch.randn(2, batch, capacity, kv_heads, d)
queries = torch.randn(batch, 1, kv_heads * group, d)
out = tilewise.attention_kv(queries, k_cache, v_cache, lengths)
together = tilewise.attention_kv(
    queries, k_cache, v_cache, lengths, split=128
)
alone = tilewise.attention_kv(
    queries[:1], k_cache[:1], v_cache[:1], lengths[:1], split=128
)

# %% tags=["check"]
for b, length in enumerate(lengths.tolist()):
    # (H, n, D)
    shared = [
        x[b, :length].transpose(0, 1).repeat_interleave(group, 0)
        for x in (k_cache, v_cache)
    ]
    assert torch.allclose(
        out[b, 0], split_kv(queries[b, 0], *shared, parts=5)[0], atol=1e-5
    )
assert torch.equal(together[:1], alone)  # bit for bit

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `bounds(length, parts, block)`, where the parts of a sequence begin
# and end, in whole blocks; `combine(parts)` for a list of (o, lse) in which any part may be empty, and all of them;
# and `best_parts(heads, blocks, processors, overhead, limit)`, how many parts are fastest. Get them with
# `tilewise learn 15 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `bounds(length, parts, block)`，即一个序列的各份从哪里开始、到哪里结束，以整块为单位；写出 `combine(parts)`，传入 (o, lse) 的列表，任何一份都可能是空的，也可能全是空的；再写出 `best_parts(heads, blocks, processors, overhead, limit)`，即分几份最快。用 `tilewise learn 15 --exercise` 取得它们。
