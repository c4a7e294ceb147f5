"""Device functions that all attention kernels share.

    structs      the NamedTuples that functions exchange
    tile_range   which tile a program computes, and over which columns it loops
    mask         which pairs of a query and a key are visible
    tile_io      loads and stores of tiles
    matmul       products of tiles
    score        the score of a pair, and its derivative
    softmax      online softmax
    attend       the forward of one tile of queries
    gradients    the gradients of one tile

`q`, `k`, `v` are views (pointer and strides) and `q_tile` is a value. i counts the queries and j the keys of a
sequence, from 0; n_q and n_k are its lengths. Names in capitals are known at compile time. An absent argument is None
and specialises the kernel: cu_q=None is a dense batch, before=None an unbounded window.
"""
