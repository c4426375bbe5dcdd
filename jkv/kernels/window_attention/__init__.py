"""Decode attention over the recent window of unquantized tokens, optionally appending the newest token.

Every implementation has two functions. `attention` returns a Partial:

    q      f[B,H,G,T,D]   rotated queries
    k, v   f[B,H,R,D]     keys and values of the window
    pos    i32[B,R]       positions of the slots, -1 for dead ones
    first  i32[B,T]       first position that a query sees
    last   i32[B,T]       last position that a query sees, its own; -1 for dead queries
    scale  float          factor of the logits

`entered` first writes one token into the window in place, and returns a Partial and the updated k, v:

    new_k, new_v  f[B,H,1,D]   key and value of the token
    at            i32[]        its slot
    put           i32[B,R]     positions of tokens written this way, this one included, -1 elsewhere; the position of a
                               slot is the larger one of pos and put

Dead slots may hold anything, because masks select and never multiply. A query that sees no key gives m = -inf, l = 0,
acc = 0.
"""
