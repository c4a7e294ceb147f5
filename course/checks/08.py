import torch

from tilewise_lab.learn import compare


def pair(view):
    return list(view[0]), list(view[1])


def swap(answer):
    for x in (torch.empty(2, 5, 3, 4), torch.empty(2, 5, 3, 8)[..., ::2]):
        shape, strides = list(x.shape), list(x.stride())
        want = x.transpose(1, 2)
        compare(
            f"swap({shape}, {strides}, 1, 2)",
            pair(answer.swap(list(shape), list(strides), 1, 2)),
            (list(want.shape), list(want.stride())),
            (
                (list(want.shape), strides),
                "the shape is exchanged, the strides are not: exchange both",
                "形状交换了，步长没有：两者都要交换",
            ),
            (
                (shape, list(want.stride())),
                "the strides are exchanged, the shape is not: exchange both",
                "步长交换了，形状没有：两者都要交换",
            ),
            (
                (list(want.shape), list(want.contiguous().stride())),
                "these are the strides of a copy: the data stays where it is",
                "这是复制之后的步长：数据应留在原处",
            ),
        )


def split_heads(answer):
    for x in (
        torch.empty(2, 5, 12),
        torch.empty(2, 5, 24)[..., ::2],
        torch.empty(5, 2, 12).transpose(0, 1),
    ):
        shape, strides = list(x.shape), list(x.stride())
        for heads in (3, 1, 12):
            want = x.unflatten(-1, (heads, -1))
            d = 12 // heads
            compare(
                f"split_heads({shape}, {strides}, {heads})",
                pair(answer.split_heads(list(shape), list(strides), heads)),
                (list(want.shape), list(want.stride())),
                (
                    (list(want.shape), [*strides[:-1], d, 1]),
                    "the stride of the last axis is taken for 1: heads are d · stride apart",
                    "把最后一轴的步长当成了 1：头与头相隔 d · 步长",
                ),
                (
                    (list(want.shape), [*strides, 1]),
                    "the strides of the new axes are missing: heads are d elements apart, elements one",
                    "新轴的步长不对：头与头相隔 d 个元素，元素与元素相隔 1 个",
                ),
                (
                    (
                        list(want.shape),
                        [*strides[:-1], strides[-1], heads * strides[-1]],
                    ),
                    "this view interleaves the heads: element e of head h is column h · d + e",
                    "这个视图把各头交错排列了：头 h 的第 e 个元素在第 h · d + e 列",
                ),
                (
                    ([*shape[:-1], d, heads], list(want.stride())),
                    "the shape is (…, heads, d), heads first",
                    "形状是 (…, heads, d)，头在前",
                ),
            )


def merge_axes(answer):
    base = torch.empty(4, 6, 8)
    views = {
        "contiguous": base,
        "transposed": base.transpose(0, 1),
        "every other element": base[..., ::2],
        "every other row": base[:, ::2],
        "the first three columns": base[..., :3],
        "one row": base[2:3, :, 1:2],
        "with an axis of length 1": base.unsqueeze(1).transpose(1, 2),
        "a scalar": base[:1, :1, :1],
        "expanded": torch.empty(1, 8).expand(4, 8),
    }
    for x in views.values():
        shape, strides = list(x.shape), list(x.stride())
        try:
            merged = x.view(-1)
            exact = merged.stride(0) if merged.numel() > 1 else 1
        except RuntimeError:
            exact = None
        last = strides[-1]
        compare(
            f"merge_axes({shape}, {strides})",
            answer.merge_axes(list(shape), list(strides)),
            exact,
            (
                None,
                "it is possible: axes of length 1 do not count"
                if 1 in shape
                else "it is possible without a copy: each stride is the next one times the next size",
                "可以做到：长度为 1 的轴不算"
                if 1 in shape
                else "不必复制就能做到：每个步长都是后一个步长乘以后一个长度",
            ),
            (
                last,
                "it needs a copy: each stride must be the next one times the next size"
                if exact is None
                else "the last axis has length 1: its stride does not count",
                "需要复制：每个步长必须是后一个步长乘以后一个长度"
                if exact is None
                else "最后一轴长度为 1：它的步长不算",
            ),
            (
                1,
                "the elements are not neighbours: the stride is that of the last axis",
                "元素并不相邻：步长是最后一轴的步长",
            ),
        )


EXERCISES = (swap, split_heads, merge_axes)
