"""Records what transformers computes for tiny models of every family: run it with torch and transformers installed.

    python tests/golden/make.py [CASE ...]

One `<case>.npz` a case lands beside this file: the config, a ragged left-padded batch, its logits, 64 greedy tokens a
row and the versions that made them. Weights are not stored: both sides draw them from the same numpy generator.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jkv import models

HERE = Path(__file__).parent
TOWERS = ("model.vision_tower.", "model.multi_modal_projector.", "model.visual.")
LENGTHS, NEW = (24, 13, 5), 64  # prompt tokens of each row, then greedy tokens

BASE: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
)
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
GEMMA: dict[str, Any] = BASE | dict(
    model_type="gemma3_text",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=8,
    query_pre_attn_scalar=20,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
)
GEMMA2: dict[str, Any] = BASE | dict(
    model_type="gemma2",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=8,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=1.5,  # as small as it takes to bend the logits of so small a model
    final_logit_softcapping=2.0,
    rope_theta=1e4,
)
LONGROPE = dict(
    type="longrope",
    short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
)
PHI3: dict[str, Any] = BASE | dict(model_type="phi3", hidden_size=64, pad_token_id=0, rope_theta=1e4)
TOWER = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    image_size=8,
    patch_size=4,
    model_type="siglip_vision_model",
)
DEEPSEEK: dict[str, Any] = {name: x for name, x in BASE.items() if name != "head_dim"} | dict(
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_shared_experts=1,
    first_k_dense_replace=1,
)

ROUTED = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
)
QWEN3_5: dict[str, Any] = BASE | dict(
    num_hidden_layers=4,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=20,
    rms_norm_eps=1e-3,  # heads so small say next to nothing here and there, and their norm enlarges the rounding of it
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
)
PLACES = QWEN3_5["rope_parameters"] | dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
FEW: dict[str, Any] = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=20
)
MULTIPLIED = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out", "lm_head", "embedding")
FALCON: dict[str, Any] = BASE | dict(
    model_type="falcon_h1",
    num_hidden_layers=2,
    mamba_n_heads=6,
    mamba_d_ssm=72,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_chunk_size=16,
    mamba_norm_before_gate=False,
    rope_theta=1e4,
    pad_token_id=0,
)

CASES: dict[str, dict[str, Any]] = {
    "llama": BASE | dict(model_type="llama", rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "llama-tied": BASE | dict(model_type="llama", tie_word_embeddings=True, rope_theta=1e5, num_key_value_heads=4),
    "llama-llama3": BASE | dict(model_type="llama", rope_theta=1e4, rope_scaling=LLAMA3),
    "llama-linear": BASE | dict(model_type="llama", rope_theta=1e4, rope_scaling=dict(type="linear", factor=4.0)),
    "mistral": BASE | dict(model_type="mistral", sliding_window=8, rope_theta=1e4),
    "qwen2": BASE | dict(model_type="qwen2", tie_word_embeddings=True, rope_theta=1e4, rope_scaling=YARN),
    "qwen2-window": BASE
    | dict(model_type="qwen2", rope_theta=1e4, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": BASE
    | dict(
        model_type="qwen3",
        rope_parameters=YARN
        | dict(rope_type="yarn", rope_theta=1e4, attention_factor=1.3, beta_fast=2.0, beta_slow=0.1, truncate=False),
    ),
    "gemma3": GEMMA | dict(sliding_window_pattern=2, rope_scaling=dict(rope_type="linear", factor=8.0)),
    "gemma3-types": GEMMA
    | dict(layer_types=["full_attention", "sliding_attention", "sliding_attention"], tie_word_embeddings=False),
    "gemma3-images": dict(
        model_type="gemma3",
        text_config={k: v for k, v in GEMMA.items() if k not in ("rope_theta", "rope_local_base_freq")}
        | dict(rope_scaling=dict(rope_type="linear", factor=8.0)),
        vision_config=TOWER,
        mm_tokens_per_image=4,
        boi_token_index=5,
        eoi_token_index=6,
        image_token_index=7,
        eos_token_id=None,
    ),
    "gemma2": GEMMA2,
    "gemma2-plain": GEMMA2 | dict(attn_logit_softcapping=None, final_logit_softcapping=None, head_dim=8),
    "phi3": PHI3 | dict(num_key_value_heads=4, sliding_window=8),
    "phi3-short": PHI3
    | dict(original_max_position_embeddings=128, partial_rotary_factor=0.75, rope_scaling=LONGROPE | dict(factor=4.0)),
    "phi3-long": PHI3 | dict(original_max_position_embeddings=16, partial_rotary_factor=0.75, rope_scaling=LONGROPE),
    "smollm3": BASE | dict(model_type="smollm3", no_rope_layer_interval=2, pad_token_id=0, rope_theta=1e4),
    "smollm3-window": BASE
    | dict(model_type="smollm3", no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=8)
    | dict(tie_word_embeddings=False, pad_token_id=0),
    "olmo2": BASE | dict(model_type="olmo2", rope_theta=1e4),
    "olmo3": BASE
    | dict(
        model_type="olmo3",
        num_hidden_layers=4,
        sliding_window=8,
        rope_theta=5e5,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.2)
        | dict(beta_fast=32.0, beta_slow=1.0),
    ),
    "granite": BASE
    | dict(
        model_type="granite",
        embedding_multiplier=6.0,
        attention_multiplier=0.3,
        residual_multiplier=0.25,
        logits_scaling=0.5,
        rope_theta=1e4,
        tie_word_embeddings=True,
    ),
    "mamba2": dict(
        model_type="mamba2",
        vocab_size=160,
        hidden_size=48,
        num_hidden_layers=3,
        num_heads=6,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=16,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "bamba": BASE
    | dict(
        model_type="bamba",
        num_hidden_layers=4,
        attn_layer_indices=[1, 2],
        mamba_n_heads=6,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=16,
        rope_theta=1e4,
        rms_norm_eps=1e-3,  # as above: at 1e-5 a CPU's own order of sums alone is 1e-4 of the logits
    ),
    "falcon_h1": FALCON
    | dict(
        mlp_multipliers=[0.9, 0.5],
        ssm_multipliers=[0.7, 0.8, 1.2, 1.3, 0.6],
        **{f"{name}_multiplier": x for name, x in zip(MULTIPLIED, (0.9, 1.1, 0.8, 1.2, 0.7, 0.5, 3.0), strict=True)},
    ),
    "falcon_h1-norm": FALCON | dict(mamba_d_ssm=None, mamba_rms_norm=True, tie_word_embeddings=True),
    "mixtral": BASE
    | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, rope_theta=1e4, sliding_window=8),
    "qwen3_moe": BASE
    | dict(
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        rope_theta=1e4,
    ),
    "qwen3_next": QWEN3_5
    | FEW
    | dict(
        model_type="qwen3_next",
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        mlp_only_layers=[1, 2],
        norm_topk_prob=False,
    ),
    "qwen3_5_text": QWEN3_5 | dict(model_type="qwen3_5_text", tie_word_embeddings=True),
    "qwen3_5": dict(
        model_type="qwen3_5",
        text_config=QWEN3_5 | dict(model_type="qwen3_5_text", rope_parameters=PLACES),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=1, out_hidden_size=48),
        image_token_id=7,
        eos_token_id=None,
    ),
    "qwen3_5_moe_text": {name: x for name, x in (QWEN3_5 | FEW).items() if name != "intermediate_size"}
    | dict(model_type="qwen3_5_moe_text", full_attention_interval=2),
    "olmoe": {name: x for name, x in BASE.items() if name != "head_dim"}
    | dict(model_type="olmoe", num_experts=8, num_experts_per_tok=3, rope_theta=1e4),
    "gpt_oss": BASE
    | dict(
        model_type="gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_theta=1.5e5,
        rope_scaling=YARN | dict(rope_type="yarn", truncate=False),
    ),
    "deepseek_v2": DEEPSEEK | dict(model_type="deepseek_v2", q_lora_rank=None, n_shared_experts=2, rope_theta=1e4),
    "deepseek_v2-groups": DEEPSEEK
    | dict(
        model_type="deepseek_v2",
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
        rope_theta=1e4,
        rope_scaling=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek_v3": DEEPSEEK
    | dict(
        model_type="deepseek_v3",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_theta=1e4,
        rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=0.8),
    ),
    "mla": {name: x for name, x in DEEPSEEK.items() if name not in ROUTED}
    | dict(model_type="mla", rope_interleave=False, rope_theta=1e4),
}


def weights(hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The case's weights by name, as a checkpoint would hold them."""
    c = models.read_config(hf)
    made = {n: draw() for n, draw in models.params.seeded(c, models.FAMILIES[c.family].TENSORS, seed).items()}
    return PACKED.get(c.family, lambda c, tensors: tensors)(c, made)


def packed(c: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With one tensor of all experts [N, in, out], of which gate and up take turns in the rows of one."""
    out = {n: x for n, x in tensors.items() if ".mlp.experts." not in n}
    for i in range(c.layers):

        def stacked(kind: str, at: str = f"model.layers.{i}.mlp.experts") -> np.ndarray:
            return np.stack([tensors[f"{at}.{e}.{kind}"] for e in range(c.experts.count)])

        at = f"model.layers.{i}.mlp.experts"
        for end, name in (("weight", ""), ("bias", "_bias")):
            both = np.stack([stacked(f"gate_proj.{end}"), stacked(f"up_proj.{end}")], 2)
            both = both.reshape(both.shape[0], -1, *both.shape[3:])
            down = stacked(f"down_proj.{end}")
            turn = (lambda x: x.swapaxes(1, 2)) if end == "weight" else (lambda x: x)
            out |= {f"{at}.gate_up_proj{name}": turn(both), f"{at}.down_proj{name}": turn(down)}
    return out


def headed(c: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With what makes keys and what makes values of a latent in one tensor, head by head."""
    out = dict(tensors)
    for at in [n.removesuffix("key.weight") for n in tensors if n.endswith("kv_b_proj.key.weight")]:
        both = np.concatenate([out.pop(f"{at}{end}.weight") for end in ("key", "value")], 1)
        out[at + "weight"] = both.reshape(-1, both.shape[2])
    return out


def by_key_heads(c: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With what makes a mixer's queries, keys, values and gates in one tensor, key head by key head, and its rates."""
    out, m = dict(tensors), c.mixers
    for at in (f"model.layers.{i}.linear_attn.in_proj_" for i in m.at):
        qkv, z, b, a = (out.pop(f"{at}{end}.weight") for end in ("qkv", "z", "b", "a"))
        q, k, v = np.split(qkv, [m.groups * m.state, 2 * m.groups * m.state])
        for end, parts in (("qkvz", (q, k, v, z)), ("ba", (b, a))):
            both = np.concatenate([x.reshape(m.groups, -1, c.width) for x in parts], 1)
            out[f"{at}{end}.weight"] = both.reshape(-1, c.width)
    return out


OURS = ("mla",)  # families that transformers does not have
PACKED = {"qwen3_next": by_key_heads, "gpt_oss": packed, "deepseek_v2": headed, "deepseek_v3": headed, "mla": headed}


def batch(hf: dict[str, Any], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and positions i32[B, T] of rows that end together: pads come first, at position -1."""
    wide = max(LENGTHS)
    vocab = models.read_config(hf).vocab
    low = 1 + max((x for name, x in hf.items() if name.endswith("_token_index")), default=0)  # no image's token
    ids = np.random.default_rng([seed, 1]).integers(low, vocab, (len(LENGTHS), wide), np.int32)
    pos = np.stack([np.arange(wide, dtype=np.int32) - (wide - n) for n in LENGTHS])
    return np.where(pos < 0, 0, ids).astype(np.int32), np.maximum(pos, -1).astype(np.int32)


def reference(hf: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str = "float32") -> Any:
    """The model in transformers, of a family that it has, or of OURS."""
    return (without_norms if hf["model_type"] in OURS else torch_model)(hf, tensors, dtype)


def without_norms(hf: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str) -> Any:
    """transformers' DeepSeek V3 without experts, whose norms of latents do nothing."""
    from torch.nn import Identity

    dense = {name: DEEPSEEK[name] for name in ROUTED} | dict(first_k_dense_replace=hf["num_hidden_layers"])
    sizes = {"q_a_layernorm": hf["q_lora_rank"], "kv_a_layernorm": hf["kv_lora_rank"]}
    blocks = [f"model.layers.{i}.self_attn" for i in range(hf["num_hidden_layers"])]
    ones = {f"{at}.{norm}.weight": np.ones(n, np.float32) for at in blocks for norm, n in sizes.items()}
    model = torch_model(hf | dense | dict(model_type="deepseek_v3"), tensors | ones, dtype)
    for at in blocks:
        for norm in sizes:
            setattr(model.get_submodule(at), norm, Identity())
    return model


def torch_model(hf: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str = "float32") -> Any:
    """The same model in transformers, read from a folder as a hub has it; raises if a name or a shape differs."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    # a tied head is the embedding in any case
    tied = not any(name.endswith("lm_head.weight") for name in tensors)
    config = AutoConfig.for_model(**json.loads(json.dumps({"tie_word_embeddings": tied} | hf)))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, Path(folder) / "model.safetensors")
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=getattr(torch, dtype), output_loading_info=True
        )
    found["missing_keys"] = [name for name in found["missing_keys"] if not name.startswith(TOWERS)]
    assert not any(found.values()), found
    return model.eval()


def torch_logits(model: Any, ids: np.ndarray, pos: np.ndarray) -> np.ndarray:
    """Logits f32[B, T, V], 0 at pads."""
    import torch

    mask, at = torch.from_numpy(pos >= 0).long(), torch.from_numpy(np.maximum(pos, 0)).long()
    with torch.no_grad():
        out = model(torch.from_numpy(ids).long(), attention_mask=mask, position_ids=at, use_cache=False)
    return np.where(pos[..., None] >= 0, out.logits.float().numpy(), 0).astype(np.float32)


def extend(ids: np.ndarray, pos: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batch with one more token a row."""
    return np.concatenate([ids, token[:, None]], 1), np.concatenate([pos, pos[:, -1:] + 1], 1)


def record(name: str, seed: int = 0) -> dict[str, Any]:
    """What transformers says of a case: prompt logits, greedy tokens i32[B, NEW], logits of the last position."""
    import torch
    import transformers

    hf = CASES[name]
    model = reference(hf, weights(hf, seed))
    ids, pos = batch(hf, seed)
    first = logits = torch_logits(model, ids, pos)
    for _ in range(NEW):  # no cache: every step is the whole function of all tokens
        ids, pos = extend(ids, pos, logits[:, -1].argmax(-1).astype(np.int32))
        logits = torch_logits(model, ids, pos)
    return dict(
        config=json.dumps(hf),
        seed=seed,
        versions=json.dumps({m.__name__: str(m.__version__) for m in (np, torch, transformers)}),
        ids=ids,
        pos=pos,
        prompt=first,
        last=logits[:, -1],
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        np.savez_compressed(HERE / f"{case}.npz", **record(case))
        print(case, (HERE / f"{case}.npz").stat().st_size, "bytes")
