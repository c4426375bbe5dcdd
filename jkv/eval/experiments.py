"""The experiments of `jkv eval`: each measures caches row by row into a result file that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.core.compilation import forget
from jkv.eval import corpora, tasks
from jkv.eval import quality as quality_eval
from jkv.eval.attention_recall import recovered
from jkv.eval.chunk_reuse import BEDS, WHOLE, drift, prefix_tokens, quality, times
from jkv.eval.codec_error import Codecs, outlying
from jkv.eval.prefill_replay import LIMIT, Prefills
from jkv.eval.results import PACKAGES, Results, digest
from jkv.eval.selector_recall import layer_queries
from jkv.eval.selector_recall import recovered as of_picks
from jkv.eval.tasks import Example, niah, scbench
from jkv.io.fingerprint import fingerprint
from jkv.methods import METHODS, parse
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.models.weights.linear import forms
from jkv.utils.json_results import versions

KEEPS = (0.5, 0.25, 0.125)
Say = Callable[[str], None]  # progress callback


@dataclass(frozen=True)
class Setting:
    """Settings that all experiments share. Raises ValueError for a cache that the model cannot have.

    Attributes:
        name: Name of the model, for the result file.
        params: The model.
        caches: Cache compositions, as text.
        batch: Texts or prompts per batch.
        path: Result file, or None for results in memory only.
        seed: Seed of the synthetic tasks.
    """

    name: str
    params: Params
    caches: Sequence[str]
    batch: int
    path: Path | None
    seed: int = 0

    def __post_init__(self) -> None:
        for cache in self.caches:
            parse(cache).bound(self.params)

    def results(self, command: str, prompts: Sequence[str | bytes], **how: Any) -> Results:
        """Open the result file with everything its numbers depend on as `meta`; see `results.Results`.

        Args:
            command: Name of the experiment.
            prompts: The texts, for a digest.
            **how: The experiment's own settings.
        """
        tokenizer = self.params.tokenizer
        meta = {
            "command": command,
            "model": self.name,
            "fingerprint": fingerprint(self.params),
            "dtype": str(self.params.embed.dtype),
            **({} if (kept := forms(self.params)) == str(self.params.embed.dtype) else {"weights": kept}),
            "seed": self.seed,
            "prompts": digest(prompts),
            "template": None if tokenizer is None or not tokenizer.template else digest([tokenizer.template]),
            "stop_ids": [] if tokenizer is None else list(tokenizer.eos_ids),
            "versions": versions(PACKAGES),
            **how,
        }
        return Results(self.path, meta)

    def each(
        self, found: Results, say: Say, rows: Sequence[dict[str, Any]], run: Callable[..., dict[str, Any]]
    ) -> None:
        """Measure what the results lack: one row per cache and per key of `rows`.

        Args:
            found: The results, which new rows are added to.
            say: Called with a progress message per row.
            rows: Keys of the rows, each with at least "task".
            run: Returns the measured columns of a config and a key.
        """
        for cache in self.caches:
            config = parse(cache)
            for key in rows:
                if found.find(cache=cache, **key) is None:
                    found.add({"cache": cache, **key, **run(config, key)})
                say(f"{cache} {key['task']}")
            forget()


def catalogue(length: int, params: Params, keeps: Sequence[float] = KEEPS) -> list[str]:
    """List every catalogue method for texts of `length` tokens, at each fraction of `keeps` if it takes a budget.

    Left out are modifiers of other methods ("append", "coded", "vote" ...) and methods that need training or
    calibration, unless weights for this model come with jkv. Selectors keep all tokens and read the fraction.

    >>> from jkv import models
    >>> [x for x in catalogue(1024, models.random(models.TINY), keeps=(0.25,)) if "snapkv" in x]
    ['snapkv(budget=256)', 'snapkv(budget=256) | int8', 'snapkv(budget=256) | int4']
    """
    out = []
    for method in METHODS.values():
        takes = method.arguments
        # A budget, a number of selected pages, or a method without a size.
        if method.sized and takes["keep"] is None:  # else it has a fraction of its own
            out += [f"{method.name}(budget={int(keep * length)})" for keep in keeps]
        elif "pages" in takes:
            out += [f"{method.name}(pages={int(keep * length) // takes['page']})" for keep in keeps]
        elif not {*method.axes} <= {"append", "pooled", "merge", "prefill", "vote", "steps", "layers", "values"}:
            out.append(method.name)
    out += [f"snapkv(budget={int(keep * length)}) | {code}" for keep in keeps for code in ("int8", "int4")]
    return [text for text in out if has_weights(parse(text), params)]


def has_weights(config: CacheConfig, params: Params) -> bool:
    """Return whether a config needs no trained weights, or has weights for this model."""
    try:
        config.bound(params)
    except ValueError:
        return False
    return True


def texts(
    params: Params,
    corpus: str,
    file: Path | None,
    tokens: Path | None,
    prefix: int,
    rest: int,
    samples: int,
    seed: int,
    endless: bool = False,
) -> tuple[np.ndarray, str]:
    """Load token ids i32[samples, prefix + rest] from a corpus, a text file or an .npz file, and the source's name.

    Args:
        corpus: Corpus of `corpora`, used if neither `file` nor `tokens` is given.
        file: A text file.
        tokens: An .npz file of token ids.
        prefix: Tokens of the compressed prefix.
        rest: Tokens of the continuation.
        samples: Number of texts.
        endless: Whether texts may exceed the model's context.

    Raises:
        ValueError: A number is below 1, texts exceed the context, or the model has no tokenizer.
    """
    if prefix < 1 or rest < 1 or samples < 1:
        raise ValueError(f"prefix={prefix}, continue={rest}, samples={samples}: each must be 1 or more")
    if not endless and prefix + rest > params.config.context:
        raise ValueError(
            f"prefix and continuation are {prefix + rest} tokens, and the model's context is {params.config.context}: "
            "make one of them shorter"
        )
    if tokens is not None:
        return corpora.tokens(tokens, params.config.vocab, prefix + rest)[:samples], tokens.name
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer: give --tokens FILE.npz")
    ids = params.tokenizer.encode(corpora.text(str(file) if file else corpus))
    return corpora.windows(ids, prefix + rest, samples, seed), file.name if file else corpus


def perplexity(s: Setting, ids: np.ndarray, source: str, prefix: int, frozen: bool, say: Say) -> Results:
    """Measure the perplexity of the continuation of a compressed prefix, one row per cache.

    Args:
        s: Shared settings.
        ids: i32[samples, prefix + continuation].
        source: Name of the texts.
        prefix: Tokens of the prefix.
        frozen: Whether nothing is compressed after the prefix.
        say: Progress callback.
    """
    how = {"prefix": prefix, "continue": ids.shape[1] - prefix, "samples": len(ids), "frozen": frozen}
    found = s.results("ppl", [ids.tobytes()], source=source, **how)
    prefills = Prefills(limit=LIMIT if len(s.caches) > 1 else 0)
    about = quality_eval.Texts(ids, prefix, frozen, s.batch, prefills)
    s.each(found, say, [{"task": f"ppl/{source}"}], lambda config, _: quality_eval.perplexity(s.params, config, about))
    return found


def endless(s: Setting, ids: np.ndarray, source: str, points: int, prefix: int, rest: int, say: Say) -> Results:
    """Measure a text beyond the model's context, one row per cache and place; see `quality.endless`.

    Args:
        ids: i32[T], the text.
        points: Number of evenly spaced places.
        prefix: Tokens prefilled before the first place.
        rest: Tokens predicted at each place.

    Raises:
        ValueError: The text is too short, or a cache does not support texts beyond the context.
    """
    if points < 2 or len(ids) < prefix + points * rest:
        raise ValueError(
            f"{len(ids)} tokens, of which the first {prefix} are read before {points} places of {rest}: two places or "
            "more, and more tokens than that"
        )
    for cache in s.caches:
        if not parse(cache).unlimited:
            raise ValueError(f"{cache} holds true positions, or everything: give a cache such as streaming(budget=512)")
    found = s.results("endless", [ids.tobytes()], source=source, prefix=prefix, **{"continue": rest})
    ends = np.linspace(prefix, len(ids) - rest, points).astype(int).tolist()
    for cache in s.caches:
        keys = [{"cache": cache, "task": f"endless/{source}", "after": end} for end in ends]
        if all(found.find(**key) for key in keys):  # all or none: a later place needs the text before it
            continue
        for key, row in zip(keys, quality_eval.endless(s.params, parse(cache), ids, ends, prefix, rest), strict=True):
            if found.find(**key) is None:
                found.add(key | row)
            say(f"{cache} after {key['after']:,}")
        forget()
    return found


def fidelity(s: Setting, ids: np.ndarray, source: str, prefix: int, frozen: bool, layers: bool, say: Say) -> Results:
    """Measure the distance of next-token distributions from the full cache's, one row per cache.

    Args:
        ids: i32[samples, prefix + continuation].
        frozen: Whether nothing is compressed after the prefix.
        layers: Whether to measure each layer's compression alone too.
    """
    how = {"prefix": prefix, "continue": ids.shape[1] - prefix, "samples": len(ids), "frozen": frozen}
    found = s.results("fidelity", [ids.tobytes()], source=source, layers=layers, **how)
    key = {"task": f"fidelity/{source}"}
    if all(found.find(cache=cache, **key) for cache in s.caches):
        return found
    beside = quality_eval.Fidelity(s.params, quality_eval.Texts(ids, prefix, frozen, s.batch))
    s.each(found, say, [key], lambda config, _: beside(config, layers))
    return found


def codecs(s: Setting, ids: np.ndarray, source: str, prefix: int, layers: bool, say: Say) -> Results:
    """Measure the codec error, one row per cache; see `codec_error`.

    Args:
        ids: i32[samples, prefix + continuation].
        layers: Whether to measure each layer's codec alone too.
    """
    how = {
        "prefix": prefix,
        "continue": ids.shape[1] - prefix,
        "samples": len(ids),
        **({"layers": True} if layers else {}),
    }
    found = s.results("codecs", [ids.tobytes()], source=source, **how)
    key = {"task": f"codecs/{source}"}
    if not all(found.find(cache=cache, **key) for cache in s.caches):
        beside = Codecs(s.params, ids, prefix)
        s.each(found, say, [key], lambda config, _: beside(config) | (beside.by_layer(config) if layers else {}))
    return found


def spare(s: Setting, ids: np.ndarray, source: str, prefix: int, say: Say) -> Results:
    """Measure how far quantization moves each layer's output, and name the outlier layers, one row per cache.

    See `codec_error.Codecs.moved`.
    """
    how = {"prefix": prefix, "continue": ids.shape[1] - prefix, "samples": len(ids)}
    found = s.results("spare", [ids.tobytes()], source=source, **how)
    key = {"task": f"spare/{source}"}
    if not all(found.find(cache=cache, **key) for cache in s.caches):
        beside = Codecs(s.params, ids, prefix)

        def run(config: Any, _: dict[str, Any]) -> dict[str, Any]:
            costs = beside.moved(config)
            out = outlying(costs)
            return {"moved": costs, "spare": out and sorted({*config.exact_layers, *out})}

        s.each(found, say, [key], run)
    return found


def attention(s: Setting, ids: np.ndarray, source: str, prefix: int, spared: int, say: Say) -> Results:
    """Measure the share of the full model's attention that decode steps read, one row per cache.

    `recovered` is the mean over the layers from `spared` on, because selectors leave earlier layers whole; `by_layer`
    has all layers; `tokens_read` is the mean number of tokens read.

    Raises:
        ValueError: A cache skips prompt tokens in prefill, so that attention cannot be compared by token.
    """
    how = {"prefix": prefix, "continue": ids.shape[1] - prefix, "samples": len(ids), "spared": spared}
    found, prefill = s.results("attention", [ids.tobytes()], source=source, **how), Prefills()

    def run(config: Any, _: dict[str, Any]) -> dict[str, Any]:
        shares, tokens = [], []
        if config.prefill.traits.skips:
            raise ValueError(
                f"{config} reads a prompt as fewer tokens, at other places than the full model: their attention cannot "
                "be compared token by token; jkv eval fidelity and its tasks take it"
            )
        for rows, count in quality_eval.batches(len(ids), s.batch):
            cache = prefill(s.params, config, ids[rows][:, :prefix], ids.shape[1] - prefix)[0]
            share, read = recovered(s.params, cache, ids[rows])
            shares.append(share[:, :, :count])
            tokens.append(read)
        by_layer = np.concatenate(shares, 2).mean((1, 2, 3), dtype=float)
        return {
            "recovered": round(float(by_layer[spared:].mean()), 4),
            "by_layer": by_layer.round(4).tolist(),
            "tokens_read": round(float(np.mean(tokens)), 1),
        }

    s.each(found, say, [{"task": f"attention/{source}"}], run)
    return found


def picks(s: Setting, ids: np.ndarray, source: str, prefix: int, spared: int, say: Say) -> Results:
    """Measure the attention recall of a cache's selector on a full cache, one row per cache.

    The share of the full model's attention in what the selector picks; see `selector_recall.recovered`.

    Args:
        ids: i32[samples, prefix + continuation]; the tokens after `prefix` query it.
        spared: Layers that the selector leaves whole.

    Raises:
        ValueError: A cache has no selector, or `prefix` is shorter than its recent window and a page.
    """
    how = {"prefix": prefix, "continue": ids.shape[1] - prefix, "samples": len(ids), "spared": spared}
    found = s.results("picks", [ids.tobytes()], source=source, **how)
    late = jnp.arange(prefix, ids.shape[1])
    held: dict[int, list[list[Any]]] = {}

    def run(config: Any, _: dict[str, Any]) -> dict[str, Any]:
        if config.select is None:
            raise ValueError(f"{config} has no selector: its steps read everything; see jkv eval attention")
        old = prefix - config.recent
        if old < config.select.unit:
            raise ValueError(
                f"{config}: of {prefix} tokens {config.recent} are recent; raise --prefix, or lower recent="
            )
        if old not in held:
            held.clear()
            held[old] = [layer_queries(s.params, jnp.asarray(row[None]), late, old) for row in ids]
        each = [of_picks(s.params, config.bound(s.params).select, layers, spared) for layers in held[old]]
        return {name: np.mean([x[name] for x in each], 0).round(4).tolist() for name in each[0]}

    s.each(found, say, [{"task": f"picks/{source}"}], run)
    return found


def count(params: Params, turns: int = 1) -> Callable[[str], int]:
    """Return a token counter for task texts, including what the chat template adds for `turns` questions."""
    tokenizer = params.tokenizer
    if tokenizer is None:
        raise ValueError("tasks need a tokenizer: this model was built without one")
    extra = turns * quality_eval.overhead(params)
    return lambda text: len(tokenizer.encode(text)) + extra


def _rows(made: dict[str, list[Example]], seen: Sequence[bool]) -> list[dict[str, Any]]:
    return [{"task": name, "question": "seen" if x else "unseen"} for name in made for x in seen]


def _asked(
    s: Setting,
    found: Results,
    made: dict[str, list[Example]],
    row: Callable[[str], tasks.Task],
    say: Say,
    seen: Sequence[bool],
) -> Results:
    """Generate and score the answers of each task.

    Args:
        made: Examples by task name.
        row: Returns the `Task` of a name in `made`.
        seen: Question modes: True compresses the question with the context, False only the context.
    """
    prompts = {name: [quality_eval.cut(s.params, e) for e in examples] for name, examples in made.items()}

    def run(config: Any, key: dict[str, Any]) -> dict[str, Any]:
        task, aware = row(key["task"]), key["question"] == "seen"
        answers, cost = quality_eval.answer(s.params, config, prompts[key["task"]], task.new, aware, s.batch)
        got = [task.score(text, e.answers) for text, e in zip(answers, made[key["task"]], strict=True)]
        about = {"score": round(float(np.mean(got)), 4), "samples": len(got)}
        return {**about, **vars(quality_eval.mean(cost)), "said": answers}

    s.each(found, say, _rows(made, seen), run)
    return found


def drawn(s: Setting, names: Sequence[str], length: int, samples: int) -> dict[str, list[Example]]:
    """Draw the prompts of RULER tasks, keyed by their name in result files."""
    counted, rows = count(s.params), [tasks.find(tasks.TASKS, name) for name in names]
    return {f"{row.suite}/{row.name}": tasks.examples(row.name, length, samples, s.seed, counted) for row in rows}


def ruler(
    s: Setting, made: dict[str, list[Example]], length: int, samples: int, seen: Sequence[bool], say: Say
) -> Results:
    """Measure RULER tasks drawn by `drawn`, one row per cache, task and question mode."""
    prompts = [e.prompt for examples in made.values() for e in examples]
    found = s.results("ruler", prompts, length=length, samples=samples)
    return _asked(s, found, made, lambda name: tasks.TASKS[name.split("/")[1]], say, seen)


def needle(
    s: Setting, lengths: Sequence[int], depths: Sequence[float], samples: int, seen: Sequence[bool], say: Say
) -> Results:
    """Measure the needle-in-a-haystack test, one row per cache, length, depth and question mode."""
    counted = count(s.params)
    made = {
        f"niah/{n}/{depth:.2f}": tasks.draw(
            f"niah {n} {depth}",
            lambda rng, n, c, depth=depth: niah.needle(rng, n, depth, c),
            n,
            samples,
            s.seed,
            counted,
        )
        for n in lengths
        for depth in depths
    }
    prompts = [e.prompt for examples in made.values() for e in examples]
    found = s.results("niah", prompts, lengths=list(lengths), depths=list(depths), samples=samples)
    return _asked(s, found, made, lambda _: tasks.TASKS["niah"], say, seen)


def context(params: Params, names: Sequence[str], length: int, samples: int, seed: int) -> int:
    """Return the mean tokens of the sessions' contexts without questions, which budgets are fractions of."""
    counted = count(params, scbench.TURNS + 1)
    made = [x for n in names for x in scbench.sessions(n, length, samples, seed, counted)]
    return round(float(np.mean([len(quality_eval.cut(params, x.turns[0])[0]) for x in made])))


def multiturn(s: Setting, names: Sequence[str], length: int, samples: int, modes: Sequence[str], say: Say) -> Results:
    """Measure multi-turn sessions, one row per cache, session and mode; see `quality.converse`."""
    counted = count(s.params, scbench.TURNS + 1)
    made = {n: scbench.sessions(n, length, samples, s.seed, counted) for n in names}
    found = s.results("multiturn", [x.text for some in made.values() for x in some], length=length, samples=samples)
    rows = [
        {"task": f"multiturn/{n}", "mode": mode, "ability": scbench.SESSIONS[n].ability}
        for n in names
        for mode in modes
    ]

    def run(config: Any, key: dict[str, Any]) -> dict[str, Any]:
        task = scbench.SESSIONS[key["task"].split("/")[1]]
        got, honest, cost = [], [], []
        for session in made[task.name]:
            # All turns of a session, then its probe.
            *answers, last = (
                found := quality_eval.converse(s.params, config, session, task.new, key["mode"], s.batch)
            )[0]
            cost.append(found[1])
            got.append([task.score(text, e.answers) for text, e in zip(answers, session.turns, strict=True)])
            honest.append(quality_eval.honest(session, last))
        by_turn = np.mean(got, 0)
        return {
            "question": "seen" if key["mode"] == "rebuilt" else "unseen",
            "score": round(float(by_turn.mean()), 4),
            "by_turn": by_turn.round(4).tolist(),
            "honest": round(float(np.mean(honest)), 4),
            "samples": len(got),
            "answers": len(got) * len(by_turn),
            **vars(quality_eval.mean(cost)),
        }

    s.each(found, say, rows, run)
    return found


def reuse(s: Setting, name: str, renews: Sequence[str], samples: int, length: int, timed: bool, say: Say) -> Results:
    """Measure chunk reuse on a test set of `chunk_reuse.BEDS`.

    Args:
        name: Name of the test set.
        renews: Recompute policies.
        samples: Number of prompts.
        length: Tokens of a passage.
        timed: Whether to measure the time to the first logits, one row per cache and policy, instead of the quality,
            one row per prompt, cache and policy.
    """
    bed = BEDS[name](s.params, samples, length, s.seed)
    ids = [np.asarray(x.ids, np.int32).tobytes() for x in bed]
    more = {"prefix": round(prefix_tokens(bed) / sum(len(x.ids) for x in bed.measured), 4)} if bed.shared else {}
    found = s.results("reuse", ids, bed=name, length=length, samples=samples, timed=timed, **more)
    configs, task = [parse(x) for x in s.caches], {"task": f"reuse/{name}"}
    rows = [(config, renew) for config in configs for renew in (WHOLE, *renews)]
    # Latency.
    if timed:
        for config, renew in rows:
            key = {"cache": str(config), **task, "renew": renew}
            if found.find(**key) is None:
                ms = times(s.params, bed, config, renew)
                found.add({**key, "first_ms": round(float(np.median(ms)), 1), "samples": len(ms)})
            say(f"{config} {renew}")
        return found
    # Quality, without the prompts that are measured already.
    done = [
        i
        for i in range(len(bed.asked))
        if all(found.find(cache=str(config), renew=renew, prompt=i, **task) for config, renew in rows)
    ]
    for i, cache, renew, row in quality(s.params, bed, configs, renews, done):
        key = {"cache": cache, **task, "renew": renew, "prompt": i}
        if found.find(**key) is None:
            found.add(key | row)
        say(f"{cache} {renew}, prompt {i}")
    if name == "agents" and found.find(task="reuse/drift") is None:
        found.add({"cache": "full", "task": "reuse/drift", "by_layer": drift(s.params, bed)})
    return found
