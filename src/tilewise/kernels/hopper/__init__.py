"""The kernels for Hopper (sm_90), in Gluon: TMA, mbarriers, asynchronous wgmma, warps with different jobs.

The gradients of the score terms themselves, and forward-mode derivatives, come from the portable kernels, which read
the same out and lse.
"""
