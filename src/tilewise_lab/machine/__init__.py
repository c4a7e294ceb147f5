"""A GPU small enough to watch: threads and warps, memory lines, tensor layout, pipelines, budgets.

    warps      which lane does which element; what a branch costs; latency
               against throughput
    coalesce   how many memory lines one instruction of a warp touches
    layout     shapes, strides, and what moves when a tensor is reshaped or
               transposed
    pipeline   one unit busy at a time, or all of them; bubbles across devices
    history    how transistors, clocks and GPUs grew
    budget     what fits into shared memory, and the size of a matrix of weights

All of it is plain Python.
"""
