"""The tiny models of the runtime's tests, and folders of what methods have learned of one: random, but telling."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import jkv.models as models
from jkv.io import trained_weights as io
from jkv.nn.gates import AttentionGate, Estimate, RetentionGate

PARAMS = models.random(dict(models.TINY, hidden_size=64), 0, jnp.float32)
MODEL = PARAMS.config
H, G, D, L = MODEL.heads, MODEL.groups, MODEL.head_dim, MODEL.layers
# the same, with a block that recurs between the two that attend
HYBRID = models.random(
    dict(models.TINY, model_type="bamba", hidden_size=64, num_hidden_layers=3, attn_layer_indices=[0, 2])
    | dict(mamba_n_heads=8, mamba_d_state=8, mamba_n_groups=2, tie_word_embeddings=False),
    0,
    jnp.float32,
)
# a block that follows the delta rule between the two that attend, heads with gates, experts beside a shared one
GATED = models.random(
    dict(models.TINY, model_type="qwen3_next", hidden_size=64, head_dim=16, num_hidden_layers=3)
    | dict(layer_types=["full_attention", "linear_attention", "full_attention"])
    | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
    | dict(partial_rotary_factor=0.5, rms_norm_eps=1e-3, vocab_size=160),
    0,
    jnp.float32,
)
# logits of attention and of tokens that saturate, norms around both halves of a layer
CAPPED = models.random(
    dict(models.TINY, model_type="gemma2", hidden_size=64, head_dim=16, query_pre_attn_scalar=16)
    | dict(layer_types=["full_attention"] * 2, attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    0,
    jnp.float32,
)
# a layer that turns nothing behind one that does
UNTURNED = models.random(
    dict(models.TINY, model_type="smollm3", hidden_size=64, no_rope_layers=[1, 0], tie_word_embeddings=False),
    0,
    jnp.float32,
)
# the same with sinks in its softmax, and with experts
SUNK = models.random(
    dict(models.TINY, model_type="gpt_oss", hidden_size=64, head_dim=16, layer_types=["full_attention"] * 2)
    | dict(num_local_experts=4, num_experts_per_tok=2, rope_theta=1e4),
    0,
    jnp.float32,
)
# one whose tokens are latents, behind a block without experts
LATENT = models.random(
    dict(models.TINY, model_type="deepseek_v3", hidden_size=64, num_key_value_heads=4, first_k_dense_replace=1)
    | dict(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=12)
    | dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1)
    | dict(n_group=2, topk_group=1)
)


def gate(folder: str) -> str:
    """A folder with a retention gate for the tiny model, of weights that tell tokens, layers and heads apart."""
    made = RetentionGate.start(MODEL, 8, jax.random.key(7), offset=3.0)
    made = jax.tree.map(lambda x: 20 * x if x.ndim == 3 else x, made)
    io.write(folder, made.arrays, {"method": "trimkv", "model": io.identities(PARAMS)})
    return folder


def deep(folder: str) -> str:
    """A folder with a deep retention gate for the tiny model, of weights that tell tokens, layers and heads apart."""
    made = RetentionGate.start(MODEL, 8, jax.random.key(13), depth=2, offset=3.0)
    made = jax.tree.map(lambda x: 30 * x if x.ndim == 3 else x, made)
    io.write(folder, made.arrays, {"method": "makeeach", "model": io.identities(PARAMS)})
    return folder


def estimates(folder: str) -> str:
    """A folder with the heads of Locret for the tiny model, of random weights."""
    made = Estimate.start(MODEL, 8, jax.random.key(11))
    io.write(folder, made.arrays, {"method": "locret", "model": io.identities(PARAMS)})
    return folder


def mixtures(folder: str) -> str:
    """A folder with twelve mixtures for the tiny model, of random weights that tell entries apart."""
    rng = np.random.default_rng(12)
    made = {"conv.kernel": rng.normal(0, 0.5, (L, 5, 2 * D, 12)), "conv.bias": rng.normal(0, 1, (L, 12))}
    made["share"] = np.array([0.5, 0.8])
    io.write(folder, made, {"method": "lococo", "model": io.identities(PARAMS)})
    return folder


def switch(folder: str) -> str:
    """A folder with switches of DMS for the tiny model, random weights that mark about half of all tokens."""
    rng = np.random.default_rng(6)
    out, gain = rng.normal(0, 0.4, (L, H, MODEL.width)), rng.uniform(0.5, 1.5, (L, MODEL.width))
    made = {"out.kernel": out.swapaxes(1, 2), "gain": gain, "layers": np.full(L, 0.5)}
    io.write(folder, made, {"method": "dms", "model": io.identities(PARAMS)})
    return folder


def look(folder: str) -> str:
    """A folder with an Attention-Gate for the tiny model, of random weights that keep about half of all tokens."""
    made = AttentionGate.start(MODEL, 2, 4, 0.0, jax.random.key(17))
    made = made.update(lambda x: np.random.default_rng(18).normal(0, 3, x.shape), "out.kernel")
    io.write(folder, made.arrays, {"method": "attentiongate", "model": io.identities(PARAMS)})
    return folder


def predictor(folder: str) -> str:
    """A folder with a predictor of attention for the tiny model, of random weights."""
    rng = np.random.default_rng(5)
    shapes = dict(first=(16, 1, 3, 3), first_bias=(16,), second=(32, 16, 3, 3), second_bias=(32,), last=(32,), rest=())
    made = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()} | {"linear": np.array([0.5, 0.2, 0.3])}
    io.write(folder, made, {"method": "attentionpredictor", "model": io.identities(PARAMS)})
    return folder


def finders(folder: str) -> str:
    """A folder that says which query heads of the tiny model find things, two in each kv head; its layers are equal."""
    heads = np.random.default_rng(8).uniform(0.1, 1, (L, H, G))
    made = {"heads": heads, "layers": np.full(L, 1 / L)}
    io.write(folder, made, {"method": "compresskv", "model": io.identities(PARAMS)})
    return folder


def keepers(folder: str) -> str:
    """A folder by which one kv head of each layer of the tiny model keeps everything: the second, then the first."""
    made = {"induction": np.array([[0.1, 0.9], [0.3, 0.2]]), "echo": np.array([[0.1, 0.2], [0.8, 0.4]])}
    io.write(folder, made, {"method": "razorattention", "model": io.identities(PARAMS)})
    return folder


def moments(folder: str) -> str:
    """A folder with moments of the tiny model, as if they were of some texts: random, of covariances that could be."""
    rng, made = np.random.default_rng(19), {"queries_most": np.random.default_rng(20).uniform(1, 3, (L, H, D))}
    for side in ("keys", "plain", "values"):
        x = rng.normal(0, 1, (L, H, 40, D)) @ rng.normal(0, 0.3, (L, H, D, D))
        flat = np.swapaxes(x, 1, 2).reshape(L, 40, H * D)
        alike = np.stack([np.corrcoef(layer.T) for layer in flat])[..., *np.triu_indices(H * D)]
        made |= {f"{side}_mean": x.mean(2) + rng.normal(0, 0.3, (L, H, D)), f"{side}_deviation": x.std(2)}
        low, high = np.percentile(x, (0.5, 99.5), axis=2)
        made |= {f"{side}_low": low, f"{side}_high": high, f"{side}_least": x.min(2), f"{side}_most": x.max(2)}
        made[f"{side}_alike"] = alike
    io.write(folder, made, {"method": "moments", "model": io.identities(PARAMS)}, lambda name: "alike" not in name)
    return folder


def queries(folder: str) -> str:
    """A folder with what queries of the tiny model are like, as if they were of some texts: random."""
    rng = np.random.default_rng(21)
    made = dict(mean=rng.normal(0, 1, (L, H, G, D)), length=rng.uniform(1, 3, (L, H, G, D // 2)))
    made |= {name: rng.uniform(0.1, 2, (L, H, D)) for name in ("square", "keys")}
    made["filter"] = rng.normal(0, 1, (L, H, D))
    io.write(folder, made, {"method": "queries", "model": io.identities(PARAMS)}, lambda _: True)
    return folder


def channels(folder: str) -> str:
    """A folder of channels for the tiny model: random."""
    rng = np.random.default_rng(25)
    arrays = {"agreement": rng.random((L, H, D // 2)), "skew": rng.normal(0, 1, (L, H, D, D // 4))}
    io.write(folder, arrays, {"method": "channels", "model": []})
    return folder


def zap(folder: str) -> str:
    """A folder of KVzap for the tiny model as its authors lay it out, of two layers: random."""
    return published_zap(folder, 8, MODEL.width, H, L)


def features(folder: str) -> str:
    """A folder with dictionaries of both layers of the tiny model, of random directions that tell tokens apart."""
    rng = np.random.default_rng(26)
    made = {name: rng.normal(0, 0.3, (L, H, 24, D)) for name in ("encode", "decode")}
    made |= {"centre": rng.normal(0, 0.2, (L, H, 2, D)), "bias": rng.normal(0, 0.2, (L, H, 2, 24))}
    io.write(
        folder, made | {"layers": np.arange(L), "active": 6}, {"method": "s3attention", "model": io.identities(PARAMS)}
    )
    return folder


def published_zap(folder: str, hidden: int | None, width: int, heads: int, count: int) -> str:
    """A folder of KVzap models of these sizes, named as torch.nn names their parts; hidden None: of one layer."""
    rng, path = np.random.default_rng(22), Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    shapes = {"weight": (heads, width), "bias": (heads,)}
    if hidden is not None:
        shapes = {"0.weight": (hidden, width), "0.bias": (hidden,), "2.weight": (heads, hidden), "2.bias": (heads,)}
    made = {f"layers.{i}.{name}": rng.normal(0, 0.5, x) for i in range(count) for name, x in shapes.items()}
    save_file({name: x.astype(np.float32) for name, x in made.items()}, path / "model.safetensors")
    config = {"input_dim": width, "output_dim": heads, "n_modules": count, "hidden_dim": hidden, "model_type": "kvzap"}
    (path / "config.json").write_text(json.dumps(config))
    return folder


def worth(folder: str) -> str:
    """A folder with the gates of `gate`, others that foresee, and levels for the tiny model: random."""
    rng, fading = np.random.default_rng(25), RetentionGate.start(MODEL, 8, jax.random.key(7), offset=3.0)
    shapes = {
        "hidden.0.kernel": (L, MODEL.width, 6),
        "hidden.0.bias": (L, 6),
        "out.kernel": (L, 6, H),
        "out.bias": (L, H),
    }
    made = {f"foreseen.{name}": rng.normal(-0.5, 0.5, x) for name, x in shapes.items()}
    made |= {f"fading.{name}": 20 * x if x.ndim == 3 else x for name, x in fading.arrays.items()}
    io.write(folder, made | {"level": rng.normal(0, 1, (L, H))}, {"method": "utility", "model": io.identities(PARAMS)})
    return folder


def sunk(folder: str) -> str:
    """A file of Fast KVzip for the tiny model as its authors lay it out: random."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return published_gate(path / "q2_dim16_sink16.safetensors", MODEL.width, H, G, L)


def published_gate(path: Path, width: int, heads: int, groups: int, count: int, d: int = 16, sinks: int = 16) -> str:
    """A file of gates of these sizes, in bfloat16 where the authors' are."""
    rng = np.random.default_rng(24)
    narrow = {
        "q_proj.weight": (heads * groups * d, width),
        "q_proj.bias": (heads * groups * d,),
        "k_proj.weight": (heads * d, width),
        "b": (heads, 1, groups),
    }
    wide = {"q_norm.weight": (d,), "k_norm.weight": (d,), "k_base": (heads, 1, sinks, d)}

    def layer() -> dict[str, np.ndarray]:
        made: dict[str, np.ndarray] = {
            name: rng.normal(0, 1, x).astype(ml_dtypes.bfloat16) for name, x in narrow.items()
        }
        return made | {name: rng.normal(0, 1, x).astype(np.float32) for name, x in wide.items()}

    save_gate([layer() for _ in range(count)], path)
    return str(path)


def save_gate(layers: Sequence[dict[str, np.ndarray]], path: Path) -> None:
    """State dicts of layers as the file that is made of the authors'."""
    save_file({f"module.{i}.{name}": x for i, one in enumerate(layers) for name, x in one.items()}, path)


def duo(folder: str) -> str:
    """A folder of DuoAttention for the tiny model: the second kv head of the first layer needs all, then the first."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "full_attention_heads.tsv").write_text("0.1\t0.9\n1.2\t0.3\n")
    (path / "config.json").write_text(json.dumps({"sink_size": 4, "recent_size": 48}))
    return folder


def sensitivity(folder: str) -> str:
    """A folder with what the tiny model depends on, as if it were of some texts: random, as it could be."""
    rng, made = np.random.default_rng(23), {}
    for side in ("plain", "values"):
        x = rng.normal(0, 1, (L, H, 40, D)) @ rng.normal(0, 0.3, (L, H, D, D))
        alike = np.stack([[np.corrcoef(head.T) for head in layer] for layer in x])[..., *np.triu_indices(D)]
        made |= {f"{side}_mean": x.mean(2), f"{side}_deviation": x.std(2), f"{side}_alike": alike}
        made |= {f"{side}_table{bits}": np.sort(rng.uniform(-1, 1, (L, 2**bits))) for bits in (2, 3, 4)}
        if side == "plain":
            made |= dict(zip(("plain_low", "plain_high"), np.percentile(x, (0.5, 99.5), axis=2), strict=True))
    wide = lambda name: "alike" not in name  # noqa: E731
    io.write(folder, made, {"method": "sensitivity", "model": io.identities(PARAMS)}, wide)
    return folder


def plan(folder: str) -> str:
    """A folder of `jkv calibrate layers` for the tiny model: eight bits and four in turns."""
    card = {"method": "layers", "model": io.identities(PARAMS), "candidates": ["int8", "int4"]}
    turns = np.arange(L) % 2
    io.write(folder, {"budgets": 0 * turns, "keys": turns, "values": 1 - turns}, card)
    return folder


FOLDER = tempfile.TemporaryDirectory()  # gone with the process
CHANNELS, GATE, DEEP, ESTIMATES, MIXTURES, SWITCH, LOOK, PREDICTOR, FINDERS, KEEPERS, MOMENTS, QUERIES, ZAP, DUO = (
    make(f"{FOLDER.name}/{make.__name__}")
    for make in (
        channels,
        gate,
        deep,
        estimates,
        mixtures,
        switch,
        look,
        predictor,
        finders,
        keepers,
        moments,
        queries,
        zap,
        duo,
    )
)
SENSITIVITY = sensitivity(f"{FOLDER.name}/sensitivity")
FEATURES = features(f"{FOLDER.name}/features")
PLAN = plan(f"{FOLDER.name}/plan")
WORTH = worth(f"{FOLDER.name}/worth")
SINKS = sunk(f"{FOLDER.name}/sunk")
