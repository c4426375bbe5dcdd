"""What every method's cache takes, from shapes alone, for a prompt of 1,024 tokens of a model of SmolLM2's shape."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jkv import methods, models
from jkv.cache.cache import tree_bytes
from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Beyond
from jkv.methods.prefill.prompt_compression import PromptCompression
from jkv.prompts.allocation import CacheShape

# no weights, and no plan, of these come with jkv
GIVEN = ("kvzap", "fastkvzip", "duoattention", "planned", "s3attention")
SHAPE = dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64)
MODEL = models.read_config(dict(models.TINY, **SHAPE, max_position_embeddings=8192))
PROMPT, GENERATED = 1024, 64
WORDLESS = SimpleNamespace(tokenizer=None)  # of a model what is asked of it here: who it is says the fingerprint


def texts(name: str) -> list[str]:
    """A method as its defaults have it, in budgets of a sixteenth to a half of the prompt where it takes one."""
    method = methods.METHODS[name]
    if {"vote", "steps", "layers"} & {*method.axes}:  # changes how a selector picks
        return [f"quest | {name}"]
    if name == "infllm":  # whose window is longer than the prompt
        return ["infllm(local=256, block_size=32)"]
    if not {"score", "codec", "select", "compression"} & {*method.axes}:  # added to another one
        return [f"h2o(budget={b}) | {name}" for b in (64, 512)]
    return [f"{name}(budget={b})" for b in (64, 128, 256, 512)] if "budget" in method.arguments else [name]


def followed(config) -> list[tuple[int, float]]:
    """Tokens that follow, and what the cache may take of the full one: beyond its window, if only these are cut."""
    cut = isinstance(config.budget, Beyond) and config.budget.share < 1
    return [(GENERATED, 1.1), (4 * config.steps, 1.0)] if cut else [(GENERATED, 1.0)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in methods.METHODS if name not in GIVEN])
def test_cache_bytes_are_bounded_by_full_cache(name: str, dtype, monkeypatch):
    card = json.loads((trained_weights.SHIPPED / "smollm2-135m" / trained_weights.CARD).read_text())
    monkeypatch.setattr(trained_weights, "fingerprint", lambda params: card["model"][0])
    for text in texts(name):
        config = methods.parse(text).bound(WORDLESS)  # type: ignore[arg-type]
        for new, share in followed(config):
            plan, (layers, _) = CacheShape(config, MODEL, 1, PROMPT + new, new, dtype).layout()
            _, (full, _) = CacheShape(methods.parse("full"), MODEL, 1, PROMPT + new, new, dtype).layout()
            for layer, made in zip(plan, layers, strict=True):
                reads = max(layer.needs.queries, layer.block if layer.needs.new else 0)
                assert (0 if made.queries is None else made.queries.pos.shape[1]) == reads, text
            took, whole = tree_bytes(layers), tree_bytes(full)
            if config.select and not config.budget.bounded:  # it holds all that the full cache does, and an index
                base = methods.METHODS["quest" if text.startswith("quest") else name]
                assert "keeps every token" in base.docstring and took < 1.25 * whole, text
            elif config.budget.statistic and not config.budget.bounded:  # until a prompt says which layers hold less
                assert took < 1.01 * whole, text
            elif name == "full" or config.prefill.traits.skips:  # what is read of a prompt is held
                assert took == whole, text
            else:
                assert took < share * whole, f"{text}: {took / whole:.2f} of the full cache"


@pytest.mark.parametrize("name", methods.METHODS)
def test_prompt_reduction_is_active_by_default(name: str):
    for text in texts(name):
        config = methods.parse(text)
        on = [config.prefill.pruning(MODEL, i) for i in range(MODEL.layers)]
        assert all(x is None or x.most(PROMPT) < PROMPT for x in on), text
        says = methods.METHODS[name].docstring
        if isinstance(config.prefill, PromptCompression):
            assert f"longer than {config.prefill.tokens} tokens" in says, text


def test_dense_layers_keep_all_tokens():
    for size in ("budget=256", "keep=0.25", "bytes='20MiB'"):
        config = methods.parse(f"knorm({size}, dense_layers=2)")
        plan, (layers, _) = CacheShape(config, MODEL, 1, PROMPT, 0, jnp.float32).layout()
        assert [x.capacity == PROMPT for x in plan] == [True] * 2 + [False] * 28, size
        assert not plan[0].tiers[0].evicts and all(x.tiers[0].evicts for x in plan[2:])
        assert "bytes" not in size or tree_bytes(layers) <= 20 * 2**20
        plain, _ = CacheShape(methods.parse(f"knorm({size})"), MODEL, 1, PROMPT, 0, jnp.float32).layout()
        assert "bytes" in size or [x.capacity for x in plan[2:]] == [x.capacity for x in plain[2:]]
    with pytest.raises(ValueError, match="0 or more"):
        methods.parse("knorm(budget=256, dense_layers=-1)")
