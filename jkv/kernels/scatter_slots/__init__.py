"""Newcomers into slots of a tier, in place.

x [B,H,C,R], index i32[B,Hi,m] of slots (C or more: dropped), new [B,H,m,R].

The reference, `put` of arrays/gather.py, is a scatter, which XLA does in place where slots are the rows of memory. On
TPU they are its columns, and the scatter would move the whole tier there and back.
"""
