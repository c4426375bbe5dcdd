"""Fidelity to kvpress (torch): kept tokens and predictions of the same methods.

`python -m benchmarks.kvpress_fidelity` needs torch, transformers and kvpress. Both sides run the same float32 weights
over the same prompts. Each cache then stays frozen while both read the same continuation at its true positions.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jkv
from benchmarks.engines import Transformers
from benchmarks.presses import PEERS, Peer
from jkv import methods
from jkv.bench.environment import check_path, meta, save, use_cores
from jkv.core.compilation import forget
from jkv.eval import corpora
from jkv.eval.attention_recall import here
from jkv.eval.prefill_replay import Prefills
from jkv.generation.teacher_forcing import Follow, surprise
from jkv.models import Params
from jkv.prompts.greedy import greedy
from jkv.utils import console

KEEPS = (0.5, 0.25, 0.125)


@dataclass(frozen=True)
class KeptPositions:
    """What a cache keeps.

    Attributes:
        here: Kept positions, bool[L,B,H,S].
        ppl: Perplexity of the continuation.
    """

    here: np.ndarray
    ppl: float

    @classmethod
    def joined(cls, rows: Sequence[KeptPositions]) -> KeptPositions:
        """Concatenate the results of texts of equal length along the batch.

        >>> one, two = (KeptPositions(np.ones((1, 1, 1, 3), bool), x) for x in (2.0, 8.0))
        >>> KeptPositions.joined([one, two]).here.shape, round(KeptPositions.joined([one, two]).ppl, 6)
        ((1, 2, 1, 3), 4.0)
        """
        mean = np.mean([np.log(x.ppl) for x in rows])
        return cls(np.concatenate([x.here for x in rows], 1), float(np.exp(mean)))


def ppl(logits: Any, ids: np.ndarray) -> float:
    """Compute the perplexity of ids i32[B,T] under logits f32[B,T,V].

    >>> round(ppl(np.zeros((1, 2, 8), np.float32), np.array([[3, 5]])), 5)
    8.0
    """
    return float(np.exp(np.asarray(surprise(jnp.asarray(logits), jnp.asarray(ids)), np.float64).mean()))


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return f[L,B,H], the share of the positions in a bool[L,B,H,S] that are also in b.

    >>> overlap(np.array([[[[True, True, False, False]]]]), np.array([[[[True, False, True, False]]]])).tolist()
    [[[0.5]]]
    """
    return (a & b).sum(-1) / a.sum(-1)


# ------------------------------------------------------------------------------------------------------------- jkv


def texts(prompt: int) -> dict[str, tuple[str, int]]:
    """Return (cache, prefill chunk) for every compared spec and budget, and for "full"."""
    return {"full": ("full", 0)} | {
        p.key(n): (p.text(n), p.chunk) for p in PEERS for n in (int(keep * prompt) for keep in KEEPS)
    }


def ours(params: Params, ids: np.ndarray, prompt: int, text: str, chunk: int, prefill: Prefills) -> KeptPositions:
    """Run one entry of `texts` and return what it keeps."""
    before, after = np.split(ids, [prompt], 1)
    config = replace(
        methods.parse(text), block=after.shape[1], chunk=chunk
    )  # a block so long that no flush happens during the continuation
    cache, logits = prefill(params, config, before, after.shape[1])
    predicted = np.concatenate(list(Follow(params, cache, logits, after)), 1)
    found = KeptPositions(here(cache, prompt), ppl(predicted, after))
    print(f"jkv {text}: {found.ppl:.3f}", flush=True)
    forget()
    return found


# --------------------------------------------------------------------------------------------------------- kvpress


class Kvpress:
    """The presses on transformers: prefill once (eager), apply every press to every layer, then continue.

    The result per layer is keys, values, and the kept positions of the prompt, bool[B,H,S]. Keys and values cover the
    whole prompt if a press only masks.
    """

    def __init__(self, name: str, params: Params, threads: int) -> None:
        import kvpress  # pyright: ignore[reportMissingImports]  an extra
        import torch  # pyright: ignore[reportMissingImports]  an extra
        from transformers.modeling_utils import (  # pyright: ignore[reportMissingImports]  an extra
            ALL_ATTENTION_FUNCTIONS,
        )

        self.kv, self.torch, self.params = kvpress, torch, params
        self.peer = Transformers(name, threads)
        self.model = self.peer.model
        self.masked: dict[int, Any] = {}  # per layer of the current cache: bool[B,H,S]
        ALL_ATTENTION_FUNCTIONS["lower_right"] = self._attend

    def _attend(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        """Attend to cached tokens that are not masked, and causally to new ones; layers may differ in length."""
        groups, new, old = q.shape[1] // k.shape[1], q.shape[2], k.shape[2] - q.shape[2]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        seen = self.torch.ones(new, old + new, dtype=self.torch.bool).tril(old)
        if module.layer_idx in self.masked:
            here = self.masked[module.layer_idx].repeat_interleave(groups, 1)[:, :, None]
            seen = seen & self.torch.nn.functional.pad(here, (0, new), value=True)
        out = self.torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=options["scaling"])
        return out.transpose(1, 2), None

    def run(self, ids: np.ndarray, prompt: int) -> dict[tuple[str, float], KeptPositions]:
        """Run every peer at every budget, and ("full", 1), one text at a time.

        Batches are avoided because some presses use the selection of row 0 for all rows.
        """
        found = [self._row(ids[i : i + 1], prompt) for i in range(len(ids))]
        return {key: KeptPositions.joined([row[key] for row in found]) for key in found[0]}

    def _row(self, ids: np.ndarray, prompt: int) -> dict[tuple[str, float], KeptPositions]:
        before, after = (self.torch.as_tensor(x, dtype=self.torch.long) for x in (ids[:, :prompt], ids[:, prompt:]))
        presses = {(p, keep): p.press(self.kv, 1 - keep, int(keep * prompt)) for p in PEERS for keep in KEEPS}
        first, cut = self._by_layer({key: press for key, press in presses.items() if key[0].probe is None}, before)
        for (peer, keep), press in presses.items():
            if peer.probe is not None:
                asked = peer.probe.texts(self.params, before.tolist(), greedy)
                press.asked = [text.ids[0] for text in asked]
                cut[peer.method, keep] = self._at_once(press, before)
        relative = {p.method for p in PEERS if p.relative}
        self.model.set_attn_implementation("lower_right")
        results = {}
        with self.torch.inference_mode():
            for key, layers in cut.items():
                start = layers[0][0].shape[2] if key[0] in relative else prompt
                rest = self._continue(layers, after[:, :-1], start)
                logits = self.torch.cat([first, rest], 1).numpy()
                results[key] = KeptPositions(np.stack([h.numpy() for *_, h in layers]), ppl(logits, ids[:, prompt:]))
                print(f"kvpress {key[0]} {key[1]}: {results[key].ppl:.3f}", flush=True)
        return results

    def _by_layer(
        self, presses: dict[tuple[Peer, float], Any], ids: Any
    ) -> tuple[Any, dict[tuple[str, float], list[Any]]]:
        """Return the last token's logits, and each layer's result of every press and of ("full", 1), from one pass."""
        cut: dict[Any, list[Any]] = {("full", 1.0): []} | {(p.method, keep): [] for p, keep in presses}

        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            held = kwargs["past_key_values"].layers[module.layer_idx]
            cut["full", 1.0].append((held.keys, held.values, self._held(module, held.keys, held.keys)))
            module.config._attn_implementation = (
                "sdpa"  # masking presses reject eager attention, although eager attention does not call them
            )
            for (peer, keep), press in presses.items():
                wants = isinstance(press, self.kv.ObservedAttentionPress)
                given = kwargs["hidden_states"], held.keys, held.values, output[1] if wants else None, kwargs
                k, v = press.compress(module, *given)
                at = press.press.compress(module, *given)[0] if peer.relative else k
                cut[peer.method, keep].append((k, v, self._held(module, held.keys, at)))
            module.config._attn_implementation = "eager"

        self.model.set_attn_implementation("eager")
        hooks = []
        for part in self.model.model.layers:
            part.self_attn.rotary_emb = self.model.model.rotary_emb
            hooks.append(part.self_attn.register_forward_hook(hook, with_kwargs=True))
        with self.torch.inference_mode():
            first = self.model(ids, use_cache=True, logits_to_keep=1).logits
        for handle in hooks:
            handle.remove()
        return first, cut

    def _at_once(self, press: Any, ids: Any) -> list[Any]:
        """Return the result of a press that reads more after the prompt, and then compresses all layers at once."""
        cache = self.peer.cache()
        self.model.set_attn_implementation("sdpa")
        with self.torch.no_grad(), press(self.model):  # the press reads further tokens when its context exits
            self.model(ids, past_key_values=cache, use_cache=True)
        parts = zip(self.model.model.layers, cache.layers, strict=True)
        return [(held.keys, held.values, self._held(part.self_attn, held.keys, held.keys)) for part, held in parts]

    def _continue(self, layers: list[Any], ids: Any, start: int) -> Any:
        """Return logits [B,T,V] of ids at positions from `start` on, with a cache of `layers`."""
        cache = self.peer.cache()
        for i, (k, v, _) in enumerate(layers):
            cache.update(k, v, i)
        self.masked = {i: here for i, (k, _, here) in enumerate(layers) if k.shape[2] == here.shape[2]}
        places = self.torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
        return self.model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits

    def _held(self, module: Any, keys: Any, kept: Any) -> Any:
        """Return bool[B,H,S], the rows of `keys` [B,H,S,D] that are in `kept` [B,H,n,D], by the bits of two numbers.

        A masking press keeps all rows, and stores the indices of masked ones in `module`.
        """
        bits = [x[..., :2].contiguous().view(self.torch.int64)[..., 0] for x in (keys, kept)]
        ordered, order = bits[0].sort(-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("two keys begin alike: positions are not known")
        here = self.torch.zeros(keys.shape[:3], dtype=self.torch.bool)
        here.scatter_(-1, order.gather(-1, self.torch.searchsorted(ordered, bits[1].contiguous())), True)
        masked, module.masked_key_indices = getattr(module, "masked_key_indices", None), None
        if masked is not None:
            here[masked] = False
        return here


# ----------------------------------------------------------------------------------------------------------- table


def compared(
    prompt: int, mine: dict[str, KeptPositions], theirs: dict[tuple[str, float], KeptPositions]
) -> list[dict[str, Any]]:
    """Return all records that compare `ours` (by `texts`) with `Kvpress.run`."""
    keys = [("full", 1.0, "full", "")]
    keys += [(p.method, keep, p.key(int(keep * prompt)), p.note) for p in PEERS for keep in KEEPS]
    return [line(method, keep, mine[key], theirs[method, keep], note) for method, keep, key, note in keys]


def about(args: argparse.Namespace, ids: np.ndarray) -> dict[str, Any]:
    """Return the metadata of the result file."""
    hashes = [hashlib.sha256(x.astype("<i4").tobytes()).hexdigest() for x in ids]
    tokens = {"text": "pydoc", "sha256 of little-endian int32": hashes}
    out = meta(args.model, args.threads, prompt=args.prompt, continuation=args.new, windows=tokens)
    return out | {"versions": out["versions"] | {"kvpress": metadata.version("kvpress")}}


def line(method: str, keep: float, a: KeptPositions, b: KeptPositions, note: str) -> dict[str, Any]:
    """Return one record. Overlaps are shares of what jkv keeps; the least is over layers, windows and heads."""
    same = overlap(a.here, b.here)
    return {
        "method": method,
        "keep": keep,
        "overlap": round(float(same.mean()), 4),
        "least_overlap": round(float(same.min()), 4),
        "ppl_jkv": round(a.ppl, 3),
        "ppl_kvpress": round(b.ppl, 3),
        "note": note,
        "overlap_layer_0": round(float(same[0].mean()), 4),
    }


def table(lines: Sequence[dict[str, Any]]) -> Any:
    """Format the rows as a table that also renders as markdown."""
    from rich import box
    from rich.table import Table

    names = ("method", "keep", "overlap", "least_overlap", "ppl_jkv", "ppl_kvpress")
    out = Table(*names, box=box.MARKDOWN)
    for row in lines:
        out.add_row(*(str(row[name]) for name in names))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.kvpress_fidelity", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--windows", type=int, default=4)
    p.add_argument("--prompt", type=int, default=1024, help="tokens of a window that are compressed")
    p.add_argument("--new", type=int, default=128, help="tokens of a window that are predicted")
    p.add_argument("--threads", type=int, default=2, help="cores that the process may use")
    p.add_argument("--out", type=Path, default=Path("results/kvpress.json"))
    args = p.parse_args(argv)
    check_path(args.out)
    use_cores(args.threads)  # before jax starts its threads
    params = jkv.load(args.model)
    assert params.tokenizer is not None
    ids = corpora.windows(params.tokenizer.encode(corpora.text("pydoc")), args.prompt + args.new, args.windows)
    theirs = Kvpress(args.model, params, args.threads).run(ids, args.prompt)
    prefill = Prefills()
    mine = {key: ours(params, ids, args.prompt, *what, prefill) for key, what in texts(args.prompt).items()}
    lines = compared(args.prompt, mine, theirs)
    save(args.out, about(args, ids), lines)
    console.show(table(lines))


if __name__ == "__main__":
    main()
