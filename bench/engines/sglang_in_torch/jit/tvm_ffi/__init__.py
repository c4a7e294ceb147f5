"""SGLang compiles some kernels with nvcc, through tvm_ffi, when they are first called. This package has those of a
Llama or Qwen 3 layer in torch instead: for machines where nvcc cannot compile them."""

from typing import NoReturn

__version__ = "0.1.11"


def load_module(path: str) -> NoReturn:
    raise NotImplementedError(path)
