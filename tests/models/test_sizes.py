"""Configs as hubs have them, and the numbers of weights that their makers say."""

from math import prod

import jax
import pytest

from jkv import models

SHARED = dict(attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, use_cache=True)
SHARED |= dict(tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.51.0")
ROUTER = dict(output_router_logits=False, router_aux_loss_coef=0.01)
YARN = dict(beta_fast=32, beta_slow=1, factor=40, original_max_position_embeddings=4096, type="yarn")
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_layer_freq=1)
LATENT |= dict(max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000, ep_size=1, seq_aux=True)
LATENT |= dict(aux_loss_alpha=0.001, pretraining_tp=1, bos_token_id=0, eos_token_id=1)
DELTA = dict(linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_value_head_dim=128)
DELTA |= dict(max_position_embeddings=262144, rms_norm_eps=1e-6)

WILD = {
    "Mixtral 8x7B": (
        SHARED
        | ROUTER
        | dict(model_type="mixtral", architectures=["MixtralForCausalLM"], bos_token_id=1, eos_token_id=2)
        | dict(hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32)
        | dict(num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8)
        | dict(rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, vocab_size=32000),
        46.7,
    ),
    "Qwen3 30B A3B": (
        SHARED
        | ROUTER
        | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], bos_token_id=151643, eos_token_id=151645)
        | dict(decoder_sparse_step=1, head_dim=128, hidden_size=2048, intermediate_size=6144, max_window_layers=48)
        | dict(max_position_embeddings=40960, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True)
        | dict(num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48)
        | dict(num_key_value_heads=4, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6, sliding_window=None)
        | dict(use_sliding_window=False, vocab_size=151936),
        30.5,
    ),
    "Qwen3-Next 80B A3B": (
        SHARED
        | ROUTER
        | DELTA
        | dict(
            model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], bos_token_id=151643, eos_token_id=151645
        )
        | dict(decoder_sparse_step=1, head_dim=256, hidden_size=2048, intermediate_size=5120, vocab_size=151936)
        | dict(mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_attention_heads=16)
        | dict(num_experts=512, num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2)
        | dict(partial_rotary_factor=0.25, rope_scaling=None, rope_theta=1e7, shared_expert_intermediate_size=512)
        | dict(linear_num_value_heads=32, use_sliding_window=False),
        80,
    ),
    "Qwen3.5 27B": (
        dict(
            model_type="qwen3_5",
            language_model_only=False,
            image_token_id=248056,
            video_token_id=248057,
            vision_start_token_id=248053,
        )
        | dict(vision_end_token_id=248054, tie_word_embeddings=False, transformers_version="4.57.0.dev0")
        | dict(architectures=["Qwen3_5ForConditionalGeneration"], vision_config=dict(depth=27, hidden_size=1152))
        | dict(
            text_config={name: x for name, x in SHARED.items() if name != "torch_dtype"}
            | DELTA
            | dict(
                attn_output_gate=True,
                mlp_only_layers=[],
                dtype="bfloat16",
                eos_token_id=248044,
                full_attention_interval=4,
            )
            | dict(head_dim=256, hidden_size=5120, intermediate_size=17408, mamba_ssm_dtype="float32")
            | dict(layer_types=[*["linear_attention"] * 3, "full_attention"] * 16, model_type="qwen3_5_text")
            | dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, num_attention_heads=24)
            | dict(num_hidden_layers=64, num_key_value_heads=4, vocab_size=248320, linear_num_value_heads=48)
            | dict(rope_parameters=dict(mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default"))
            | dict(partial_rotary_factor=0.25, rope_theta=1e7)
        ),
        27,
    ),
    "OLMoE 1B 7B": (
        SHARED
        | ROUTER
        | dict(model_type="olmoe", architectures=["OlmoeForCausalLM"], clip_qkv=None, eos_token_id=50279)
        | dict(hidden_size=2048, intermediate_size=1024, max_position_embeddings=4096, norm_topk_prob=False)
        | dict(num_attention_heads=16, num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, pad_token_id=1)
        | dict(num_key_value_heads=16, rope_scaling=None, rope_theta=10000.0, rms_norm_eps=1e-5, vocab_size=50304),
        6.9,
    ),
    "GPT-OSS 20B": (
        SHARED
        | ROUTER
        | dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], attention_bias=True, eos_token_id=200002)
        | dict(experts_per_token=4, head_dim=64, hidden_size=2880, initial_context_length=4096, intermediate_size=2880)
        | dict(layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072)
        | dict(num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8)
        | dict(num_local_experts=32, pad_token_id=199999, rms_norm_eps=1e-5, rope_theta=150000, sliding_window=128)
        | dict(rope_scaling={**YARN, "factor": 32.0, "truncate": False}, swiglu_limit=7.0, vocab_size=201088)
        | dict(quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])),
        20.9,
    ),
    "DeepSeek V2 Lite": (
        SHARED
        | LATENT
        | dict(model_type="deepseek_v2", first_k_dense_replace=1, hidden_size=2048, intermediate_size=10944)
        | dict(moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False)
        | dict(num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16)
        | dict(q_lora_rank=None, rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, topk_group=1)
        | dict(routed_scaling_factor=1.0, scoring_func="softmax", topk_method="greedy", vocab_size=102400),
        15.7,
    ),
    "DeepSeek V3": (
        SHARED
        | LATENT
        | dict(model_type="deepseek_v3", first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432)
        | dict(moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True)
        | dict(num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128)
        | dict(num_nextn_predict_layers=1, q_lora_rank=1536, routed_scaling_factor=2.5, scoring_func="sigmoid")
        | dict(rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, topk_group=4, topk_method="noaux_tc")
        | dict(vocab_size=129280),
        671.0,
    ),
}


@pytest.mark.parametrize("name", WILD)
def test_weight_count_matches_published_size(name):
    hf, billions = WILD[name]
    c = models.read_config(hf)
    shapes = models.params.names(c, models.family(c).TENSORS)
    assert round(sum(map(prod, shapes.values())) / 1e9, 1 if isinstance(billions, float) else None) == billions
    assert sum(x.size for x in jax.tree.leaves(models.abstract(c))) == sum(map(prod, shapes.values()))
    if c.latent:
        assert (c.heads, c.groups, c.cached) == (1, hf["num_attention_heads"], 576)
