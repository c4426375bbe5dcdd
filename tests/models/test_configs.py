"""Reading config dicts: every field that matters is read, everything that would matter and is not known is refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden.make import CASES, GEMMA, LLAMA3, LONGROPE, MULTIPLIED, QWEN3_5, YARN
from jkv import models

HARMLESS, rope = models.config.HARMLESS, models.config.rope

WINDOWS = [{"sliding_window": 9}, {"sliding_window_pattern": 3}, {"num_hidden_layers": 4}]
CHANGES = [  # case, field, new value, the ModelConfig field that must differ
    ("llama", "vocab_size", 161, "vocab"),
    ("llama", "hidden_size", 64, "width"),
    ("llama", "intermediate_size", 96, "hidden"),
    ("llama", "num_hidden_layers", 2, "layers"),
    ("llama", "num_attention_heads", 6, "groups"),
    ("llama", "num_key_value_heads", 1, "heads"),
    ("llama", "head_dim", 8, "head_dim"),
    ("llama", "head_dim", 8, "scale"),
    ("llama", "head_dim", None, "head_dim"),
    ("llama", "max_position_embeddings", 256, "context"),
    ("llama", "rms_norm_eps", 1e-4, "eps"),
    ("llama", "hidden_act", "gelu_pytorch_tanh", "act"),
    ("llama", "tie_word_embeddings", True, "tied"),
    ("llama", "eos_token_id", [2, 3], "eos"),
    ("llama", "bos_token_id", 1, "bos"),
    ("llama", "rope_parameters", {"rope_theta": 1e4}, "ropes"),
    ("llama-tied", "rope_theta", 1e6, "ropes"),
    ("llama-linear", "rope_scaling", None, "ropes"),
    ("llama-linear", "rope_scaling", {"type": "linear", "factor": 2.0}, "ropes"),
    *[("llama-llama3", "rope_scaling", LLAMA3 | {k: 2 * v}, "ropes") for k, v in LLAMA3.items() if k != "rope_type"],
    ("qwen2", "rope_scaling", YARN | {"factor": 2.0}, "ropes"),
    ("qwen2", "rope_scaling", YARN | {"factor": 8.0}, "context"),
    ("qwen2", "rope_scaling", YARN | {"original_max_position_embeddings": 64}, "ropes"),
    ("qwen3", "rope_parameters", CASES["qwen3"]["rope_parameters"] | {"beta_fast": 1.0}, "ropes"),
    ("qwen2", "rope_scaling", YARN | {"beta_slow": 0.1}, "ropes"),
    ("qwen2", "rope_scaling", YARN | {"attention_factor": 2.0}, "ropes"),
    ("qwen2", "rope_scaling", YARN | {"mscale": 1.0, "mscale_all_dim": 2.0}, "ropes"),
    ("qwen2", "rope_scaling", YARN | {"truncate": False}, "ropes"),
    ("mistral", "sliding_window", None, "windows"),
    ("mistral", "sliding_window", 9, "windows"),
    ("qwen2-window", "use_sliding_window", False, "windows"),
    ("qwen2-window", "max_window_layers", 2, "windows"),
    ("qwen2-window", "sliding_window", 9, "windows"),
    ("qwen3", "layer_types", ["full_attention", "full_attention", "sliding_attention"], "windows"),
    ("gemma3", "hidden_activation", "silu", "act"),
    ("gemma3", "sliding_window", 9, "windows"),
    ("gemma3", "sliding_window_pattern", 3, "windows"),
    ("gemma3", "query_pre_attn_scalar", 16, "scale"),
    ("gemma3", "hidden_size", 64, "embed_scale"),
    ("gemma3", "rope_theta", 1e5, "ropes"),
    ("gemma3", "rope_local_base_freq", 1e5, "ropes"),
    ("gemma3", "rope_scaling", None, "ropes"),
    ("gemma3-types", "layer_types", ["full_attention"] * 3, "windows"),
    *[("gemma3-images", "text_config", CASES["gemma3-images"]["text_config"] | x, "windows") for x in WINDOWS],
    ("gemma3-images", "tie_word_embeddings", False, "tied"),
    ("gemma3-images", "eos_token_id", [1, 106], "eos"),
    ("gemma2", "attn_logit_softcapping", 2.0, "scale"),
    ("gemma2", "attn_logit_softcapping", None, "scale"),
    ("gemma2", "query_pre_attn_scalar", 16, "scale"),
    ("gemma2", "final_logit_softcapping", 3.0, "head_scale"),
    ("gemma2", "final_logit_softcapping", None, "head_scale"),
    ("gemma2", "sliding_window", 9, "windows"),
    ("gemma2", "layer_types", ["full_attention"] * 3, "windows"),
    ("gemma2", "hidden_size", 64, "embed_scale"),
    ("gemma2", "rope_theta", 1e5, "ropes"),
    ("phi3", "sliding_window", None, "windows"),
    ("phi3", "partial_rotary_factor", 0.5, "ropes"),
    ("phi3-short", "original_max_position_embeddings", 16, "ropes"),
    ("phi3-short", "max_position_embeddings", 256, "ropes"),
    *[
        ("phi3-long", "rope_scaling", LONGROPE | x, "ropes")
        for x in ({"long_factor": [2.0] * 6}, {"factor": 2.0}, {"attention_factor": 2.0})
    ],
    ("phi3-short", "rope_scaling", LONGROPE | {"short_factor": [2.0] * 6}, "ropes"),
    ("smollm3", "no_rope_layer_interval", 3, "ropes"),
    ("smollm3", "no_rope_layers", [1, 1, 1], "ropes"),
    ("smollm3-window", "use_sliding_window", False, "windows"),
    ("smollm3-window", "sliding_window", 9, "windows"),
    ("smollm3-window", "layer_types", ["full_attention"] * 3, "windows"),
    ("olmo2", "rope_theta", 1e5, "ropes"),
    ("olmo2", "rms_norm_eps", 1e-4, "eps"),
    ("olmo3", "sliding_window", 9, "windows"),
    ("olmo3", "layer_types", ["full_attention"] * 4, "windows"),
    ("olmo3", "rope_scaling", None, "ropes"),
    ("granite", "attention_multiplier", 0.5, "scale"),
    ("granite", "embedding_multiplier", 3.0, "embed_scale"),
    ("granite", "residual_multiplier", 0.5, "residual_scale"),
    ("granite", "logits_scaling", 2.0, "head_scale"),
    *[("mamba2", name, 2 * CASES["mamba2"].get(name, 4), "mixers") for name in ("state_size", "conv_kernel")],
    ("mamba2", "num_hidden_layers", 2, "mixers"),
    ("mamba2", "n_groups", 1, "mixers"),
    ("mamba2", "time_step_limit", [0.0, 0.1], "mixers"),
    ("mamba2", "layer_norm_epsilon", 1e-4, "eps"),
    ("mamba2", "tie_word_embeddings", True, "tied"),
    ("bamba", "attn_layer_indices", [1], "layers"),
    ("bamba", "attn_layer_indices", [0, 2], "mixers"),
    ("bamba", "num_hidden_layers", 3, "mixers"),
    ("bamba", "mamba_n_heads", 12, "mixers"),
    *[("bamba", name, 1, "mixers") for name in ("mamba_n_groups", "mamba_d_conv", "mamba_d_state")],
    ("bamba", "mamba_expand", 4, "mixers"),
    ("bamba", "time_step_limit", [0.0, 0.1], "mixers"),
    ("bamba", "rope_theta", 1e5, "ropes"),
    *[("falcon_h1", f"{name}_multiplier", 2.5, "gains") for name in MULTIPLIED[:-2]],
    ("falcon_h1", "lm_head_multiplier", 2.5, "head_scale"),
    ("falcon_h1", "embedding_multiplier", 2.5, "embed_scale"),
    ("falcon_h1", "mlp_multipliers", [0.9, 2.5], "gains"),
    ("falcon_h1", "ssm_multipliers", [1.0] * 5, "gains"),
    *[("falcon_h1", f"mamba_{name}", 1, "mixers") for name in ("n_groups", "d_conv", "d_state", "rms_norm")],
    ("falcon_h1", "mamba_n_heads", 12, "mixers"),
    ("falcon_h1", "mamba_d_ssm", None, "mixers"),
    ("falcon_h1-norm", "mamba_expand", 4, "mixers"),
    ("falcon_h1", "time_step_limit", [0.0, 0.1], "mixers"),
    ("falcon_h1", "num_hidden_layers", 3, "layers"),
    ("mixtral", "num_local_experts", 8, "experts"),
    ("mixtral", "num_experts_per_tok", 1, "experts"),
    ("mixtral", "intermediate_size", 96, "experts"),
    ("mixtral", "sliding_window", 9, "windows"),
    *[("qwen3_moe", name, 4, "experts") for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")],
    ("qwen3_moe", "norm_topk_prob", False, "experts"),
    ("qwen3_moe", "mlp_only_layers", [], "experts"),
    ("qwen3_moe", "decoder_sparse_step", 2, "experts"),
    *[
        (case, name, 4, "experts")
        for case in ("qwen3_next", "qwen3_5_moe_text")
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    ],
    ("qwen3_next", "norm_topk_prob", True, "experts"),
    ("qwen3_next", "mlp_only_layers", [], "experts"),
    ("qwen3_next", "decoder_sparse_step", 2, "experts"),
    *[
        ("qwen3_5_text", f"linear_{name}", new, "mixers")
        for name, new in (("num_key_heads", 3), ("num_value_heads", 4), ("key_head_dim", 8), ("value_head_dim", 8))
    ],
    ("qwen3_5_text", "linear_conv_kernel_dim", 3, "mixers"),
    ("qwen3_5_text", "full_attention_interval", 2, "mixers"),
    ("qwen3_5_text", "layer_types", ["full_attention"] * 3 + ["linear_attention"], "layers"),
    ("qwen3_5_text", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "ropes"),
    ("qwen3_5", "text_config", QWEN3_5 | {"full_attention_interval": 2}, "mixers"),
    ("qwen3_5", "tie_word_embeddings", True, "tied"),
    *[("olmoe", name, 4, "experts") for name in ("num_experts", "num_experts_per_tok")],
    ("olmoe", "norm_topk_prob", True, "experts"),
    ("gpt_oss", "num_local_experts", 8, "experts"),
    ("gpt_oss", "num_experts_per_tok", 1, "experts"),
    ("gpt_oss", "layer_types", ["full_attention"] * 3, "windows"),
    ("gpt_oss", "sliding_window", 9, "windows"),
    ("gpt_oss", "rope_scaling", None, "ropes"),
    ("gpt_oss", "rope_theta", 1e4, "ropes"),
    *[("deepseek_v3", n, 16, "latent") for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")],
    ("deepseek_v3", "rope_interleave", False, "latent"),
    ("deepseek_v3", "qk_rope_head_dim", 16, "ropes"),
    ("deepseek_v3", "kv_lora_rank", 16, "head_dim"),
    ("deepseek_v3", "qk_nope_head_dim", 16, "scale"),
    ("deepseek_v3", "rope_scaling", None, "scale"),
    ("deepseek_v3", "first_k_dense_replace", 2, "experts"),
    *[("deepseek_v3", n, 2, "experts") for n in ("n_group", "num_experts_per_tok", "moe_intermediate_size")],
    *[("deepseek_v3", n, 16, "experts") for n in ("n_routed_experts", "n_shared_experts", "routed_scaling_factor")],
    ("deepseek_v3", "topk_group", 3, "experts"),
    ("deepseek_v3", "norm_topk_prob", False, "experts"),
    ("deepseek_v2-groups", "topk_method", "greedy", "experts"),
    *[("mla", n, 16, "latent") for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")],
    ("mla", "rope_interleave", True, "latent"),
    ("deepseek_v2-groups", "rope_scaling", YARN, "scale"),
]


@pytest.mark.parametrize("case, field, new, attr", CHANGES)
def test_relevant_field_is_read(case, field, new, attr):
    hf = CASES[case] | ({"use_sliding_window": True} if field == "layer_types" and case == "qwen3" else {})
    old, changed = models.read_config(hf), models.read_config(hf | {field: new})
    assert getattr(old, attr) != getattr(changed, attr)
    assert old != changed


# what each field of ModelConfig changes in the model itself; the others are read by whoever generates
FUNCTION = {
    "eps": ("llama", 0.1),
    "act": ("llama", "gelu_tanh"),
    "scale": None,  # read by attend: below
    "ropes": None,
    "windows": None,
    "family": ("qwen3", "llama"),
    "embed_scale": ("gemma3", 1.0),
    "head_scale": ("llama", 2.0),
    "residual_scale": ("granite", 1.0),
    "latent": ("deepseek_v3", dataclasses.replace(models.read_config(CASES["deepseek_v3"]).latent, paired=False)),
    "experts": ("mixtral", dataclasses.replace(models.read_config(CASES["mixtral"]).experts, gain=2.0)),
    "mixers": ("mamba2", dataclasses.replace(models.read_config(CASES["mamba2"]).mixers, limit=(0.1, 0.2))),
}
SHAPES = {"layers": 2, "heads": 1, "groups": 1, "head_dim": 8, "width": 32, "hidden": 96, "vocab": 161, "tied": True}
OTHERS = {"context", "eos", "bos", "gains"}


def test_tables_cover_every_config_field():
    assert {f.name for f in dataclasses.fields(models.ModelConfig)} == {*FUNCTION, *SHAPES, *OTHERS}


@pytest.mark.parametrize("attr", FUNCTION)
def test_config_field_changes_function(attr):
    case, new = FUNCTION[attr] or ("mistral", None)
    p = models.random(CASES[case])
    changed = {
        "scale": p.config.scale * 2,
        "ropes": models.read_config(CASES["llama-linear"]).ropes,
        "windows": (2,) * 3,
    }.get(attr, new)
    q = dataclasses.replace(p, config=dataclasses.replace(p.config, **{attr: changed}))
    ids, pos = jnp.ones((1, 6), int) + jnp.arange(6)[None], jnp.arange(6)[None]
    assert np.abs(models.forward(p, ids, pos) - models.forward(q, ids, pos)).max() > 1e-3


@pytest.mark.parametrize("attr", SHAPES)
def test_config_field_changes_tensors(attr):
    c = models.read_config(CASES["llama"])
    table = models.FAMILIES["llama"].TENSORS
    assert models.params.names(c, table) != models.params.names(dataclasses.replace(c, **{attr: SHAPES[attr]}), table)


REFUSALS = [  # case, change, what the message must say
    ("llama", {"attention_bias": True}, "attention_bias.*True.*only False.*qwen2"),
    ("llama", {"mlp_bias": True}, "mlp_bias.*only false"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"hidden_act": "relu"}, "hidden_act.*relu.*use one of"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.*unquantized"),
    ("llama", {"num_local_experts": 8}, "num_local_experts.*8.*delete it from config.json"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads.*divide"),
    ("llama", {"head_dim": 15}, "head_dim.*even"),
    ("llama", {"hidden_size": None}, "hidden_size.*missing"),
    ("llama", {"hidden_size": 48.5}, "hidden_size.*48.5.*positive int"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps.*nan"),
    ("llama", {"vocab_size": True}, "vocab_size.*True"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*keep one"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type.*dynamic.*yarn"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*length of the text"),
    ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor.*missing"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "rope_parameters.factor.*-1.0"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "mscale": 2.0}}, "rope_parameters.mscale.*2.0"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"model_type": "mamba"}, "mamba.*use one of.*llama"),
    ("mistral", {"num_key_value_heads": ...}, "num_key_value_heads.*missing"),
    ("qwen2", {"attention_bias": False}, "attention_bias.*only True"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types.*3 entries"),
    ("qwen3", {"layer_types": ["full_attention", "full_attention", "linear_attention"]}, "linear_attention"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping.*50.0"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping.*30.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"sliding_window": None}, "sliding layers need sliding_window"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.*full_attention"),
    ("gemma3-images", {"text_config": [1]}, "text_config.*object"),
    ("gemma3-images", {"text_config": {"new": 1}}, "new.*delete it from config.json"),
    ("gemma3-images", {"new": 1}, "new.*gemma3.*delete it from config.json"),
    ("gemma3-images", {"quantization_config": {"bits": 4}}, "quantization_config.*unquantized"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping.*positive"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor.*pairs"),
    ("phi3", {"partial_rotary_factor": 2}, "partial_rotary_factor.*1 is the most"),
    ("phi3-long", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "rope_scaling.long_factor.*6 positive numbers"),
    ("phi3-long", {"rope_scaling": LONGROPE | {"short_factor": ...}}, "short_factor"),
    ("phi3-long", {"rope_scaling": LONGROPE | {"new": 1}}, "rope_scaling.new.*delete it from config.json"),
    ("phi3", {"rope_scaling": {"type": "spiral"}}, "rope_parameters.rope_type.*spiral"),
    ("smollm3", {"no_rope_layers": [1, 2, 1]}, "no_rope_layers.*3 numbers, 1 or 0"),
    ("smollm3", {"mlp_bias": True}, "mlp_bias.*only false"),
    ("olmo2", {"attention_bias": True}, "attention_bias"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.*full_attention"),
    ("granite", {"logits_scaling": 0}, "logits_scaling.*positive"),
    ("granite", {"attention_bias": True}, "attention_bias"),
    ("mamba2", {"num_heads": 5}, "num_heads.*80 must be 96"),
    ("mamba2", {"n_groups": 4}, "n_groups.*divide the 6 heads"),
    ("mamba2", {"use_bias": True}, "use_bias.*only false"),
    *[
        ("mamba2", {"time_step_limit": x}, "time_step_limit.*smaller one first")
        for x in ([0.1, 0.0], [0.1], 3, [{}, 1])
    ],
    ("mamba2", {"sliding_window": 8}, "sliding_window.*delete it from config.json"),
    ("bamba", {"attn_layer_indices": []}, "attn_layer_indices.*one or more of the 4 blocks"),
    ("bamba", {"attn_layer_indices": [4]}, "attn_layer_indices"),
    ("bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor.*only 0.5"),
    ("bamba", {"mamba_d_head": 10}, "mamba_d_head.*6 heads of a mixer share 96 channels"),
    ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ("bamba", {"mamba_new": 1}, "mamba_new.*delete it from config.json"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias.*only false"),
    ("falcon_h1", {"mamba_conv_bias": False}, "mamba_conv_bias.*only true"),
    ("falcon_h1", {"attn_layer_indices": [0]}, "attn_layer_indices.*every layer attends"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers.*5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers.*positive"),
    ("falcon_h1", {"mamba_d_head": 10}, "mamba_d_head.*6 heads of a mixer share 72 channels"),
    ("falcon_h1-norm", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate.*only false"),
    ("falcon_h1", {"mamba_new": 1}, "mamba_new.*delete it from config.json"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok.*5.*there are 4 experts"),
    ("mixtral", {"num_local_experts": 10**6}, "num_experts.*4,096 are the most"),
    ("mixtral", {"moe_new": 1}, "moe_new.*delete it from config.json"),
    ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers.*list of blocks"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layer_types.*one or more of each"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types.*linear_attention or full_attention"),
    ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types.*= 4 texts"),
    ("qwen3_next", {"num_experts_per_tok": 9}, "num_experts_per_tok.*9.*there are 8 experts"),
    ("qwen3_next", {"linear_new": 1}, "linear_new.*delete it from config.json"),
    ("qwen3_5_text", {"num_experts": 8}, "num_experts.*delete it from config.json"),
    ("qwen3_5_text", {"linear_num_key_heads": 4}, "linear_num_key_heads.*divide the 6 heads of values"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate.*only true"),
    ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype.*only float32"),
    ("qwen3_5_text", {"attention_bias": True}, "attention_bias"),
    ("qwen3_5_text", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "partial_rotary.*pairs"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers.*in every block, or in none"),
    ("qwen3_5", {"text_config": [1]}, "text_config.*object"),
    ("qwen3_5", {"new": 1}, "new.*delete it from config.json"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv.*8.0"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob.*only false"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func.*only softmax"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method.*group_limited_greedy"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq.*only 1"),
    ("deepseek_v2", {"first_k_dense_replace": 4}, "first_k_dense_replace.*3 blocks"),
    ("deepseek_v2", {"kv_lora_rank": 1020}, "kv_lora_rank.*1,024 channels"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads.*every query head has its own"),
    ("mla", {"n_routed_experts": 8}, "n_routed_experts.*8.*mla"),
    ("deepseek_v3", {"n_group": 3}, "n_group.*equal parts of the 8 experts"),
    ("deepseek_v3", {"n_group": 8}, "n_group.*of 2 or more"),
    ("deepseek_v3", {"topk_group": 1}, "topk_group.*groups of 2, for 3 experts"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func.*only sigmoid"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim.*sum"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit.*only 7.0"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha.*only 1.702"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias.*only True"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


@pytest.mark.parametrize("case, change, says", REFUSALS)
def test_unsupported_fields_are_refused_by_name(case, change, says):
    hf = {k: v for k, v in (CASES[case] | change).items() if v is not ...}
    with pytest.raises(ValueError, match=says):
        models.read_config(hf)


def test_config_of_another_family_is_refused():
    with pytest.raises(ValueError, match="model_type 'mistral'.*'llama'"):
        models.llama.config(CASES["mistral"])


def respelled(x, turn):
    """A JSON value with every number as the other type that holds it, and objects back to front."""
    if isinstance(x, dict):
        return {name: respelled(y, turn) for name, y in reversed(x.items())}
    if isinstance(x, list):
        return [respelled(y, turn) for y in x]
    return turn(x) if type(x) in (int, float) and math.isfinite(x) and x == int(x) else x


def places(hf, changed):
    """The config with a change in each of its objects in turn."""
    yield changed(hf)
    for name, x in hf.items():
        if isinstance(x, dict) and name != "vision_config":  # of a tower that is not read
            for inner in places(x, changed):
                yield hf | {name: inner}


@pytest.mark.parametrize("case", CASES)
def test_neutral_fields_change_nothing(case):
    hf = CASES[case]
    want = models.read_config(hf)
    for turn in (int, float):
        assert models.read_config(respelled(hf, turn)) == want
    for value in (None, False, 0, 0.0, "", [], {}):
        for same in places(hf, lambda x, value=value: x | {"field_of_tomorrow": value}):
            assert models.read_config(same) == want
    noise = {name: "anything" for name in HARMLESS if name not in hf}
    assert models.read_config(hf | noise) == want
    assert all(models.read_config(same) == want for same in places(hf, lambda x: x | {"finetuned": True}))
    for same in places(hf, lambda x: x | {"field_of_tomorrow": 1}):
        with pytest.raises(ValueError, match="field_of_tomorrow.*= 1.*delete it from config.json"):
            models.read_config(same)


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.peers
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("more", [{"finetuned": True}, {"original_max_position_embeddings": 64}, {"attn_factor": 1.0}])
def test_rope_fields_equal_transformers(kind, more):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = more | ROPES[kind] | {"rope_theta": 1e4}
    hf = models.TINY | dict(max_position_embeddings=256, head_dim=16)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**hf | {"rope_parameters": dict(given)}))
    ours = models.read_config(hf | {"rope_parameters": given}).ropes[0]
    np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq.numpy(), rtol=1e-6)
    assert ours.scale == pytest.approx(theirs.attention_scaling)


def test_old_and_new_rope_spelling_agree():
    old = models.read_config(CASES["llama-llama3"])
    new = {k: v for k, v in CASES["llama-llama3"].items() if k not in ("rope_theta", "rope_scaling")}
    assert models.read_config(new | {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}) == old
    old = models.read_config(GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    new = {k: v for k, v in GEMMA.items() if not k.startswith("rope")}
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert models.read_config(new | {"rope_parameters": both}) == old


def test_llama3_and_yarn_frequencies_match_formulas():
    # llama3, 32 old positions: channels turning more than 4 times in them stay, less than once are divided by 8
    base = rope({"rope_theta": 1e4}, "llama", 16, 128)
    got = rope(LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 32}, "llama", 16, 128)
    turns = [32 * x / (2 * math.pi) for x in base.inv_freq]
    assert turns[0] > 4 and 1 < turns[1] < 4 and turns[2] < 1
    assert got.inv_freq[0] == base.inv_freq[0]
    keep = (turns[1] - 1) / 3
    assert got.inv_freq[1] == pytest.approx(base.inv_freq[1] * (keep + (1 - keep) / 8), rel=1e-12)
    assert got.inv_freq[2:] == pytest.approx([x / 8 for x in base.inv_freq[2:]], rel=1e-12)
    # yarn stretches the context that its factor promises, and sharpens by 0.1 ln(factor) + 1
    far = rope(YARN | {"rope_theta": 1e4}, "qwen2", 16, 32)
    assert far.longest == 128 and far.scale == pytest.approx(0.1 * math.log(4) + 1)
    assert far.inv_freq[0] == base.inv_freq[0] and far.inv_freq[-1] == pytest.approx(base.inv_freq[-1] / 4)


def test_published_configs_are_read():
    smol = models.read_config(
        dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0)
        | dict(eos_token_id=0, hidden_act="silu", hidden_size=576, initializer_range=0.041666666666666664)
        | dict(intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, mlp_bias=False)
        | dict(model_type="llama", num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1)
        | dict(rms_norm_eps=1e-5, rope_interleaved=False, rope_scaling=None, rope_theta=100000, vocab_size=49152)
        | dict(tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True)
    )
    assert (smol.heads, smol.groups, smol.head_dim, smol.tied, smol.eos) == (3, 3, 64, True, (0,))
    gemma = models.read_config(
        dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], attention_bias=False, head_dim=256)
        | dict(attn_logit_softcapping=None, final_logit_softcapping=None, cache_implementation="hybrid")
        | dict(bos_token_id=2, eos_token_id=[1, 106], hidden_activation="gelu_pytorch_tanh", hidden_size=1152)
        | dict(intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=26)
        | dict(num_key_value_heads=1, query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_local_base_freq=10000)
        | dict(rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, vocab_size=262144)
    )
    assert gemma.windows.count(None) == 4 and gemma.windows[5] is None and gemma.windows[0] == 512
    assert gemma.tied and gemma.scale == 1 / 16 and gemma.embed_scale == math.sqrt(1152)
    assert gemma.ropes[0].inv_freq[1] == 1e4 ** (-2 / 256) and gemma.ropes[5].inv_freq[1] == 1e6 ** (-2 / 256)


def test_config_is_static_argument():
    traces = []

    @jax.jit
    def f(p):
        traces.append(p.config)
        return p.norm

    one, two = models.random(CASES["llama"]), models.random(CASES["llama"], seed=1)
    assert one.config == two.config and hash(one.config) == hash(two.config)
    f(one), f(two)
    assert len(traces) == 1
    f(dataclasses.replace(one, config=dataclasses.replace(one.config, eps=0.5)))
    assert len(traces) == 2


JUNK = [[], {}, "text", ["llama"], {"a": 1}, -1, 0, 1.5, math.nan, math.inf, True, 10**12, 10**18, 10**400, 1e300, [[]]]


@pytest.mark.parametrize("case", CASES)
def test_junk_fields_are_refused_or_stay_small(case):
    """Every field of every family in turn, those within ropes too; what is read stays small."""
    hf = CASES[case]
    places = [(name,) for name in hf] + [(name, k) for name, x in hf.items() if isinstance(x, dict) for k in x]
    for name, *inner in places:
        for junk in JUNK:
            value = {**hf[name], inner[0]: junk} if inner else junk
            try:
                c = models.read_config(hf | {name: value})
            except ValueError:
                continue
            assert (c.context <= 1 << 24 or not c.layers) and c.head_dim <= 1024 and len(repr(c)) < 100_000, (
                name,
                inner,
                junk,
            )


@pytest.mark.parametrize(("field", "most"), [("max_position_embeddings", 1 << 24), ("head_dim", 1024)])
def test_sizes_beyond_maximum_are_refused(field, most):
    assert models.read_config(CASES["llama"] | {field: most})
    with pytest.raises(ValueError, match=f"{field}.*{most:,} is the most"):
        models.read_config(CASES["llama"] | {field: 2 * most})
