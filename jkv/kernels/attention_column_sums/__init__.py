"""Attention received by each key: column sums of the attention matrix, given the queries' log-sum-exps.

Every implementation takes the same arguments and returns f32[B,H,S]: for each key, the sum of exp(q . k * scale - lse)
over the live queries of all G groups that see it. Lowering a lse by log w weights its query by w.

    q      f[B,H,G,T,D]    rotated queries
    k      f[B,H,S,D]      keys
    pos    i32[B,S]        positions of the keys, -1 for dead ones
    first  i32[B,T]        first position that a query sees
    last   i32[B,T]        last position that a query sees, its own; -1 for dead queries
    lse    f32[B,H,G,T]    log-sum-exps of the logits
    scale  float           factor of the logits

Dead entries may hold anything.
"""
