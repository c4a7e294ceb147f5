"""The kernels: what every backend of them shares, and a folder for each backend.

Importing this imports no Triton: a folder's `limits` and tables are asked before any kernel is.
"""
