"""The catalogue: the modules whose methods are in `METHODS`, by family, in the order of the documentation."""

from types import ModuleType

from jkv.methods import layer_plan, modifiers
from jkv.methods.eviction import (
    attention_gate,
    attention_history,
    author_gates,
    cake,
    chunkkv,
    compresskv,
    critic,
    dms,
    duoattention,
    geometry,
    h2o,
    keys,
    kvcrush,
    layered,
    position,
    queries,
    random,
    rkv,
    simlayerkv,
    snapkv,
    trained_gates,
    utility,
)
from jkv.methods.merging import lococo, razorattention, smallkv, weighted
from jkv.methods.prefill import probes, prompt_compression, s3attention, token_pruning
from jkv.methods.quantization import (
    calibrated,
    float4,
    float8,
    gear,
    kivi,
    ksort,
    kvquant,
    kvtc,
    lookup,
    lowrank,
    minicache,
    mixed_precision,
    nsnquant,
    per_prompt,
    polar,
    rotation,
    sparse,
    think,
    vidkv,
)
from jkv.methods.registry import METHODS
from jkv.methods.selection import (
    attention_predictor,
    icecache,
    infllm,
    last_attention,
    lrqk,
    mpcache,
    oracle,
    proxy_keys,
    quest,
    sentences,
    shadowkv,
    wrappers,
)

FAMILIES: dict[str, tuple[ModuleType, ...]] = {
    "The full cache, and modifiers of any method": (modifiers,),
    "Eviction without training: by attention, keys or position": (
        position,
        random,
        h2o,
        snapkv,
        attention_history,
        keys,
        layered,
        kvcrush,
        rkv,
        critic,
    ),
    "Eviction by how keys and values lie among each other": (geometry,),
    "Eviction and coding by what a model's queries are like": (queries, think),
    "Budgets divided among layers and heads": (chunkkv, cake, compresskv, razorattention, simlayerkv, smallkv),
    "Prompt compression: by probes, drafts or token pruning": (token_pruning, probes, prompt_compression, s3attention),
    "Eviction by trained gates": (trained_gates, dms, attention_gate, author_gates, utility, duoattention),
    "Merging: evicted tokens go into tokens that stay": (weighted, lococo),
    "Quantization, sparsity and mixed precision": (kivi, rotation, sparse, mixed_precision, layer_plan),
    "Other codes than integers": (float8, float4, polar, gear, nsnquant, vidkv),
    "Codes in another basis": (lookup, ksort, calibrated, kvtc, kvquant),
    "Codes of several heads or layers together": (lowrank, per_prompt, shadowkv, minicache),
    "Selection: every token is kept, and a step reads a part of them": (
        quest,
        attention_predictor,
        last_attention,
        oracle,
        proxy_keys,
        lrqk,
        icecache,
        infllm,
        mpcache,
        sentences,
        wrappers,
    ),
}


def family(module: ModuleType) -> list[str]:
    """Names of the methods that a module defines, in its order."""
    return [name for name, method in METHODS.items() if method.make.__module__ == module.__name__]


for _name in [name for modules in FAMILIES.values() for module in modules for name in family(module)]:
    METHODS[_name] = METHODS.pop(_name)  # modules are imported as they need each other
