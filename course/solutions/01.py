import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT / q.shape[-1] ** 0.5
    return torch.softmax(s, -1) @ v


def intensity(n: int, d: int, itemsize: int) -> float:
    flops = 2 * (n * n * d) + 2 * (n * n * d)
    kernels = {
        "S = Q Kᵀ": n * d + n * d + n * n,
        "P = softmax(S)": n * n + n * n,
        "O = P V": n * n + n * d + n * d,
    }
    return flops / (itemsize * sum(kernels.values()))


def seconds(n: int, d: int, itemsize: int, peak: float, rate: float) -> float:
    product = 2 * n * n * d / peak, (2 * n * d + n * n) * itemsize / rate
    softmax = 2 * n * n * itemsize / rate
    return 2 * max(product) + softmax
