"""Attention of a few new tokens over a window of exact ones, into which the newest comes.

Every implementation has two functions:

`attention` returns a Partial of q f[B,H,G,T,D], rotated, over k, v f[B,H,R,D] at pos i32[B,R], -1 dead; first, last
i32[B,T]: the positions that a query may see, last its own, or -1: it is dead; scale of the logits.

`entered` returns a Partial, and the keys and values that it is over: before any query reads, new_k, new_v f[B,H,1,D]
come into slot `at` i32[] of those that are given, in their memory. put i32[B,R]: positions of tokens that came so, this
one's too, -1 elsewhere: a slot has the larger one of pos and put.

Dead slots may hold anything: a mask selects, it never multiplies. A query that sees no key gives m = -inf, l = 0,
acc = 0.
"""
