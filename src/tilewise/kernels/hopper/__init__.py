"""The kernels for Hopper (sm_90), in Gluon: TMA, mbarriers, asynchronous wgmma, warps with different jobs.

The gradients of the score terms themselves, and forward-mode derivatives, come from the portable kernels, which read
the same out and lse.
"""

from ..portable.launch import jvp
from ..portable.terms import term_gradients
from .backward_launch import backward
from .launch import forward

__all__ = ["backward", "forward", "jvp", "term_gradients"]
