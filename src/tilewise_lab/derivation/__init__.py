"""The derivation of FlashAttention in torch, one step at a time: `softmax`, `matmul`, `attention`, `gradient`.

Every step equals the one before it (or says that it is wrong). The last steps are the library's reference backend.
"""

from tilewise_lab.derivation import attention, gradient, matmul, softmax

__all__ = ["attention", "gradient", "matmul", "softmax"]
