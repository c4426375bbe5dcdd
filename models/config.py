"""The model config as one hashable value, and its parser for Hugging Face config dicts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jkv.models.rope import Rope

from .mla import Latent
from .moe_router import Experts
from .softcap import Capped, Scale


@dataclass(frozen=True, kw_only=True)
class Mixers:
    """The recurrent blocks of a model: their places among all blocks, and their sizes.

    Attributes:
        at: Indices of the recurrent blocks.
        heads: Heads (Hs).
        head_dim: Channels per head (P).
        state: State size per channel (N).
        groups: Groups of heads that share the vectors that write and read the state.
        kernel: Taps of the causal convolution, in tokens.
        limit: Range of the time steps.
        rule: State update rule, a key of `jkv.models.RULES`.
        normed: Whether the gated output is normalized.
    """

    at: tuple[int, ...]
    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    limit: tuple[float, float] = (0.0, math.inf)
    rule: str = "ssd"
    normed: bool = True

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: the inputs and the vectors that write and read the states."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number that changes the model's function, and none that does not. Static under jit.

    Layer i rotates queries and keys with `ropes[i]`. A query at position t sees the key at position p iff
    0 <= t - p < windows[i] (None: every p <= t). Attention logits are `q.k * scale`; the logits of the next token are
    multiplied by `head_scale`.

    Attributes:
        family: Key of `jkv.models.FAMILIES`.
        layers: Blocks that attend.
        heads: kv heads per layer (H).
        groups: Query heads per kv head (G).
        head_dim: Channels of a key (D).
        width: Channels of the residual stream (E).
        hidden: Hidden units of an MLP (F).
        vocab: Vocabulary size (V).
        context: Maximum number of positions.
        eps: Epsilon of the norms.
        act: Activation of the MLPs.
        scale: Factor of attention logits; may be `Capped`.
        ropes: RoPE of each layer.
        windows: Sliding window of each layer in tokens, or None.
        tied: Whether the head is the embedding.
        embed_scale: Factor of the embeddings, or None.
        head_scale: Factor of the next token's logits; may be `Capped`.
        residual_scale: Factor of what each half of a layer adds to the residual stream.
        eos: End token ids.
        bos: Begin token id, or None.
        mixers: Recurrent blocks, if any.
        experts: Experts of MoE blocks, if any.
        latent: Sizes of multi-head latent attention, if used.
        gains: Multipliers applied when weights are read: tensor name within a block -> (rows, factor), in order of
            rows.

    >>> from jkv.models import llama
    >>> c = llama.config(dict(model_type="llama", vocab_size=100, hidden_size=32, intermediate_size=64,
    ...                       num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ...                       max_position_embeddings=512))
    >>> c.heads, c.groups, c.head_dim, c.windows
    (2, 2, 8, (None, None))
    """

    family: str
    layers: int
    heads: int
    groups: int
    head_dim: int
    width: int
    hidden: int
    vocab: int
    context: int
    eps: float
    act: str
    scale: Scale
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    tied: bool
    embed_scale: float | None = None
    head_scale: Scale = 1.0
    residual_scale: float = 1.0
    eos: tuple[int, ...] = ()
    bos: int | None = None
    mixers: Mixers | None = field(default=None, repr=False)
    experts: Experts | None = None
    latent: Latent | None = None
    gains: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = field(default=(), repr=False)

    @property
    def value_dim(self) -> int:
        """Channels of a value (Dv)."""
        return self.latent.rank if self.latent else self.head_dim

    @property
    def cached(self) -> int:
        """Numbers cached per token and kv head: key and value; for MLA only the key, which contains the value."""
        return self.head_dim if self.latent else self.head_dim + self.value_dim

    @property
    def capped(self) -> bool:
        """Whether attention logits have a soft cap."""
        return isinstance(self.scale, Capped)

    @property
    def depth(self) -> int:
        """Number of blocks, attention and recurrent."""
        return self.layers + (len(self.mixers.at) if self.mixers else 0)

    def attends(self, i: int) -> bool:
        """Return whether block i attends."""
        return self.mixers is None or i not in self.mixers.at

    def sparse(self, i: int) -> bool:
        """Return whether block i has experts."""
        return self.experts is not None and i in self.experts.at

    def block(self, i: int) -> "ModelConfig":
        """Return the config of block i alone."""
        before = sum(map(self.attends, range(i)))
        own = slice(before, before + self.attends(i))
        mixers = replace(self.mixers, at=() if self.attends(i) else (0,)) if self.mixers else None
        experts = replace(self.experts, at=(0,) if self.sparse(i) else ()) if self.experts else None
        turns, seen = self.ropes[own], self.windows[own]
        return replace(self, layers=len(turns), ropes=turns, windows=seen, mixers=mixers, experts=experts)

    def attending(self, a: int) -> "ModelConfig":
        """Return the config of the a-th attention block alone."""
        return self.block([i for i in range(self.depth) if self.attends(i)][a])

    def __hash__(self) -> int:
        # jit hashes its static arguments at every call; hashing the ropes of all layers would cost more than the lookup
        return hash((self.family, self.layers, self.heads, self.width, self.vocab))


# Fields that cannot change the logits of a forward pass: training, bookkeeping, sampling defaults, labels.
HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
    add_cross_attention architectures attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop
    auto_map bad_words_ids begin_suppress_tokens bos_token cache_implementation chunk_size_feed_forward
    classifier_dropout classifier_dropout_prob cls_token_id cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size
    eos_token exponential_decay_length_penalty finetuned finetuning_task flash_attn forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob id2label ignore_index
    initializer_factor initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty license
    mask_token_id max_length max_new_tokens max_seq_len max_seq_length max_sequence_length min_length min_new_tokens
    min_p model_max_length model_type neftune_alpha neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token
    pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty resid_dropout
    resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise router_z_loss_coef
    sep_token_id seq_length suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class tokenizer_model_max_length top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    use_flash_attention use_flash_attention_2 use_flash_attn""".split()
)
NOTHING = (None, False, "", [], {})  # values that an unread field may have, because they request nothing (0 == False)

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Upper bounds, because sizes in a config are used to build tables before any tensor can contradict them.
CONTEXT, HEAD_DIM, LAYERS, _MOST = 1 << 24, 1024, 1024, 1 << 40

_UNSET: Any = object()


def is_whole_number(x: Any) -> bool:
    """Return whether x is a whole number, in either JSON spelling.

    >>> is_whole_number(2), is_whole_number(2.0), is_whole_number(2.5), is_whole_number(True), is_whole_number(math.nan)
    (True, True, False, False, False)
    """
    return type(x) is int or (type(x) is float and x.is_integer())


class Fields:
    """Fields of a config dict that tracks which were read, so that none is overlooked."""

    def __init__(self, hf: Mapping[str, Any], family: str, where: str = "") -> None:
        self.rest, self.family, self.where = dict(hf), family, where

    def refuse(self, name: str, got: Any, way_out: str) -> ValueError:
        """Build the error for a field's value, with the way out."""
        return ValueError(f"config field {self.where + name!r} = {got!r} is not supported for {self.family}: {way_out}")

    def take(self, name: str, default: Any = _UNSET) -> Any:
        """Take a field's value; null counts as absent. ValueError if it is absent and has no default."""
        got = self.rest.pop(name, None)
        if got is None and default is _UNSET:
            raise ValueError(f"config field {self.where + name!r} is missing, and {self.family} has no default for it")
        return default if got is None else got

    def number(self, name: str, default: Any = _UNSET, kind: Callable[[Any], Any] = int, most: float = _MOST) -> Any:
        """Take a positive number of type `kind`, at most `most`."""
        got = self.take(name, default)
        if got is None:
            return None
        valid = isinstance(got, int | float) and not isinstance(got, bool) and 0 < got < math.inf
        if not valid or (isinstance(got, int) and got > _MOST) or kind(got) != got:
            raise self.refuse(name, got, f"it must be a positive {kind.__name__}")
        if got > most:
            raise self.refuse(name, got, f"{most:,} is the most that any model has, so it is a mistake")
        return kind(got)

    def mapping(self, name: str) -> dict[str, Any]:
        """Take a dict; empty if the field is absent."""
        got = self.take(name, {})
        if not isinstance(got, dict):
            raise self.refuse(name, got, "it must be an object of names and values")
        return got

    def only(self, name: str, *allowed: Any, way_out: str) -> None:
        """Raise ValueError unless a field is absent, null or one of `allowed`; others would change the function."""
        got = self.take(name, None)
        if got is not None and got not in allowed:
            raise self.refuse(name, got, way_out)

    def done(self) -> None:
        """Raise ValueError if an unread field requests something."""
        if left := {k: v for k, v in self.rest.items() if v not in NOTHING and k not in HARMLESS}:
            name, got = next(iter(left.items()))
            more = f" (also unread: {', '.join(list(left)[1:6])})" if len(left) > 1 else ""
            raise self.refuse(
                name,
                got,
                "nothing here reads it, and the model's own code might. If it changes no output of the model, delete "
                f"it from config.json{more}",
            )


def read(
    hf: Mapping[str, Any],
    family: str,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    bias: tuple[Any, ...] = (False,),
    windows: Callable[[Fields, int], tuple[int | None, ...]] | None = None,
    ropes: "Callable[[Fields, int, int, tuple[int | None, ...]], tuple[tuple[Rope, ...], int]] | None" = None,
    extra: Callable[[Fields, int], dict[str, Any]] | None = None,
    act: str = "hidden_act",
) -> ModelConfig:
    """Read a config dict: the fields that all families share, with family differences as arguments.

    Args:
        hf: Hugging Face config dict.
        family: Expected model_type.
        tied: The family's default of tie_word_embeddings.
        head_dim: The family's default head dimension. None: hidden_size / num_attention_heads.
        bias: Values of `attention_bias` that the family implements.
        windows: windows(fields, layers) reads the sliding window of each layer.
        ropes: ropes(fields, dim, context, windows) reads the RoPE of each layer and the context.
        extra: extra(fields, width) reads the family's own fields.
        act: Name of the activation's field.

    Raises:
        ValueError: A field is missing, unknown or unsupported; the message has its name, its value and the way out.
    """
    if hf.get("model_type") not in (None, family):
        raise ValueError(f"config has model_type {hf['model_type']!r}, but it was given to the family {family!r}")
    f = Fields(hf, family)
    # Sizes and heads.
    width, count = (f.number(n) for n in ("hidden_size", "num_attention_heads"))
    layers = f.number("num_hidden_layers", most=LAYERS)
    # null means multi-head attention in every family; a missing field means it only in llama (version 1)
    heads = f.number("num_key_value_heads", count if family == "llama" or "num_key_value_heads" in hf else _UNSET)
    if count % heads:
        raise f.refuse("num_key_value_heads", heads, f"it must divide num_attention_heads = {count}")
    dim = f.number("head_dim", head_dim or width // count, most=HEAD_DIM)
    if dim % 2:
        raise f.refuse("head_dim", dim, "rotary embedding turns pairs of channels, so it must be even")
    # Activation, windows, RoPE.
    _common(f, bias)
    name = f.take(act, "gelu_pytorch_tanh" if act == "hidden_activation" else "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise f.refuse(act, name, f"use one of {sorted(ACTIVATIONS)}")
    context = f.number("max_position_embeddings", most=CONTEXT)
    seen = windows(f, layers) if windows else (None,) * layers
    turns, context = (ropes or one_rope)(f, dim, context, seen)
    out = ModelConfig(
        family=family,
        layers=layers,
        heads=heads,
        groups=count // heads,
        head_dim=dim,
        width=width,
        hidden=f.number("intermediate_size"),
        vocab=f.number("vocab_size"),
        context=context,
        eps=f.number("rms_norm_eps", 1e-6, float),
        act=ACTIVATIONS[name],
        ropes=turns,
        windows=seen,
        tied=bool(f.take("tie_word_embeddings", tied)),
        **({"scale": dim**-0.5} | (extra(f, width) if extra else {}) | ends(f)),
    )
    f.done()
    return out


def _common(f: Fields, bias: tuple[Any, ...]) -> None:
    """Raise ValueError for unsupported values of fields that all families treat alike."""
    for name in ("mlp_bias", "rope_interleaved", "use_mrope"):
        f.only(name, False, way_out="only false is implemented")
    f.only("attention_bias", *bias, way_out=f"only {bias[0]!r} is implemented (biases on q, k, v exist in qwen2)")
    f.only("partial_rotary_factor", 1, way_out="only 1.0 is implemented: all channels of a head turn")
    f.only("quantization_config", way_out="load the unquantized checkpoint, or a GGUF file of the same model")


def ends(f: Fields) -> dict[str, Any]:
    """Read the begin and end token ids."""
    eos = f.take("eos_token_id", ())
    ids, bos = tuple(eos) if isinstance(eos, list | tuple) else (eos,), f.take("bos_token_id", None)
    for name, got in (("eos_token_id", ids), ("bos_token_id", (bos,) if bos is not None else ())):
        if not all(map(is_whole_number, got)):
            raise f.refuse(name, got, "token ids are whole numbers")
    return {"eos": tuple(map(int, ids)), "bos": None if bos is None else int(bos)}


def sliding_window(f: Fields) -> int | None:
    """Read the window in tokens; null means none, but in transformers a missing field means 4096."""
    return f.number("sliding_window", None if "sliding_window" in f.rest else 4096)


def by_layer_type(f: Fields, layers: int, window: int | None, default: list[str]) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types`, or by `default` if the config has none."""
    kinds = f.take("layer_types", default)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise f.refuse("layer_types", kinds, "it is a list of texts")
    if len(kinds) != layers:
        raise f.refuse("layer_types", kinds, f"it needs num_hidden_layers = {layers} entries")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise f.refuse("layer_types", sorted(unknown), "only full_attention and sliding_attention are implemented")
    if "sliding_attention" in kinds and window is None:
        raise f.refuse("layer_types", kinds, "sliding layers need sliding_window (and use_sliding_window true)")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def one_rope(f: Fields, dim: int, context: int, windows: tuple[int | None, ...]) -> tuple[tuple[Rope, ...], int]:
    """Read one RoPE for all layers; also return the context it reaches."""
    theta = f.number("rope_theta", 10000.0, float)
    old, new = f.mapping("rope_scaling"), f.mapping("rope_parameters")
    if old and new:
        raise f.refuse("rope_scaling", old, "rope_parameters says the same in newer configs: keep one of the two")
    turn = rope({"rope_theta": theta} | old | new, f.family, dim, context)
    return (turn,) * len(windows), turn.longest


def rope(given: Mapping[str, Any], family: str, dim: int, context: int) -> Rope:
    """Read a RoPE dict: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`.

    Frequencies are theta^(-2i/D); `linear` divides them by the factor, `llama3` divides the low ones, `yarn` blends
    both by a ramp and scales cos and sin. All in float64.

    Args:
        given: The dict.
        family: Family, for error messages.
        dim: Channels that rotate (D).
        context: max_position_embeddings.

    Raises:
        ValueError: A field is missing or unsupported; the message has its name.

    >>> rope({"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0}, "llama", 4, 128).inv_freq
    (0.5, 0.05)
    """
    f = Fields(given, family, where="rope_parameters.")
    kind = f.take("type", "default")
    kind = f.take("rope_type", kind)
    theta = f.number("rope_theta", kind=float)
    f.only("partial_rotary_factor", 1, way_out="only 1.0 is implemented: all channels of a head turn")
    for name in ("extrapolation_factor", "attn_factor"):  # fields of YaRN's reference code
        f.only(name, 1, way_out="only 1 is implemented, as in transformers, which does not read it")
    if kind in ("default", "linear"):
        f.take("original_max_position_embeddings", None)
    base = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    scale = 1.0
    if kind == "default":
        freqs = base
        f.take("factor", None)  # transformers ignores it for this type
    elif kind == "linear":
        factor = f.number("factor", kind=float)
        freqs = [x / factor for x in base]
    elif kind == "llama3":
        freqs = _llama3(f, base, context)
    elif kind == "yarn":
        freqs, scale, context = _yarn(f, base, theta, context)
    else:
        raise f.refuse(
            "rope_type",
            kind,
            "only default, linear, llama3 and yarn are implemented. dynamic and longrope change the frequencies with "
            "the length of the text, which keys already in a cache cannot follow: use default up to the original "
            "context, or yarn with the same factor",
        )
    f.done()
    return Rope(inv_freq=tuple(freqs), longest=context, scale=scale)


def _llama3(f: Fields, base: list[float], context: int) -> list[float]:
    factor, low, high = (f.number(n, kind=float) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    old = f.number("original_max_position_embeddings", context)

    def stretch(freq: float) -> float:
        turns = old * freq / (2 * math.pi)  # full rotations within the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - keep) * freq / factor + keep * freq

    return [stretch(freq) for freq in base]


def _yarn(f: Fields, base: list[float], theta: float, context: int) -> tuple[list[float], float, int]:
    old = f.number("original_max_position_embeddings", context)
    factor = f.number("factor", context / old, float)
    fast, slow = f.number("beta_fast", 32.0, float), f.number("beta_slow", 1.0, float)
    mscale, mscale_all = f.take("mscale", None), f.take("mscale_all_dim", None)
    dim = 2 * len(base)

    def channel(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def gain(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    # Blend between the channels with `fast` and `slow` rotations in the original context.
    low, high = channel(fast), channel(slow)
    if f.take("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 * (low == high)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(base))]
    both = mscale and mscale_all
    scale = f.number("attention_factor", gain(mscale) / gain(mscale_all) if both else gain(1.0), float)
    freqs = [x / factor * r + x * (1 - r) for x, r in zip(base, ramp, strict=True)]
    # Published configs keep the original max_position_embeddings next to a yarn factor: the model reaches old * factor.
    if old * factor > CONTEXT:
        raise f.refuse("factor", factor, f"{CONTEXT:,} tokens are the most that any model reaches")
    return freqs, scale, max(context, round(old * factor))
