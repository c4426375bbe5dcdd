"""jkv in 300 lines: a Llama that decodes through a compressed KV cache.

    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir smollm2
    python examples/jkv_in_300_lines.py smollm2 "$(cat ARCHITECTURE.md)" --budget 256 --int4

A layer's cache is a recent window of exact tokens and a tier of coded older ones. A decode step only appends to the
window. Every `block` steps one flush ranks the tokens, evicts those of lowest rank and encodes the newcomers. Attention
over the window and over the tier are two Partials of one softmax, so merging them is exact. A prefill is the same flush
with the prompt as the window.

Tokens and bytes are those of `jkv.generate(params, cache, prompt)` for the caches "full", "int4", "snapkv(budget=256)"
and "snapkv(budget=256) | int4"; the package also rounds lengths up, so that programs are reused. It adds batches, more
methods on the same axes (scores, codecs, budgets, merges, selectors), kernels that read codes, meshes and serving.

Shapes: L layers, H kv heads, G query heads per kv head, D channels, T new tokens, S keys, W entries of a window,
C slots of the tier, N queries that are kept for the next flush, E width of the model, V words. One row, no batch.
"""

import argparse
import json
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.flax import load_file
from tokenizers import Tokenizer

# ---- Types: tuples of arrays are pytrees, so a cache passes through jit and scan, and no function can change it
Cache = namedtuple("Cache", "layers seen fill")  # Layers, arrays [L,...]; i32[] tokens so far, window entries in use
Layer = namedtuple("Layer", "window tier queries")
Window = namedtuple("Window", "k v pos")  # exact tokens: rotated keys, values [H,W,D]; i32[W], -1 empty
Tier = namedtuple("Tier", "k v pos")  # coded tokens: codes [H,C,...]; i32[H,C], -1 empty, or [1,C] for all heads
Queries = namedtuple("Queries", "q pos lse")  # the newest, rotated [H,G,N,D]; i32[N]; log-sum-exp of logits [H,G,N]
Partial = namedtuple("Partial", "acc m l")  # sum of exp(logit - m) v [H,G,T,D], largest logit m, sum of exp(logit - m)
Model = namedtuple("Model", "layers heads groups dim eps theta")  # sizes and constants
Params = dict[str, Any]
wide = partial(jax.lax.convert_element_type, new_dtype=jnp.float32)


class Config(NamedTuple):  # of a cache; static under jit, as is Model
    longest: int  # tokens of the text, prompt and answer, at most
    budget: int | None = None  # tokens that each head keeps; None: all
    int4: bool = False  # codes of the tier: 4 bits a number, or the floats themselves
    sinks: int = 0  # first tokens that stay exact: 1 beside lossy codes, since most queries attend to the first token
    recent: int = 16  # newest tokens that stay exact
    block: int = 16  # decode steps between two flushes
    queries: int = 0  # N, newest queries that rank the tokens (SnapKV)
    pool: int = 5  # neighbours over which a rank is averaged

    @property
    def exact(self) -> int:  # entries that a flush leaves in the window; `block` more make a full window
        return self.sinks + self.recent


def empty(model: Model, config: Config) -> Cache:
    h, g, d, n, w = model.heads, model.groups, model.dim, config.queries, config.exact + config.block
    c = min(config.budget or config.longest, config.longest) - config.exact
    if c < 1:
        raise ValueError(f"budget={config.budget}: sinks and recent window take {config.exact} tokens; give it more")
    none, code = partial(jnp.full, fill_value=-1, dtype=jnp.int32), encode(jnp.zeros((h, c, d)), config)
    layer = Layer(
        window=Window(k=jnp.zeros((h, w, d)), v=jnp.zeros((h, w, d)), pos=none(w)),
        tier=Tier(k=code, v=code, pos=none((h if config.budget else 1, c))),
        queries=Queries(q=jnp.zeros((h, g, n, d)), pos=none(n), lse=jnp.zeros((h, g, n))),
    )
    return Cache(jax.tree.map(lambda x: jnp.stack([x] * model.layers), layer), jnp.int32(0), jnp.int32(config.exact))


# ---- Attention: Partials of one softmax
def dots(q: Array, k: Array) -> Array:  # q [H,G,T,D], k [H,S,D] -> logits [H,G,T,S]
    return jnp.einsum("hgtd,hsd->hgts", q, k) * q.shape[-1] ** -0.5


def visible(q_pos: Array, pos: Array) -> Array:
    """Which keys at pos i32[H,S] queries at i32[T] see, bool[H,1,T,S]. Slots have no order: positions decide."""
    return ((pos >= 0)[:, None] & (pos[:, None] <= q_pos[None, :, None]))[:, None]


def attend(q: Array, k: Array, v: Array, see: Array) -> Partial:
    logits = jnp.where(see, dots(q, k), -jnp.inf)
    m = logits.max(-1)
    p = jnp.exp(logits - jnp.where(m == -jnp.inf, 0, m)[..., None])
    return Partial(acc=jnp.einsum("hgts,hsd->hgtd", p, v), m=m, l=p.sum(-1))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over two disjoint sets of keys, of which one may be empty. Exact: only the largest logit changes."""
    m = jnp.maximum(a.m, b.m)
    x, y = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Partial(acc=a.acc * x[..., None] + b.acc * y[..., None], m=m, l=a.l * x + b.l * y)


# ---- Codec: x ~ step * code + low, 4 bits a code, step and low per token and group of channels
def encode(x: Array, config: Config) -> tuple[Array, ...]:
    """Encode x [H,S,D]: packed codes u8[H,S,D/2], and step and low bf16[H,S,groups]; or x itself."""
    if not config.int4:
        return (x,)
    size = max(n for n in range(1, 33) if x.shape[2] % n == 0)  # channels of a group
    y = x.reshape(*x.shape[:2], -1, size)
    low = round_down(y.min(-1))  # low down and step up, so that the codes reach all numbers
    step = -round_down((wide(low) - y.max(-1)) / 15)
    code = (y - wide(low)[..., None]) / jnp.where(step > 0, wide(step), 1)[..., None]
    a, b = jnp.split(jnp.clip(jnp.round(code), 0, 15).astype(jnp.uint8).reshape(x.shape), 2, axis=-1)
    return a | (b << 4), step, low


def decode(code: tuple[Array, ...], config: Config) -> Array:
    """Decode to f32[H,S,D]. The package never makes this copy: it decodes tile by tile, or kernels read the codes."""
    if not config.int4:
        return code[0]
    packed, step, low = code
    x = wide(jnp.concatenate([packed & 15, packed >> 4], -1))
    return (x.reshape(*step.shape, -1) * wide(step)[..., None] + wide(low)[..., None]).reshape(x.shape)


def round_down(x: Array) -> Array:
    y = x.astype(jnp.bfloat16)
    return jnp.where(wide(y) > x, jnp.nextafter(y, jnp.bfloat16(-jnp.inf)), y)


# ---- Flush: rank, evict, encode
def flush(layer: Layer, window: Window, config: Config) -> Layer:
    """Move a window's tokens into the tier, except the sinks and the newest `recent`. Shapes are static."""
    tier, w, c = layer.tier, len(window.pos), layer.tier.pos.shape[1]
    new = slice(config.sinks, w - config.recent)  # the n newcomers
    new_k, new_v, new_pos = window.k[:, new], window.v[:, new], window.pos[new]
    # Rank all that may go, slots and newcomers: f32[H,C+n], empty slots -inf.
    pos = jnp.concatenate([tier.pos, jnp.broadcast_to(new_pos, (len(tier.pos), len(new_pos)))], 1)
    k = jnp.concatenate([decode(tier.k, config), new_k], 1)
    rank = jnp.where(pos < 0, -jnp.inf, snapkv(layer.queries, k, pos, config))
    # The i-th best newcomer takes the i-th worst slot if its rank is higher; of equal slots the newest goes first.
    of_slots, of_new, m = rank[:, :c], rank[:, c:], min(c, len(new_pos))
    worst = jnp.lexsort((-tier.pos, of_slots))[:, :m]
    best = jnp.argsort(-of_new, stable=True)[:, :m]
    enters = jnp.take_along_axis(of_new, best, 1) > jnp.take_along_axis(of_slots, worst, 1)
    slot = jnp.sort(jnp.where(enters, worst, c))  # i32[H,m]; C is no slot, and what is written there is dropped
    token = jnp.sort(jnp.where(enters, best, len(new_pos)))
    # Encode the newcomers that enter. Survivors do not move and are never encoded again.
    put = jax.vmap(lambda x, at, new: x.at[at].set(new, mode="drop"))
    slots, tokens = (jnp.broadcast_to(x, (len(new_k), m)) for x in (slot, token))
    k, v = (encode(jnp.take_along_axis(x, tokens[..., None], 1, mode="clip"), config) for x in (new_k, new_v))
    k, v = jax.tree.map(lambda old, new: put(old, slots, new), (tier.k, tier.v), (k, v))
    tier = Tier(k=k, v=v, pos=put(tier.pos, slot, new_pos.at[token].get(mode="clip")))
    # The next window: sinks, the newest tokens, `block` empty entries.
    at = np.r_[: config.sinks, w - config.recent : w, [0] * config.block]
    stays = jnp.arange(len(at)) < config.exact
    return Layer(Window(window.k[:, at], window.v[:, at], jnp.where(stays, window.pos[at], -1)), tier, layer.queries)


def snapkv(queries: Queries, k: Array, pos: Array, config: Config) -> Array:
    """Rank keys [H,S,D] by the attention of the newest queries, averaged over neighbours by age; 0 without queries."""
    p = jnp.exp(dots(queries.q, k) - queries.lse[..., None])
    p = jnp.where(visible(queries.pos, pos), p, 0).sum(2).mean(1)[: len(pos)]  # over N and G: f32[H,S]
    by_age = jnp.argsort(jnp.where(pos < 0, config.longest, pos), stable=True)
    x = jnp.pad(jnp.take_along_axis(p, by_age, 1), ((0, 0), (config.pool // 2, config.pool // 2)))
    mean = sum(x[:, i : i + pos.shape[1]] for i in range(config.pool)) / config.pool
    return jnp.take_along_axis(mean, jnp.argsort(by_age), 1)


# ---- Model: a Llama that does not know the cache
def run(params: Params, cache: Cache, ids: Array, model: Model, longest: int, attention: Any) -> tuple[Any, Array]:
    """Run tokens i32[T] through all layers. Returns what becomes of the layers, and the next token's logits f32[V].

    attention(layer, q [H,G,T,D], k [H,T,D], v [H,T,D], pos i32[T]) returns a Partial and what becomes of the layer.
    """
    pos = cache.seen + jnp.arange(len(ids))
    angle = np.arange(longest)[:, None] * model.theta ** (-np.arange(0, model.dim, 2) / model.dim)  # in float64
    cos, sin = (jnp.asarray(f(angle), jnp.float32)[pos][None, None] for f in (np.cos, np.sin))  # [1,1,T,D/2]

    def rms(w: Array, x: Array) -> Array:
        return w[None] * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + model.eps)

    def rotate(x: Array) -> Array:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def one(x: Array, both: tuple[Params, Layer]) -> tuple[Array, Any]:  # x [T,E]
        w, layer = both
        y, shape = rms(w["input_layernorm"], x), (len(ids), model.heads, -1, model.dim)
        qkv = ((y @ w[f"self_attn.{name}_proj"].T).reshape(shape).transpose(1, 2, 0, 3) for name in "qkv")
        q, k, v = qkv  # [H,G,T,D], [H,1,T,D] twice
        part, layer = attention(layer, rotate(q), rotate(k)[:, 0], v[:, 0], pos)
        o = (part.acc / part.l[..., None]).transpose(2, 0, 1, 3).reshape(len(ids), -1)
        x = x + o @ w["self_attn.o_proj"].T
        y = rms(w["post_attention_layernorm"], x)
        return x + (jax.nn.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T, layer

    x, layers = jax.lax.scan(one, params["embed"][ids], (params["layers"], cache.layers))
    return layers, (rms(params["norm"], x[-1:]) @ params["head"].T)[0]


# ---- Decoding: prefill, step and the loop, pure functions of a cache
@partial(jax.jit, static_argnames=("model", "config"))
def prefill(params: Params, ids: Array, model: Model, config: Config) -> tuple[Cache, Array]:
    """Run a prompt i32[T]. Each layer flushes at once, so only one layer's exact keys and values exist at a time."""

    def attention(layer: Layer, q: Array, k: Array, v: Array, pos: Array) -> tuple[Partial, Layer]:
        part = attend(q, k, v, visible(pos, pos[None]))
        return part, flush(layer._replace(queries=newest(layer.queries, q, pos, part)), Window(k, v, pos), config)

    if len(ids) < config.exact:
        raise ValueError(f"the prompt has {len(ids)} tokens; sinks and recent window take {config.exact}: give it more")
    cache = empty(model, config)
    layers, logits = run(params, cache, ids, model, config.longest, attention)
    return Cache(layers, jnp.int32(len(ids)), cache.fill), logits


def step(params: Params, cache: Cache, token: Array, model: Model, config: Config) -> tuple[Cache, Array]:
    """Append a token i32[] to the windows; the tiers are only read."""

    def attention(layer: Layer, q: Array, k: Array, v: Array, pos: Array) -> tuple[Partial, tuple[Window, Queries]]:
        put, old, tier = partial(jax.lax.dynamic_update_slice_in_dim, start_index=cache.fill), layer.window, layer.tier
        window = Window(k=put(old.k, k, axis=1), v=put(old.v, v, axis=1), pos=put(old.pos, pos, axis=0))
        part = attend(q, window.k, window.v, visible(pos, window.pos[None]))
        part = merge(part, attend(q, decode(tier.k, config), decode(tier.v, config), visible(pos, tier.pos)))
        return part, (window, newest(layer.queries, q, pos, part))

    (window, queries), logits = run(params, cache, token[None], model, config.longest, attention)
    return Cache(cache.layers._replace(window=window, queries=queries), cache.seen + 1, cache.fill + 1), logits


def newest(old: Queries, q: Array, pos: Array, part: Partial) -> Queries:
    """Append T queries and drop the T oldest."""
    new, t, axes = Queries(q=q, pos=pos, lse=part.m + jnp.log(part.l)), len(pos), Queries(q=2, pos=0, lse=2)
    every = jax.tree.map(lambda a, b, axis: jnp.concatenate([a, b], axis), old, new, axes)
    return Queries(q=every.q[:, :, t:], pos=every.pos[t:], lse=every.lse[:, :, t:])


@partial(jax.jit, static_argnames=("model", "config", "n"))
def generate(params: Params, cache: Cache, logits: Array, model: Model, config: Config, n: int) -> tuple[Cache, Array]:
    """Decode n greedy tokens in one program. Returns the cache after them and the tokens i32[n]."""

    def flushed(cache: Cache) -> Cache:
        layers = jax.lax.map(lambda layer: flush(layer, layer.window, config), cache.layers)
        return Cache(layers, cache.seen, jnp.int32(config.exact))

    def one(state: tuple[Cache, Array], _: None) -> tuple[tuple[Cache, Array], Array]:
        cache, logits = state
        cache = jax.lax.cond(cache.fill == config.exact + config.block, flushed, lambda cache: cache, cache)
        token = logits.argmax().astype(jnp.int32)
        return step(params, cache, token, model, config), token

    (cache, _), tokens = jax.lax.scan(one, (cache, logits), length=n)
    return cache, tokens


# ---- Receipt: what was kept, in tokens and bytes
def nbytes(cache: Cache) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))


def receipt(cache: Cache, model: Model, config: Config) -> str:
    kept = (cache.layers.window.pos >= 0).sum(-1)[:, None] + (cache.layers.tier.pos >= 0).sum(-1)  # i32[L,H]
    own, full = nbytes(cache), nbytes(jax.eval_shape(lambda: empty(model, Config(config.longest))))
    tokens = f"{kept.mean():.0f} kept of {cache.seen} seen, per layer and head"
    return f"tokens  {tokens}\nbytes   {own:,} kept of {full:,} full: {full / own:.1f}x smaller"


# ---- Files and the command line
def build(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[Model, Params]:
    """Make a float32 model of a Hugging Face config and tensors by name; weights of the layers are stacked, [L,...]."""
    rope = config.get("rope_parameters") or config
    if config["model_type"] != "llama" or config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError("this file runs plain Llamas, such as SmolLM2; jkv.load reads other families")
    depth, heads, kv = (config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    dim, eps = config.get("head_dim") or config["hidden_size"] // heads, config.get("rms_norm_eps", 1e-6)
    get = {name.removesuffix(".weight"): wide(jnp.asarray(x)) for name, x in tensors.items()}
    names = [name.removeprefix("model.layers.0.") for name in get if name.startswith("model.layers.0.")]
    layers = {name: jnp.stack([get[f"model.layers.{i}.{name}"] for i in range(depth)]) for name in names}
    embed = get["model.embed_tokens"]
    params = dict(layers=layers, embed=embed, norm=get["model.norm"], head=get.get("lm_head", embed))
    return Model(depth, kv, heads // kv, dim, eps, rope.get("rope_theta", 1e4)), params


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode with a Llama through a compressed KV cache.")
    parser.add_argument("folder", type=Path, help="with config.json, tokenizer.json and safetensors")
    parser.add_argument("prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--budget", type=int, help="tokens that SnapKV keeps per head; default: all")
    parser.add_argument("--int4", action="store_true", help="four bits a number for all but the newest tokens")
    args = parser.parse_args()
    tensors = {name: x for path in args.folder.glob("*.safetensors") for name, x in load_file(path).items()}
    model, params = build(json.loads((args.folder / "config.json").read_text()), tensors)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    ids = jnp.array(tokenizer.encode(args.prompt).ids, jnp.int32)
    snapkv = dict(budget=args.budget, queries=32, recent=32) if args.budget else {}
    config = Config(longest=len(ids) + args.new, int4=args.int4, sinks=int(args.int4), **snapkv)
    cache, logits = prefill(params, ids, model, config)
    cache, tokens = generate(params, cache, logits, model, config, args.new)
    print(tokenizer.decode(tokens.tolist()), receipt(cache, model, config), sep="\n\n")


if __name__ == "__main__":
    main()
