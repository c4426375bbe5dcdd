"""In-place scatter of new tokens into slots of a tier.

    x      [B,H,C,R]      tier
    index  i32[B,Hi,m]    slots of the new tokens; C or more drops the token
    new    [B,H,m,R]      new tokens

The reference is `put` of arrays/gather.py, a scatter that XLA runs in place if slots are rows in memory. On TPU slots
are columns, and that scatter would transpose the whole tier twice.
"""
