"""The axes of a method. Read this first: a paper is a choice of these, and a row of `jkv.methods`.

B rows, T new tokens, H kv heads, Hs = H (a selection per head) or 1 (one for all heads), G query heads per kv head,
N queries, D channels of a query and a key, Dv of a value (D where nothing else is said), n slots of a tile, g grain,
W window entries, C slots of a tier, S tokens known at a flush: every slot of every tier, then the window, oldest first.
"""

from jkv.protocols.budget import Budget, Demand, Layer, LayerSize, Sizes
from jkv.protocols.codec import Code, Codec, KernelCodes
from jkv.protocols.evidence import Evidence, Queries, Window
from jkv.protocols.inputs import Born, Columns, Counts, Needs, needs_of
from jkv.protocols.merge import Entries, Lost, Merge
from jkv.protocols.prefill import PROBED, Prefill, Probe, ProbeTokens, Reading, Say, Worth
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
    "Evidence",
    "KernelCodes",
    "Layer",
    "LayerSize",
    "Look",
    "Lost",
    "Merge",
    "Needs",
    "PROBED",
    "Prefill",
    "Probe",
    "ProbeTokens",
    "Queries",
    "Reading",
    "Say",
    "Score",
    "Selector",
    "Sizes",
    "Window",
    "Worth",
    "needs_of",
]
