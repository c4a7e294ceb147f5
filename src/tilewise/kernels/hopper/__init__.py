"""The kernels for Hopper (sm_90), in Gluon: TMA, mbarriers, asynchronous wgmma, warps with different jobs."""

from ..launch import backward
from .launch import forward

__all__ = ["backward", "forward"]
