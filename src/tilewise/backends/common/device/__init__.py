"""What every attention kernel shares, on the device: a file for each question.

    tuples    what functions hand each other
    walk      which program am I, which tiles do I visit
    sight     who sees whom
    memory    tiles from memory and back
    product   products of tiles
    score     what one pair is worth
    softmax   scores become weights

Names: `q k v` are views (pointer and strides), `q_tile` values; i counts queries and j keys of one sequence, both from
0; n_q and n_k are its lengths; SHOUT is known at compile time. Absence is the flag: cu_q=None is a dense batch,
before=None an unbounded band.
"""
