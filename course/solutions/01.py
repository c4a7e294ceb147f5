def intensity(n: int, d: int, itemsize: int) -> float:
    flops = 2 * (n * n * d) + 2 * (n * n * d)
    kernels = {
        "S = Q Kᵀ": n * d + n * d + n * n,
        "P = softmax(S)": n * n + n * n,
        "O = P V": n * n + n * d + n * d,
    }
    return flops / (itemsize * sum(kernels.values()))
