"""What every key of a window gets from queries whose log-sum-exps are known: sums of columns of their attention.

Every implementation is a function of the same arguments and returns f32[B,H,S]: over the live queries of all G that see
a key, the sum of exp(q . k * scale - lse). A lse that is lower by log w weighs its query by w.

q f[B,H,G,T,D] rotated; k f[B,H,S,D]; pos i32[B,S] of the keys, -1 dead; first, last i32[B,T]: the positions that a
query may see, last its own, or -1: it is dead; lse f32[B,H,G,T]; scale of the logits. Dead entries may hold anything.
"""
