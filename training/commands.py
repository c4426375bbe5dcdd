"""The methods of `jkv train`: each loads texts, runs a recipe and writes a folder of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.eval import quality
from jkv.eval.results import digest
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.safetensors import write_folder
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.eviction import attention_gate as gated_score
from jkv.methods.eviction import dms as dms_score
from jkv.methods.eviction.author_gates import Repeated
from jkv.methods.eviction.trained_gates import Foreseen, Outlook, Retention
from jkv.methods.eviction.utility import Utility
from jkv.methods.merging import lococo as blends
from jkv.methods.prefill.s3attention import Featured
from jkv.methods.selection.attention_predictor import Forecast
from jkv.models import FAMILIES, Params
from jkv.models.weights.params import disassemble
from jkv.nn.gates import AttentionGate, Estimate, EvictionSwitch, RetentionGate
from jkv.nn.mixtures import Blend
from jkv.speculative import redrafter
from jkv.training.checkpoints import Folder
from jkv.training.data import corpora as data
from jkv.training.distillation import kl
from jkv.training.losses import Batch
from jkv.training.recipes import (
    attention_gate,
    attention_predictor,
)
from jkv.training.recipes import (
    dms as dms_recipe,
)
from jkv.training.recipes import (
    kvzap as kvzap_recipe,
)
from jkv.training.recipes import (
    lococo as lococo_recipe,
)
from jkv.training.recipes import (
    locret as locret_recipe,
)
from jkv.training.recipes import redrafter as drafters
from jkv.training.recipes import s3attention as features_of
from jkv.training.recipes import (
    trimkv as trimkv_recipe,
)
from jkv.training.recipes import (
    utility as utility_recipe,
)
from jkv.training.recipes import xecomla as latents
from jkv.training.resumable_search import Measured
from jkv.training.trainer import Training
from jkv.utils import console
from jkv.utils.validation import read_bytes

METHODS: dict[str, Callable[..., None]] = {}
LOOKS = 4  # attention heads of Attention-Gate's gate


def method(run: Callable[..., None]) -> Callable[..., None]:
    """Register the training of a method under the function's name."""
    METHODS[run.__name__] = run
    return run


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings that all methods share.

    Attributes:
        name: Name of the method.
        model: Name of the model.
        params: The model.
        corpora: Names of the corpora, "tasks", "lookups" or "asks".
        texts: Number of texts.
        length: Tokens per text.
        check: Number of held-back texts to evaluate on; 0 for no evaluation.
        seed: Random seed.
        out: Folder of the run and the weights.
        resume: Whether to resume the run in that folder.
        start: Folder of weights to start from, or None.
    """

    name: str
    model: str
    params: Params
    corpora: tuple[str, ...]
    texts: int
    length: int
    check: int
    seed: int
    out: Path
    resume: bool
    start: Path | None = None

    def begun(self, score: Any) -> Any:
        """Return the score with the weights to start from, if any; raises as `trained_weights.trained` and `check`."""
        if self.start is not None:
            score = trained_weights.trained(self.start, score)
            trained_weights.check(score.models, self.params)
        return score

    def given(self) -> tuple[Batch, tuple[np.ndarray, str] | None]:
        """Load the training texts and the held-back texts with their source.

        Raises ValueError, before anything is written, if the model cannot be trained or the two sets overlap.
        """
        if self.params.config.mixers is not None:
            raise ValueError(f"{self.model} has blocks that recur, and training takes models that only attend")
        if "sinks" in self.params.layers[0]:
            raise ValueError(f"{self.model} has sinks in its softmax, and training takes models without")
        made = data.texts(self.params, self.corpora, self.length, self.texts, self.seed)
        if not self.check:
            return made, None
        held, source = data.held_back(self.params, self.corpora[0], self.length, self.check, self.seed)
        if (share := data.in_common(made, held)) > data.MOST:
            raise ValueError(
                f"{share:.0%} of {source}, which is held back to measure on, is in the texts to train on: leave out "
                "the --corpus that has it, or measure nothing, with --check 0"
            )
        return made, (held, source)

    def what(self, made: Batch, recipe: Any, **more: Any) -> dict[str, Any]:
        """Collect everything that the result depends on, except the checkpoint interval.

        Args:
            made: The training texts.
            recipe: The recipe.
            **more: Settings of the method.
        """
        return {
            "method": self.name,
            "model": trained_weights.identities(self.params)[0],
            "dtype": str(self.params.embed.dtype),
            "corpora": list(self.corpora),
            "texts": [self.texts, self.length, digest([jax.device_get(made.ids).tobytes()])],
            **more,
            "recipe": {k: v for k, v in asdict(recipe).items() if k != "every"},
        }

    def card(self, what: dict[str, Any], folder: Folder) -> dict[str, Any]:
        named = {"name": self.model, "model": trained_weights.identities(self.params)}
        return what | named | {"losses": (folder.metrics() or [{}])[-1]}


@method
def trimkv(run: Run, *, width: int, **chosen: Any) -> None:
    """Train TRIM-KV's retention gates."""
    recipe = trimkv_recipe.Recipe(**chosen, seed=run.seed)
    offset = math.log(run.length if recipe.warm else 10 * run.length)  # beta^length = e^-1, or e^-0.1 without warm
    gate = RetentionGate.start(run.params.config, width, jax.random.key(recipe.seed), offset=offset)
    gated(run, recipe, Retention(gate=gate), recipe.budget, width)


@method
def makeeach(run: Run, *, width: int, **chosen: Any) -> None:
    """Train retention gates whose layers and heads compete for one budget (Make Each Token Count)."""
    recipe = trimkv_recipe.Together(**chosen, warm=0, seed=run.seed)
    gate = trimkv_recipe.start_tied(run.params.config, width, math.log(10 * run.length), jax.random.key(recipe.seed))
    score = Outlook(gate=gate)
    if not trimkv_recipe.is_tied(run.begun(score).gate):
        raise ValueError(
            f"{run.start}: the last products of its gates differ from layer to layer, and makeeach trains one for all "
            "layers: begin without --start, or go on by `jkv train trimkv --start`, whose gates makeeach takes too"
        )
    gated(run, recipe, score, recipe.budget, width)


@method
def locret(run: Run, *, width: int, budget: int, **chosen: Any) -> None:
    """Train Locret's heads, which predict the attention of an answer."""
    recipe = locret_recipe.Recipe(**chosen, seed=run.seed)
    gate = Estimate.start(run.params.config, width, jax.random.key(recipe.seed))
    gated(run, recipe, Foreseen(gate=gate), budget, width, f", local={min(100, budget // 2)}")


@method
def lococo(run: Run, *, width: int, **chosen: Any) -> None:
    """Train LoCoCo's mixtures of evicted tokens, half of the cache's budget."""
    recipe = lococo_recipe.Recipe(**chosen, seed=run.seed)
    if not width % 2 or not 2 <= recipe.budget <= recipe.chunk:
        raise ValueError(
            f"width={width}, budget={recipe.budget}, chunk={recipe.chunk}: an odd number of entries, 2 tokens or more, "
            "and pieces of no fewer"
        )
    gate = Blend.start(run.params.config, recipe.budget // 2, width, jax.random.key(recipe.seed))
    gated(run, recipe, blends.Mixtures(gate=gate), recipe.budget, width, f", chunk={recipe.chunk}")


def gated(run: Run, recipe: Any, score: Any, budget: int, width: int, settings: str = "") -> None:
    """Train a score and measure its cache against a streaming cache at the same budget.

    Args:
        run: Shared settings.
        recipe: The recipe.
        score: The score before training.
        budget: Tokens of the measured caches.
        width: Width of the gate.
        settings: More settings of the trained method's cache, as text.
    """
    own = f"{run.name}(budget={budget}, gate={str(run.out)!r}{settings})"
    caches = ("full", f"streaming(budget={budget})", own)
    fitted(run, recipe, score, caches, {"width": width}, {"budget": budget})


def fitted(
    run: Run,
    recipe: Any,
    score: Any,
    caches: tuple[str, ...],
    more: dict[str, Any] | None = None,
    about: dict[str, Any] | None = None,
) -> None:
    """Train a score's gate, write it, and measure perplexity through caches.

    Args:
        run: Shared settings.
        recipe: The recipe.
        score: The score before training.
        caches: Caches to measure; the last one is the trained method.
        more: Settings that the result depends on, beside the recipe.
        about: Settings of the measurement, for the card.
    """
    score = run.begun(score)
    made, held = run.given()
    for known in caches[:-1] if run.check else ():  # fail before hours of work
        check(parse(known), run.params.config)
    begun = {}
    if run.start is not None:
        begun["start"] = digest([np.asarray(x).tobytes() for x in jax.tree.leaves(score)])
    what = run.what(made, recipe, **begun, **(more or {}))
    # Train, or resume.
    with Folder(run.out, what, run.resume) as folder:
        with console.progress((run.params.config.layers if recipe.warm else 0) + recipe.steps) as say:
            score = Training(run.params, made, recipe, folder, say).run(score).score
        # Write the weights before they are measured.
        with console.status("what came of it"):
            arrays = recipe.finished(run.params, made, score).gate.arrays
        card = run.card(what, folder)
        trained_weights.write(run.out, arrays, card)
        print(f"learned: {run.out}\ndrawn: {folder.draw()}")
        if held is not None:
            unseen = Batch(ids=jnp.asarray(held[0]), pos=jnp.asarray(np.indices(held[0].shape, np.int32)[1]))
            card["eval"] = (about or {}) | recipe.explained(run.params, unseen, score)
            card["eval"] |= perplexities(run.params, held, caches)
            trained_weights.write(run.out, arrays, card)


def perplexities(params: Params, held: tuple[np.ndarray, str], caches: tuple[str, ...]) -> dict[str, Any]:
    """Measure the perplexity of the last eighth of held-back texts through each cache, as `jkv eval ppl` does.

    Args:
        params: The model.
        held: Token ids i32[n,T], and their source.
        caches: The caches, as text.
    """
    (ids, source), found = held, {}
    about = quality.Texts(ids, ids.shape[1] * 7 // 8)
    for cache in caches:
        name = cache.partition("(")[0]
        found[name] = quality.perplexity(params, parse(cache), about)["ppl"]
        print(f"{source}, {name}: perplexity {found[name]}")
    return {"source": source, "samples": len(ids), "prefix": about.prefix, "ppl": found}


@method
def dms(run: Run, **chosen: Any) -> None:
    """Train DMS's gates of delayed eviction."""
    recipe = dms_recipe.Recipe(**chosen, seed=run.seed)
    score = dms_score.Delayed(window=recipe.window, gate=EvictionSwitch.start(run.params.config))
    own = f"dms(keep=1.0, window={recipe.window}, gate={str(run.out)!r})"
    fitted(run, recipe, score, ("full", own))


@method
def attentiongate(run: Run, *, width: int, **chosen: Any) -> None:
    """Train Attention-Gate's flags, which see the whole prompt."""
    recipe = attention_gate.Recipe(**chosen, seed=run.seed)
    if not 0 < recipe.share <= 1 or recipe.price <= 0:
        raise ValueError(
            f"share={recipe.share}, price={recipe.price}: the share of a prompt's tokens that is to stay, above 0 and "
            "at most 1, and what they cost, above 0"
        )
    offset = 0.5 if recipe.warm else 2.0  # layer-wise training moves the gates farther
    gate = AttentionGate.start(run.params.config, LOOKS, width, offset, jax.random.key(recipe.seed))
    own = f"attentiongate(keep=1.0, gate={str(run.out)!r})"
    fitted(run, recipe, gated_score.Gated(gate=gate), ("full", own), {"width": width})


@method
def kvzap(run: Run, *, budget: int, **chosen: Any) -> None:
    """Train KVzap's surrogates of the attention in a repetition of the text."""
    recipe = kvzap_recipe.Recipe(**chosen, seed=run.seed).checked(run.length)
    kvzap_recipe.request(run.params, run.length)  # raises for texts too long to repeat, before hours of work
    gate = kvzap_recipe.start(run.params.config, recipe.width, jax.random.key(recipe.seed))
    gated(run, recipe, Repeated(gate=gate), budget, recipe.width)


@method
def utility(run: Run, *, foreseen: Path | None, fading: Path | None, budget: int, **chosen: Any) -> None:
    """Train the weights that combine KVzap's and TRIM-KV's gates in one contest of all layers and heads."""
    recipe = utility_recipe.Recipe(**chosen, seed=run.seed).checked(run.length)
    score, more = Utility(), {}
    if run.start is not None and (foreseen or fading):
        raise ValueError("--start has both gates: leave out --foreseen and --fading")
    if run.start is None:
        score = Utility(gate=utility_recipe.starting_gates(run.params, foreseen, fading))
        more = {"gates": digest([np.asarray(x).tobytes() for x in jax.tree.leaves(score)])}
    own = f"utility(budget={budget}, window={recipe.window}, gate={str(run.out)!r})"
    fitted(run, recipe, score, ("full", f"streaming(budget={budget})", own), more, {"budget": budget})


@method
def s3attention(run: Run, *, layer: list[int] | None, features: int, active: int, **chosen: Any) -> None:
    """Train S3-Attention's sparse feature dictionaries of a few layers' keys and queries."""
    depth = run.params.config.layers
    layers = tuple(sorted(set(layer or (0, depth // 6, depth // 5))))
    if not 0 <= layers[0] <= layers[-1] < depth or not active <= features:
        raise ValueError(
            f"layer={list(layers)}, features={features}, active={active}: of 0 to {depth - 1}, and no more of a token "
            "than there are"
        )
    recipe = features_of.Recipe(**chosen, layers=layers, seed=run.seed)
    made, _ = run.given()
    gate = features_of.start(run.params, made, layers, features, active, jax.random.key(recipe.seed))
    window = max(min(64, run.length // 8), 1)
    tokens = max(run.length // 4, 2 * window)
    own = f"s3attention(tokens={tokens}, window={window}, span={min(32, window)}, gate={str(run.out)!r})"
    more = {"features": features, "active": active}
    fitted(run, recipe, Featured(tokens=tokens, gate=gate), ("full", own), more, {"tokens": tokens})


@method
def attentionpredictor(run: Run, *, page: int, **chosen: Any) -> None:
    """Train AttentionPredictor's network and fit its linear baseline."""
    recipe, select = attention_predictor.Recipe(**chosen, seed=run.seed), Forecast(unit=page)
    made, held = run.given()
    attention_predictor.check(run.params, made, select, recipe)
    what = run.what(made, recipe, page=page)
    with Folder(run.out, what, run.resume) as folder:
        # Training data from the frozen model, the baseline, then the network.
        every = gathered(run.params, made, select, recipe)
        line = attention_predictor.least_squares(every)
        with console.progress(recipe.steps) as say:
            net = attention_predictor.Training(every, line, recipe, folder, say).run()
        card = run.card(what, folder)
        arrays = vars(net) | {attention_predictor.BASELINE: line.weights}
        trained_weights.write(run.out, arrays, card)
        print(f"learned: {run.out}\ndrawn: {folder.draw()}")
        if held is not None:
            # Share of the next query's attention in the highest ranked pages, for each kind of rank.
            ids, source = jnp.asarray(held[0]), held[1]
            pos = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
            unseen, ranks = gathered(
                run.params,
                Batch(ids=ids, pos=pos),
                select,
                recipe,
                lambda *seen: (attention_predictor.moments(*seen), attention_predictor.others(*seen)),
            )
            ranks |= {
                kind: attention_predictor.forecast(of, jnp.asarray(unseen.x), jnp.asarray(unseen.use))
                for kind, of in ((attention_predictor.BASELINE, line), ("conv", net))
            } | {"best": unseen.mass}
            shares = {
                kind: {
                    pages: round(float(attention_predictor.recovered(rank, unseen, pages)), 4)
                    for pages in (4, 8, 16, 32)
                }
                for kind, rank in ranks.items()
            }
            card["eval"] = {"source": source, "samples": len(ids), "recovered": shares}
            trained_weights.write(run.out, arrays, card)
            print(f"{source}, share of the next query's attention in so many pages: {shares}")


@method
def drafter(run: Run, *, bytes: str, words: int, prompt: int, temperature: float, **chosen: Any) -> None:
    """Train a small network that drafts tokens for this model."""
    recipe = drafters.Recipe(**chosen, seed=run.seed)
    if not 0 <= prompt < run.length or temperature < 0:
        raise ValueError(
            f"prompt={prompt}, length={run.length}, temperature={temperature}: tokens to begin with (0: all), a longer "
            "text, and a temperature of 0 or more"
        )
    if recipe.ahead >= run.length:
        raise ValueError(f"ahead={recipe.ahead}, length={run.length}: give a longer text, or fewer tokens ahead")
    # The network's size follows from its bytes.
    size, width = min(words, run.params.config.vocab), run.params.config.width
    inner = drafters.inner(width, read_bytes(bytes), size)
    texts, held = run.given()
    begun = drafters.cut(texts, prompt)
    own = {"bytes": bytes, "words": words, "width": inner, "prompt": prompt, "temperature": temperature}
    what = run.what(texts, recipe, **own)
    with Folder(run.out, what, run.resume) as folder:
        # Let the model continue the texts, or load what it has continued before.
        said = ("model", "dtype", "texts", "prompt", "temperature")
        kept = Measured(folder.path / "continued.json", {k: what[k] for k in said} | {"seed": run.seed})
        with console.progress(len(drafters.pieces(begun))) as say:
            texts = drafters.continued(run.params, begun, temperature, run.seed, kept, say)
        # Train on the commonest words.
        known = drafters.commonest(texts, run.params.config.vocab, size)
        ends = redrafter.ends(run.params, known)
        with console.progress(recipe.steps) as say:
            made = drafters.Guessing(ends.bare, texts, recipe, folder, say, model=run.params, ends=ends)
            net = made.run(drafters.start(width, inner, run.seed)).score
        card = run.card(what, folder) | {"tokens": int((np.asarray(texts.ids) >= 0).sum())}
        arrays = redrafter.packed(net, known)
        trained_weights.write(run.out, arrays, card, redrafter.wide)
        print(f"learned: {run.out}\ndrawn: {folder.draw()}")
        if held is not None:
            card["eval"] = agreed(run, held, recipe.ahead)
            trained_weights.write(run.out, arrays, card, redrafter.wide)


def agreed(run: Run, held: tuple[np.ndarray, str], ahead: int) -> dict[str, Any]:
    """Measure how often the k-th draft token on held-back texts is what the model generates."""
    (ids, source), made = held, redrafter.Distilled(run.params, str(run.out))
    unseen = Batch(ids=jnp.asarray(ids), pos=jnp.asarray(np.indices(ids.shape, np.int32)[1]))
    found = drafters.agreement(run.params, made.net, made.ends, unseen, ahead)
    shares = ", ".join(f"{x:.1%}" for x in found["greedy"])
    print(f"{source}: of its first guesses, second ones and so on, so many are what the model says: {shares}")
    return {"source": source, "samples": len(ids), **found}


@method
def xecomla(run: Run, *, rank: int, rope_dim: int, query_rank: int, **chosen: Any) -> None:
    """Convert the model to latent keys and values, train it, and write a folder for `jkv.load`."""
    recipe = kl.Recipe(**chosen, seed=run.seed)
    config = latents.config_of(loading.read(run.model).config, rank, rope_dim, query_rank or None)
    student = latents.converted(run.params, config)
    texts, held = run.given()
    what = run.what(texts, recipe, rank=rank, rope_dim=rope_dim, query_rank=query_rank)
    with Folder(run.out, what, run.resume) as folder:
        bare, score = replace(student, layers=()), latents.trained(student)
        with console.progress(recipe.steps) as say:
            made = kl.Distilling(bare, texts, recipe, folder, say, model=run.params)
            student = kl.student_params(bare, made.run(score).score)
        tensors = disassemble(student, FAMILIES[student.config.family].TENSORS)
        write_folder(run.out, config, tensors, run.params.tokenizer)
        told = (
            f"{student.config.cached} numbers a token and layer, {run.params.config.heads * run.params.config.cached}"
        )
        print(f"model: {run.out} ({told} before)\ndrawn: {folder.draw()}")
        if held is not None:
            for params in (run.params, student):
                print(f"{params.config.family}:")
                perplexities(params, held, ("full",))


def gathered(params: Params, *given: Any) -> Any:
    """Concatenate the moments of all texts and layers, see `attention_predictor.collect`."""
    return jax.tree.map(lambda *x: np.concatenate(x), *attention_predictor.collect(params, *given))
