"""The portable kernels, in Triton: any NVIDIA GPU from Ampere on, and Triton's interpreter on a CPU."""

from .portable.launch import backward, forward, jvp
from .portable.terms import term_gradients

__all__ = ["backward", "forward", "jvp", "term_gradients"]
