"""Building Params from named tensors: every tensor once, and everything that is wrong in one message."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from golden.make import CASES, torch_logits, torch_model, weights
from jkv import models
from jkv.models.weights import params as building
from jkv.models.weights.params import EXACT


def thunks(tensors):
    return {n: (lambda a=a: a) for n, a in tensors.items()}


@pytest.fixture
def tensors():
    return weights(CASES["llama"], 0)


def test_qkv_and_gate_up_are_stacked_in_order(tensors):
    p = models.build(CASES["llama"], thunks(tensors), jnp.float32)
    q, k, v = (tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    h, g, d = p.config.heads, p.config.groups, p.config.head_dim
    for head in range(h):
        own = [q[head * g * d :][: g * d], k[head * d :][:d], v[head * d :][:d]]
        np.testing.assert_array_equal(p.layers[1]["qkv"][head].reshape(-1, p.config.width), np.concatenate(own))
    gate, up = (tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    np.testing.assert_array_equal(p.layers[1]["gate_up"].swapaxes(0, 1).reshape(2, *gate.shape), [gate, up])
    total = sum(a.size for a in tensors.values())
    assert sum(a.size for a in jax.tree.leaves(p)) == total


def test_fused_checkpoint_equals_separate_tensors():
    phi3 = CASES["phi3"] | dict(num_key_value_heads=2)
    llama = {name: x for name, x in phi3.items() if name != "sliding_window"} | dict(model_type="llama")
    apart = weights(llama, 0)
    fused = dict(apart)
    for i in range(3):
        for whole, at, names in (("self_attn.qkv", "self_attn", "qkv"), ("mlp.gate_up", "mlp", ("gate", "up"))):
            parts = [fused.pop(f"model.layers.{i}.{at}.{n}_proj.weight") for n in names]
            fused[f"model.layers.{i}.{whole}_proj.weight"] = np.concatenate(parts)
    made = models.build(phi3, thunks(fused), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, made.layers, models.build(llama, thunks(apart), jnp.float32).layers)
    known = models.abstract(made.config)
    assert [x.shape for x in jax.tree.leaves(made)] == [x.shape for x in jax.tree.leaves(known)]


@pytest.mark.parametrize("case", ["qwen3_5_moe_text", "qwen3_next"])
def test_experts_stacked_in_one_tensor_are_read(case, at="model.layers"):
    each = weights(CASES[case], 0)
    c = models.read_config(CASES[case])
    whole = {n: x for n, x in each.items() if ".mlp.experts." not in n}
    for i in c.experts.at:
        every = {
            part: [each[f"{at}.{i}.mlp.experts.{n}.{part}_proj.weight"] for n in range(c.experts.count)]
            for part in ("gate", "up", "down")
        }
        both = [np.concatenate(x) for x in zip(every["gate"], every["up"], strict=True)]
        whole |= {
            f"{at}.{i}.mlp.experts.gate_up_proj": np.stack(both),
            f"{at}.{i}.mlp.experts.down_proj": np.stack(every["down"]),
        }
    made = models.build(CASES[case], thunks(whole), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, made, models.build(CASES[case], thunks(each), jnp.float32))
    for name in (f"{at}.0.mlp.experts.gate_up_proj", f"{at}.3.mlp.experts.down_proj"):
        broken = whole | {name: whole[name][:, :-1]}
        with pytest.raises(ValueError, match=f"{name} has shape .*, the config needs "):
            models.build(CASES[case], thunks(broken), jnp.float32)


def test_vision_tower_is_not_read():
    def never():
        raise AssertionError("a tensor of the tower was read")

    case = CASES["gemma3-images"]
    tower = {"vision_tower.vision_model.embeddings.patch_embedding.weight": never}
    tower |= {"multi_modal_projector.mm_soft_emb_norm.weight": never}
    made = models.build(case, thunks(weights(case, 0)) | tower, jnp.float32)
    assert len(made.layers) == 3
    with pytest.raises(ValueError, match="1 tensors unused: audio_tower.weight"):
        models.build(case, thunks(weights(case, 0)) | {"audio_tower.weight": never}, jnp.float32)


def test_every_tensor_is_read_once_and_copied(tensors):
    taken = []

    def lazy(name):
        def take():
            taken.append(name)
            return tensors[name]

        return take

    # an array that starts at a multiple of 64 bytes is one that jax would share instead of copying
    name, plain = "model.embed_tokens.weight", tensors["model.embed_tokens.weight"]
    room = np.empty(plain.size + 16, np.float32)
    tensors[name] = room[-room.ctypes.data // 4 % 16 :][: plain.size].reshape(plain.shape)
    tensors[name][:] = plain
    assert tensors[name].ctypes.data % 64 == 0
    p = models.build(CASES["llama"], {n: lazy(n) for n in tensors}, jnp.float32)
    assert sorted(taken) == sorted(tensors)
    before = np.array(p.embed)
    tensors[name][:] = 7
    np.testing.assert_array_equal(p.embed, before)


def test_requested_dtype_is_used(tensors):
    half = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}
    for dtype in (jnp.bfloat16, jnp.float32):
        p = models.build(CASES["llama"], thunks(half), dtype)
        assert {a.dtype for a in jax.tree.leaves(p)} == {jnp.dtype(dtype)}
        np.testing.assert_array_equal(np.asarray(p.norm, np.float32), half["model.norm.weight"].astype(np.float32))


def test_missing_and_unused_tensors_are_named_together(tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="1 tensors missing: model.norm.weight; 1 tensors unused: .*q_proj.bias"):
        models.build(CASES["llama"], thunks(tensors), jnp.float32)


def test_long_list_of_missing_tensors_is_truncated(tensors):
    with pytest.raises(ValueError, match="30 tensors missing: model.embed_tokens.weight.* and 25 more; take the "):
        models.build(CASES["llama"], {}, jnp.float32)
    assert len(tensors) == 30


def test_every_bad_tensor_is_named_in_one_error(tensors):
    tensors["model.norm.weight"] = np.zeros(47, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.nan
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.full((32, 48), np.inf, ml_dtypes.bfloat16)
    with pytest.raises(ValueError) as e:
        models.build(CASES["llama"], thunks(tensors), jnp.float32)
    for say in (
        "model.norm.weight has shape (47,), the config needs (48,)",
        "model.layers.0.mlp.up_proj.weight holds NaN or infinity",
        "model.layers.2.self_attn.k_proj.weight holds NaN or infinity",
    ):
        assert say in str(e.value)


def test_transposed_tensor_is_refused(tensors):
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(80, 48\), the config needs \(48, 80\)"):
        models.build(CASES["llama"], thunks(tensors), jnp.float32)


def test_known_spare_tensors_are_not_read():
    def never():
        raise AssertionError("a spare tensor was read")

    tensors = thunks(weights(CASES["llama-tied"], 0))
    buffers = [f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")]
    spare = {f"model.layers.0.self_attn.{name}": never for name in buffers}
    assert models.build(CASES["llama-tied"], tensors | spare, jnp.float32).head is None


@pytest.mark.parametrize("case", CASES)
def test_untied_head_is_used_and_copied_embedding_is_not(case):
    hf, tied = CASES[case], {"tie_word_embeddings": True}
    hf = hf | tied | ({"text_config": hf["text_config"] | tied} if "text_config" in hf else {})
    table, tensors = models.FAMILIES[hf["model_type"]].TENSORS, thunks(weights(hf, 0))
    embed = tensors[table.embed]()
    for head, own in ((embed, False), (embed + (np.arange(len(embed)) == 1)[:, None], True), (embed[:-1], True)):
        config, found = models.settle_head(hf, tensors | {table.head: lambda x=head: x})
        assert models.read_config(config).tied != own and (table.head in found) == own
    assert models.settle_head(hf, tensors) == (hf, tensors)


def test_head_in_checkpoint_overrides_tied_config(tensors):
    tied = models.build(CASES["llama"] | {"tie_word_embeddings": True}, thunks(tensors), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, tied, models.build(CASES["llama"], thunks(tensors), jnp.float32))


@pytest.mark.peers
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_tied_config_with_untied_head_equals_transformers(case):
    pytest.importorskip("torch")
    hf = CASES[case] | {"tie_word_embeddings": True}
    tensors = weights(hf, 0)
    tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, 0)
    ids, pos = np.arange(12)[None] % 100, np.arange(12)[None]
    want = torch_logits(torch_model(hf, tensors), ids, pos)
    got = models.forward(models.build(hf, thunks(tensors), jnp.float32), jnp.asarray(ids), jnp.asarray(pos))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_random_is_seeded(case):
    one, same, other = (models.random(CASES[case], seed=s) for s in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), one, other)))
    first = next(one.layers[0][name] for name in ("qkv", "kv", "mix") if name in one.layers[0])
    assert 0.5 < np.std(first) * one.config.width**0.5 < 2
    half = models.random(one.config, seed=3, dtype=jnp.bfloat16)
    assert half.embed.dtype == jnp.bfloat16
    assert {x.dtype for layer in half.layers for n, x in layer.items() if n in EXACT} <= {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("case", ["llama", "llama-tied", "phi3", "qwen2", "mla"])
def test_disassembled_model_round_trips(case):
    p = models.random(CASES[case], seed=5)
    tensors = building.disassemble(p, models.FAMILIES[p.config.family].TENSORS)
    known = building.names(p.config, models.FAMILIES[p.config.family].TENSORS)
    assert {name: x.shape for name, x in tensors.items()} == known
    jax.tree.map(np.testing.assert_array_equal, models.build(CASES[case], thunks(tensors), jnp.float32), p)
