"""Interfaces of a compression method: score, codec, budget, merge, selector and prefill.

Read this package first. A paper is a choice on these axes, registered as one row of `jkv.methods`. A cache layer is a
recent window of exact tokens and tiers of encoded slots. A decode step only appends to the window; a flush, after every
`block` steps and after a prompt, moves tokens from the window to the tiers. The runtime calls a method there:

    prompt   Prefill.__call__: Score.birth, attention, then a flush of every layer
    flush    Budget.limit -> Score.observe, rank -> Merge.absorb, into -> Selector.summarize -> Codec.encode
    step     Score.birth -> Selector.pick -> Codec.query, logits, mix, output -> Merge.attend

A complete method, which keeps the keys of smallest norm:

    @part
    class KeyNorm(Score):
        def birth(self, new: Born) -> Columns:
            return {"norm": jnp.linalg.norm(new.k.astype(jnp.float32), axis=-1)}

        def rank(self, ev: Evidence) -> Array:
            return -ev.columns["norm"]

    config = CacheConfig(score=KeyNorm(), budget=Tokens(tokens=512))
    jkv.generate(params, config, prompt)

To write a method, subclass one of the classes below, decorate the subclass with `jkv.arrays.pytree.part`, and override
the methods that it needs; all others have working defaults. Fields are static settings; fields marked `leaf()` are
arrays, stacked over layers. Methods that take arrays are traced by JAX; `bound`, `for_layer`, `check`, `sizes` and
`texts` run on the host. Dead slots (pos -1) may hold anything, NaN included, so mask them with `jnp.where`, never by
adding or multiplying.

Shapes use these letters:

    B   rows (sequences)                     T   new tokens
    H   kv heads                             G   query heads per kv head
    Hs  H if each kv head selects tokens for itself, 1 if all heads share one selection
    D   channels of a query or a key         Dv  channels of a value (D unless said otherwise)
    N   queries                              W   window entries
    n   slots of a tile                      g   group size of a codec (`grain`)
    C   slots of a tier
    S   all tokens of a layer at a flush: the slots of every tier, then the window, oldest first
"""

from jkv.protocols.budget import Budget, Demand, Layer, LayerSize, Sizes
from jkv.protocols.codec import Code, Codec, KernelCodes
from jkv.protocols.evidence import Evidence, Queries, Window
from jkv.protocols.inputs import Born, Columns, Counts, Needs, needs_of
from jkv.protocols.merge import Entries, Evicted, Merge
from jkv.protocols.prefill import (
    PROBED,
    AttentionGradient,
    DraftRunner,
    Prefill,
    PrefillTraits,
    Probe,
    ProbeTokens,
    Say,
)
from jkv.protocols.score import Score
from jkv.protocols.selector import Entered, Look, Selector

__all__ = [
    "Born",
    "Budget",
    "Code",
    "Codec",
    "Columns",
    "Counts",
    "Demand",
    "Entered",
    "Entries",
    "DraftRunner",
    "Evidence",
    "KernelCodes",
    "Layer",
    "LayerSize",
    "Look",
    "Evicted",
    "Merge",
    "Needs",
    "PROBED",
    "Prefill",
    "PrefillTraits",
    "Probe",
    "ProbeTokens",
    "Queries",
    "Say",
    "Score",
    "Selector",
    "Sizes",
    "Window",
    "AttentionGradient",
    "needs_of",
]
