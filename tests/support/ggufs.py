"""Tiny GGUF files made by hand for the tests."""

import struct
from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, DIM, WIDTH, HIDDEN, LAYERS = 4, 2, 8, 32, 64, 2
# Every byte as GPT-2 spells it, and a few merged tokens over them.
BYTES = [
    chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 else None
    for b in range(256)
]  # fmt: skip
for _n, _b in enumerate([b for b in range(256) if BYTES[b] is None]):
    BYTES[_b] = chr(256 + _n)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = SPECIAL + BYTES + ["he", "ll", "hell", "hello", "Ġw", "12"]
VOCAB = len(TOKENS)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def permute(weight, heads):
    """What the Llama converter does to the rows of Q and K, written with indices instead of reshapes."""
    rows, half = weight.shape[0], weight.shape[0] // heads // 2
    order = [h * 2 * half + part * half + i for h in range(heads) for i in range(half) for part in range(2)]
    assert sorted(order) == list(range(rows))
    return weight[order]


def weights(arch="llama", seed=0):
    """Random float32 tensors of a tiny model by GGUF name, as the Hugging Face folder would have them."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        block = {
            "attn_norm": (WIDTH,),
            "attn_q": (HEADS * DIM, WIDTH),
            "attn_k": (KV_HEADS * DIM, WIDTH),
            "attn_v": (KV_HEADS * DIM, WIDTH),
            "attn_output": (WIDTH, HEADS * DIM),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (HIDDEN, WIDTH),
            "ffn_up": (HIDDEN, WIDTH),
            "ffn_down": (WIDTH, HIDDEN),
        }
        if arch in ("qwen3", "gemma3"):
            block |= {"attn_q_norm": (DIM,), "attn_k_norm": (DIM,)}
        if arch == "olmo2":
            block |= {"attn_q_norm": (HEADS * DIM,), "attn_k_norm": (KV_HEADS * DIM,)}
            del block["attn_norm"], block["ffn_norm"]
        if arch in ("gemma2", "gemma3", "olmo2"):
            block |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{p}.bias": ((HEADS if p == "q" else KV_HEADS) * DIM,) for p in "qkv"}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def converted(tensors, arch):
    """The tensors as the converter would write them."""
    out = dict(tensors)
    for name, value in tensors.items():
        turned = arch in ("llama", "granite", "smollm3")
        if turned and ".attn_q." in name:
            out[name] = permute(value, HEADS)
        elif turned and ".attn_k." in name:
            out[name] = permute(value, KV_HEADS)
        elif arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            out[name] = value + 1
    return out


def metadata(arch="llama"):
    """Metadata of the tiny model, without the tokenizer."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.feed_forward_length": HIDDEN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }


def bpe(pre="smollm"):
    """Metadata of a byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (VOCAB - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(path, tensors, meta, arch="llama", kinds=None, **how):
    """Writes a GGUF file; `kinds` maps tensor names to quantisation types; how: as the writer takes it."""
    writer = gguf.GGUFWriter(str(path), arch, **how)
    for key, value in meta.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def tiny(path, arch="llama", meta=None, tensors=None, kinds=None):
    """A whole tiny model of an architecture; `meta` overrides entries, where None removes one; kinds: as in `write`."""
    entries = metadata(arch) | bpe() | (meta or {})
    entries = {key: value for key, value in entries.items() if value is not None}
    return write(path, converted(weights(arch), arch) | (tensors or {}), entries, arch, kinds)


def text(value):
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def raw(keys=(), infos=(), data=b"", version=3, n_keys=None, n_tensors=None):
    """A GGUF file from parts, where the counts may lie. A key is bytes, an info (name, dims, type, offset)."""
    body = b"".join(keys)
    for name, dims, kind, offset in infos:
        body += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        body += struct.pack("<IQ", kind, offset)
    counts = (len(infos) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + body
    return head + b"\0" * (-len(head) % 32) + data
