# %% [markdown]
# # 8. How a tensor lies in memory
#
# Memory is a line of numbered cells. A tensor is a *way of reading* it: a shape, and for each axis a stride, the
# distance from one element to its neighbour along that axis.
#
# $$\text{address of } x_{ijk} = \text{start} + i \cdot \text{stride}_0 + j \cdot \text{stride}_1 + k \cdot \text{stride}_2$$
#
# Transposing, slicing, splitting heads: all of it changes the reading, not the memory. Kernels live on this. The whole
# of it, as code:

# %% [markdown] lang="zh"
# # 8. 张量在内存里的样子
#
# 内存是一排编了号的格子。张量是*读取它的一种方式*：一个形状，再加上每个轴的步长，即沿着这个轴从一个元素到相邻元素的距离。
#
# $$\text{address of } x_{ijk} = \text{start} + i \cdot \text{stride}_0 + j \cdot \text{stride}_1 + k \cdot \text{stride}_2$$
#
# 转置、切片、拆分头：改变的都是读法，不是内存。kernel 就靠这个吃饭。全部写成代码：

# %%
import math

import torch

import tilewise
from tilewise_lab.learn import picture, say, show
from tilewise_lab.machine.layout import Layout


def strides(shape):
    """Row-major: the last axis is contiguous, and each axis steps over all
    that come after it."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def offset(index, strides):
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


# %% [markdown]
# ## Row-major
#
# A vector of 7 has stride 1. A (2, 3) matrix stored row after row has strides (3, 1): the next row is three cells
# away. In general the stride of an axis is the product of all sizes after it: $[a, b, c] \to [b c, c, 1]$.
# Column-major is the other way round.

# %% [markdown] lang="zh"
# ## 行主序
#
# 长度 7 的向量步长是 1。一行接一行存放的 (2, 3) 矩阵步长是 (3, 1)：下一行在三格之外。一般地，一个轴的步长是它后面所有大小的乘积：$[a, b, c] \to [b c, c, 1]$。列主序则反过来。

# %%
memory = [1, 2, 3, 5, 8, 13]
x = torch.tensor(memory).view(2, 3)
show(
    say(["shape", "strides"], ["形状", "步长"]),
    [[shape, strides(shape)] for shape in ([7], [2, 3], [2, 4, 3])],
)

# %% tags=["check"]
assert strides([7]) == [1]
assert strides([2, 3]) == [3, 1] == list(x.stride())
assert strides([2, 4, 3]) == [12, 3, 1]
for shape in ([7], [2, 3], [2, 4, 3], [5, 1, 2, 3]):
    assert (
        strides(shape)
        == list(torch.empty(shape).stride())
        == Layout.row_major(shape).strides
    )
assert memory[offset([1, 2], strides([2, 3]))] == x[1, 2] == 13
assert Layout.column_major([2, 3]).strides == [1, 2]

# %% [markdown]
# ## Reshape and transpose
#
# Reshape (2, 3) to (3, 2): strides (2, 1), the same cells in the same order, nothing moves. Transpose: shape (3, 2)
# too, but
# strides (1, 3), and the elements are no longer read in the order in which they lie. Such a tensor is not
# *contiguous*;
# torch's `.view` refuses to reshape it, and `.reshape` quietly **copies** it. (That reshape never moves data is only
# true
# where the data is contiguous.)

# %% [markdown] lang="zh"
# ## reshape 与转置
#
# 把 (2, 3) reshape 成 (3, 2)：步长 (2, 1)，同样的格子、同样的顺序，什么也没移动。转置：形状也是 (3, 2)，但步长是 (1, 3)，元素不再按存放的顺序被读到。这样的张量不是*连续的*；torch 的 `.view` 拒绝改变它的形状，`.reshape` 则悄悄**复制**一份。（说 reshape 从不移动数据，只有数据连续时才成立。）

# %%
reshaped, transposed = x.reshape(3, 2), x.T
print(say("reshaped  ", "变形"), reshaped.tolist(), reshaped.stride())
print(say("transposed", "转置"), transposed.tolist(), transposed.stride())
try:
    transposed.view(6)
except RuntimeError as error:
    print(say("view refuses:", "view 拒绝："), str(error)[:75], "...")


# %% tags=["figure"]
def draw(*panels):
    for axes, layout, title in zip(
        panels,
        (
            Layout.row_major([2, 3]),
            Layout.row_major([3, 2]),
            Layout.row_major([2, 3]).transpose(),
        ),
        ("x (2, 3)", "x.reshape(3, 2)", "x.T (3, 2)"),
        strict=True,
    ):
        offsets = torch.tensor(layout.offsets()).view(layout.shape)
        axes.imshow(offsets, cmap="viridis", vmin=0, vmax=5)
        for i in range(layout.shape[0]):
            for j in range(layout.shape[1]):
                axes.text(
                    j,
                    i,
                    f"{memory[offsets[i, j]]}\ncell {offsets[i, j]}",
                    ha="center",
                    va="center",
                    color="white",
                )
        axes.set(
            title=f"{title}\nstrides {layout.strides}", xticks=[], yticks=[]
        )


picture(
    "08_layouts",
    draw,
    alt=say(
        "Three grids over the same six cells of memory: x with "
        "strides 3, 1; its reshape with strides 2, 1; its transpose "
        "with strides 1, 3. Each entry is labelled with the memory "
        "cell that it is read from.",
        "同样六个内存单元上的三个网格：x 的步长是 3、1；reshape 之后"
        "是 2、1；转置之后是 1、3。每个元素都标出它从哪个内存单元读取。",
    ),
    panels=(1, 3),
    size=(9, 3.6),
)

# %% tags=["check"]
assert reshaped.stride() == (2, 1)
assert transposed.stride() == (1, 3)
assert x.data_ptr() == reshaped.data_ptr() == transposed.data_ptr()
assert not transposed.is_contiguous()
assert transposed.reshape(6).data_ptr() != x.data_ptr()  # a copy
assert Layout.row_major([2, 3]).transpose() == Layout([3, 2], [1, 3])
assert not Layout([3, 2], [1, 3]).contiguous

# %% [markdown]
# ## Why attention cares
#
# One projection makes $Q$, $K$ and $V$ side by side: a (B, N, 3, H, D) tensor whose slices are strided views. Some
# libraries keep heads before tokens (B, H, N, D), some after. A kernel that takes strides takes all of them as they
# are; one that does not must copy first, and a copy of $Q$, $K$ and $V$ costs as much traffic as the whole of tiled
# attention.

# %% [markdown] lang="zh"
# ## 注意力为什么在乎
#
# 一次投影会把 $Q$、$K$、$V$ 并排算出来：一个 (B, N, 3, H, D) 的张量，切片是带步长的视图。有的库把头放在 token 前面 (B, H, N, D)，有的放在后面。接受步长的 kernel 照单全收；不接受的必须先复制，而复制一遍 $Q$、$K$、$V$ 的搬运量，和整个分块注意力一样多。

# %%
torch.manual_seed(0)
b, n, h, d = 2, 10, 3, 8
packed = torch.randn(b, n, 3, h, d)
q, k, v = packed.unbind(2)  # views
out = tilewise.attention(q, k, v, causal=True)
contiguous = (
    say("contiguous", "连续")
    if q.is_contiguous()
    else say("not contiguous", "不连续")
)
print(
    say("q of a packed projection:", "合并投影里的 q："),
    tuple(q.shape),
    q.stride(),
    contiguous,
)
# (B, H, N, d) in memory
heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
# stride 0: one row for all tokens and heads
grown = torch.randn(b, 1, 1, d).expand(b, n, h, d)

# the gradient of the output may arrive in any layout too
q_ = q.clone().requires_grad_()
o = tilewise.attention(q_, k, v)
dout = torch.randn(b, h, n, d).transpose(1, 2)
(dq,) = torch.autograd.grad(o, q_, dout, retain_graph=True)
(dq2,) = torch.autograd.grad(o, q_, dout.contiguous())

# %% tags=["check"]
assert torch.equal(
    out, tilewise.attention(*(x.contiguous() for x in (q, k, v)), causal=True)
)
assert torch.allclose(
    tilewise.attention(
        *(x.transpose(1, 2) for x in heads_first), causal=True
    ),
    out,
)
assert tilewise.attention(q, grown, v).shape == (b, n, h, d)
assert torch.equal(dq, dq2)

# %% [markdown]
# Offsets can be large: batch · tokens · heads · D passes $2^{31}$ before memory is full, so tilewise computes them in
# 64 bits.

# %% [markdown] lang="zh"
# 偏移量可以很大：内存还没满，batch · token 数 · 头数 · D 就超过了 $2^{31}$，所以 tilewise 用 64 位来算。

# %%
largest = Layout.row_major([64, 8192, 64, 128])
print(
    say(
        "last offset of (64, 8192, 64, 128):",
        "(64, 8192, 64, 128) 的最后一个偏移：",
    ),
    largest.offset([63, 8191, 63, 127]),
)

# %% tags=["check"]
assert largest.offset([63, 8191, 63, 127]) > 2**31
assert math.prod(largest.shape) - 1 == largest.offset([63, 8191, 63, 127])

# %% [markdown]
# **Exercises.** Three, of rising difficulty: write `swap(shape, strides, a, b)`, the transpose;
# `split_heads(shape, strides, heads)`, the view (B, N, H, D) of a (B, N, H·D) tensor with any strides; and
# `merge_axes(shape, strides)`, which finds out whether a tensor can be flattened without a copy. No data, only
# arithmetic. Get them with `tilewise learn 8 --exercise`.

# %% [markdown] lang="zh"
# **练习。** 三道，由易到难：写出 `swap(shape, strides, a, b)`，即转置；写出 `split_heads(shape, strides, heads)`，即步长任意的 (B, N, H·D) 张量看成 (B, N, H, D) 的视图；再写出 `merge_axes(shape, strides)`，判断一个张量能否不复制就展平。不碰数据，只做算术。用 `tilewise learn 8 --exercise` 取得它们。
