"""What the kernel backends share: device functions, kernels, their tiles and launches, and the launcher.

Importing the package imports no Triton, nor do `gpu` and `tiles`.
"""
