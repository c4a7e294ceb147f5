"""The backends: `reference` (torch), `triton` (portable kernels), `hopper` (Gluon kernels for sm_90).

`protocol` says what a backend is, `registry` lists them and chooses one for a call, `common` holds what kernel backends
share. A new backend is a folder and one entry in `registry.BACKENDS`.
"""
