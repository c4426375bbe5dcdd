"""From GGUF to a model: names, numbers and what the converter rearranged."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.io.errors import FormatError
from jkv.io.gguf_model import read_gguf
from jkv.models.softcap import Capped
from support import ggufs

HF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_down": "mlp.down_proj",
}

EXTRA = {
    "gemma2": {
        "gemma2.attention.sliding_window": 16,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
    },
    "gemma3": {"gemma3.attention.sliding_window": 16},
    "granite": {
        key.format(arch="granite"): x
        for key, x in (
            (gguf.Keys.Attention.SCALE, 0.25),
            (gguf.Keys.LLM.EMBEDDING_SCALE, 12.0),
            (gguf.Keys.LLM.RESIDUAL_SCALE, 0.5),
            (gguf.Keys.LLM.LOGIT_SCALE, 8.0),
        )
    },
}
ARCHS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "smollm3", "olmo2"]


@pytest.mark.parametrize("arch", ARCHS)
def test_tensors_are_restored_to_unconverted_layout(tmp_path, arch):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf", arch, EXTRA.get(arch)))
    original = ggufs.weights(arch)
    for short in ("token_embd", "output_norm"):
        np.testing.assert_allclose(source.tensors[f"{HF[short]}.weight"](), original[f"{short}.weight"], atol=1e-6)
    for short in ("attn_q", "attn_k", "attn_v", "ffn_down"):
        got = source.tensors[f"model.layers.1.{HF[short]}.weight"]()
        np.testing.assert_array_equal(got, original[f"blk.1.{short}.weight"])
    after = arch.startswith("gemma") or arch == "olmo2"
    norms = {"post_ffw_norm": "post_feedforward_layernorm"} if after else {"ffn_norm": "post_attention_layernorm"}
    norms |= {"ffn_norm": "pre_feedforward_layernorm"} if arch.startswith("gemma") else {}
    for short, norm in norms.items():
        got = source.tensors[f"model.layers.0.{norm}.weight"]()
        np.testing.assert_allclose(got, original[f"blk.0.{short}.weight"], atol=1e-6)
    assert len(source.tensors) == len(original)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_builds_and_runs(tmp_path, arch):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf", arch, EXTRA.get(arch)))
    params = models.build(source.config, source.tensors, jnp.float32)
    logits = models.forward(params, jnp.ones((1, 5), int), jnp.arange(5)[None])
    assert logits.shape == (1, 5, ggufs.VOCAB) and bool(jnp.isfinite(logits).all())
    assert params.config.eos == (2, 0) and params.config.bos == 1


def test_tokenizer_is_not_part_of_pytree(tmp_path):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf"))
    params = models.build(source.config, source.tensors, jnp.float32)
    params = dataclasses.replace(params, tokenizer=source.tokenizer)
    assert jax.tree.structure(params) == jax.tree.structure(dataclasses.replace(params, tokenizer=object()))
    assert jax.tree.map(lambda x: x, params).tokenizer is None


def test_biases_are_permuted_with_their_rows(tmp_path):
    bias = np.arange(ggufs.HEADS * ggufs.DIM, dtype=np.float32)
    extra = {"blk.0.attn_q.bias": ggufs.permute(bias, ggufs.HEADS)}
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf", "llama", tensors=extra))
    np.testing.assert_array_equal(source.tensors["model.layers.0.self_attn.q_proj.bias"](), bias)
    assert source.config["attention_bias"]


def test_config_matches_metadata(tmp_path):
    config = read_gguf(ggufs.tiny(tmp_path / "m.gguf", "qwen3", {"qwen3.rope.freq_base": 5e5})).config
    assert config["model_type"] == "qwen3" and config["rope_theta"] == 5e5
    assert config["hidden_size"] == ggufs.WIDTH and config["num_hidden_layers"] == ggufs.LAYERS
    assert config["vocab_size"] == ggufs.VOCAB and config["head_dim"] == ggufs.DIM
    assert config["tie_word_embeddings"] and config["eos_token_id"] == [2, 0]


def test_output_tensor_unties_head(tmp_path):
    head = np.full((ggufs.VOCAB, ggufs.WIDTH), 0.5, np.float32)
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf", tensors={"output.weight": head}))
    assert not source.config["tie_word_embeddings"]
    np.testing.assert_array_equal(source.tensors["lm_head.weight"](), head)


def test_gemma3_constants(tmp_path):
    extra = {"gemma3.attention.sliding_window": 512, "gemma3.rope.scaling.type": "linear"}
    extra |= {"gemma3.rope.scaling.factor": 8.0}
    config = read_gguf(ggufs.tiny(tmp_path / "m.gguf", "gemma3", extra)).config
    assert config["query_pre_attn_scalar"] == ggufs.DIM and config["sliding_window"] == 512
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["rope_local_base_freq"] == 1e4


def test_gemma2_constants(tmp_path):
    config = read_gguf(ggufs.tiny(tmp_path / "m.gguf", "gemma2", EXTRA["gemma2"])).config
    read = models.read_config(config)
    assert read.scale == Capped(by=ggufs.DIM**-0.5, cap=50.0) and read.head_scale == Capped(by=1.0, cap=30.0)
    assert read.windows == (16, None)
    with pytest.raises(FormatError, match="gemma2.attn_logit_softcapping is None"):
        read_gguf(ggufs.tiny(tmp_path / "n.gguf", "gemma2"))


def test_granite_and_smollm3_constants(tmp_path):
    c = models.read_config(read_gguf(ggufs.tiny(tmp_path / "m.gguf", "granite", EXTRA["granite"])).config)
    assert (c.scale, c.embed_scale, c.residual_scale, c.head_scale) == (0.25, 12.0, 0.5, 0.125)
    c = models.read_config(read_gguf(ggufs.tiny(tmp_path / "n.gguf", "smollm3")).config | {"num_hidden_layers": 4})
    assert [bool(rope.inv_freq) for rope in c.ropes] == [True, True, True, False]
    with pytest.raises(FormatError, match="OLMo 3, with local layers"):
        read_gguf(ggufs.tiny(tmp_path / "o.gguf", "olmo2", {"olmo2.attention.sliding_window": 4}))
    with pytest.raises(FormatError, match="sliding_window is 4, less than the context"):
        read_gguf(ggufs.tiny(tmp_path / "q.gguf", "qwen2", {"qwen2.attention.sliding_window": 4}))
    assert read_gguf(ggufs.tiny(tmp_path / "r.gguf", "qwen2", {"qwen2.attention.sliding_window": 128}))
    with pytest.raises(FormatError, match="finetuned is False, so it turns no queries"):
        read_gguf(
            ggufs.tiny(tmp_path / "s.gguf", "granite", EXTRA["granite"] | {"granite.rope.scaling.finetuned": False})
        )


@pytest.mark.parametrize("arch", ARCHS)
def test_tensor_names_are_those_of_gguf_format(arch):
    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = {gguf.TENSOR_NAMES[x].format(bid=1) for x in gguf.MODEL_TENSORS[kind]}
    assert {name.rpartition(".")[0] for name in ggufs.weights(arch) if "blk.0" not in name} <= known


def llama3_table(theta, dim, factor=32.0, old=8192):
    """The table as the paper's formula gives it, one frequency at a time."""
    table = []
    for i in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / dim)
        if wavelength < old / 4:
            table.append(1.0)
        elif wavelength > old:
            table.append(factor)
        else:
            smooth = (old / wavelength - 1) / 3
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_llama3_rope_scaling_is_read_from_its_table(tmp_path):
    meta = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 8}
    table = llama3_table(500000.0, 8)
    config = read_gguf(ggufs.tiny(tmp_path / "m.gguf", meta=meta, tensors={"rope_freqs.weight": table})).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    other = llama3_table(500000.0, 8, old=2048 * 64)
    with pytest.raises(FormatError, match="not a Llama 3 table"):
        read_gguf(ggufs.tiny(tmp_path / "n.gguf", meta=meta, tensors={"rope_freqs.weight": other}))


def rope(tmp_path, **changes):
    """The first layer's rope of a tiny Llama with this metadata."""
    meta = {f"llama.rope.{key.replace('__', '.')}": x for key, x in changes.items()}
    return models.read_config(read_gguf(ggufs.tiny(tmp_path / "m.gguf", meta=meta)).config).ropes[0]


def test_rope_scaling_follows_llama_cpp(tmp_path):
    plain = rope(tmp_path)
    quarter = pytest.approx([x / 4 for x in plain.inv_freq])
    for same in ({"scaling__factor": 4.0}, {"scale_linear": 4.0}, {"scaling__type": "linear", "scaling__factor": 4.0}):
        assert rope(tmp_path, **same).inv_freq == quarter
    for same in ({"scaling__type": "none", "scaling__factor": 4.0}, {"scaling__factor": 0.0}, {"scaling__factor": 1.0}):
        assert rope(tmp_path, **same) == plain
    yarn = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 64}
    gain = 1 + 0.1 * np.log(4)
    same = {f"scaling__yarn_{x}": y for x, y in dict(beta_fast=32.0, beta_slow=1.0, ext_factor=1.0).items()}
    assert rope(tmp_path, **yarn).scale == pytest.approx(gain)
    assert rope(tmp_path, **yarn, **same, scaling__yarn_attn_factor=float(gain)) == rope(tmp_path, **yarn)
    more = rope(tmp_path, **yarn, scaling__attn_factor=2.0)
    assert more.scale == pytest.approx(2 * gain) and more.inv_freq == rope(tmp_path, **yarn).inv_freq != plain.inv_freq


def test_unused_rope_tables_are_reported(tmp_path, capsys):
    tables = {f"blk.{i}.attn_rot_embd.weight": np.ones(4, np.float32) for i in range(2)}
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf", tensors=tables))
    assert "blk.0.attn_rot_embd.weight and the like are left unread (2 tensors)" in capsys.readouterr().err
    assert len(source.tensors) == len(ggufs.weights())


def test_gemma3_sliding_windows_follow_metadata(tmp_path):
    def windows(**changes):
        meta = {f"gemma3.attention.{key}": x for key, x in changes.items()}
        return models.read_config(read_gguf(ggufs.tiny(tmp_path / "m.gguf", "gemma3", meta)).config).windows

    assert windows(sliding_window=16) == (16, 16)
    assert windows(sliding_window=16, sliding_window_pattern=2) == (16, None)
    assert windows(sliding_window=16, sliding_window_pattern=[False, True]) == (None, 16)
    assert windows() == windows(sliding_window=0) == (None, None)


REFUSED = {
    "layers": ({"llama.block_count": 2**32 - 1}, {}, "claims 4,294,967,295 layers"),
    "heads 0": ({"llama.attention.head_count": 0}, {}, "head_count is 0"),
    "heads text": ({"llama.attention.head_count": "4"}, {}, "not a positive number"),
    "no width": ({"llama.embedding_length": None}, {}, "embedding_length is None"),
    "heads odd": ({"llama.attention.head_count": 3}, {}, "3 heads cannot share"),
    "experts": ({"llama.expert_count": 8}, {}, "mixture of experts"),
    "partial rotation": ({"llama.rope.dimension_count": 4}, {}, "rotated"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
    "two scalings": (
        {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
        {},
        "scale_linear is 2.0, but",
    ),
    "scaling and table": (
        {"llama.rope.scaling.factor": 4.0},
        {"rope_freqs.weight": np.ones(4, np.float32)},
        "by metadata",
    ),
    "gain of linear": ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 2.0}, {}, "for yarn only"),
    "yarn otherwise": ({"llama.rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast is 16.0, where readers"),
    "factors": ({}, {"rope_factors_long.weight": np.ones(4, np.float32)}, "rope_factors_long"),
    "causal": ({"llama.attention.causal": False}, {}, "only causal attention"),
    "values": ({"llama.attention.value_length": 4}, {}, "values must have as many"),
    "unknown tensor": ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "attn_sinks"),
    "flat embedding": ({}, {"token_embd.weight": np.ones(64, np.float32)}, "two-dimensional"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(tmp_path, case):
    meta, tensors, cause = REFUSED[case]
    path = ggufs.tiny(tmp_path / "m.gguf", meta=meta, tensors=tensors)
    with pytest.raises(FormatError, match=cause) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(str(path))


def test_unknown_architecture_error_lists_known_ones(tmp_path):
    with pytest.raises(FormatError, match="'mamba'.*llama, qwen2, qwen3, gemma2, gemma3, granite, smollm3, olmo2"):
        read_gguf(ggufs.write(tmp_path / "m.gguf", {"a": np.ones(3, np.float32)}, {}, "mamba"))
