import torch
from tilewise_lab.learn import expect


def check(answer):
    for x in (
        torch.empty(2, 5, 12),
        torch.empty(2, 5, 24)[..., ::2],
        torch.empty(5, 2, 12).transpose(0, 1),
    ):
        for heads in (1, 3, 12):
            exact = x.unflatten(-1, (heads, -1))
            got = answer.split_heads(list(x.shape), list(x.stride()), heads)
            expect(
                list(got[0]) == list(exact.shape),
                f"shape {got[0]}; {heads} heads of {tuple(x.shape)} are {tuple(exact.shape)}",
                f"形状是 {got[0]}；{tuple(x.shape)} 分成 {heads} 个头应为 {tuple(exact.shape)}",
            )
            expect(
                list(got[1]) == list(exact.stride()),
                f"strides {got[1]} for strides {x.stride()}; they are {exact.stride()}",
                f"步长 {x.stride()} 得到 {got[1]}；应为 {exact.stride()}",
            )
            swapped = answer.swap(
                list(exact.shape), list(exact.stride()), 1, 2
            )
            want = exact.transpose(1, 2)
            expect(
                (list(swapped[0]), list(swapped[1]))
                == (list(want.shape), list(want.stride())),
                "swap shape *and* strides",
                "形状*和*步长都要交换",
            )
