"""lm-evaluation-harness adapter: a model for `lm_eval.simple_evaluate` with a compressed cache, and receipts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.box import MARKDOWN
from rich.table import Table

from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache, layer_kept
from jkv.generation.api import extend, generate, prefill
from jkv.generation.arguments import composition, model
from jkv.generation.receipt import kept_by_row
from jkv.generation.score import followed
from jkv.io.fingerprint import fingerprint
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.tokenization import stop_ids_of
from jkv.utils import console
from jkv.utils.optional_deps import install

if TYPE_CHECKING:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]  an extra

ROOM = 64  # reserved tokens are rounded up to this, so that tasks share compiled programs
NEW = 256  # default of max_gen_toks


@dataclass
class Receipt:
    """What the cache held of the contexts of one task.

    Attributes:
        contexts: Contexts compressed, once each however many answers they have.
        answers: Answers scored or generated.
        seen: Tokens of all contexts, including generated ones.
        kept: Tokens of these that the cache held, averaged over layers and heads.
        touched: Contexts with something evicted, quantized or left unread, in the context or in an answer to it. 0
            means that the task never reached the budget.
        truncated: Contexts cut at the front to fit the model's context.
    """

    contexts: int = 0
    answers: int = 0
    seen: int = 0
    kept: float = 0.0
    touched: int = 0
    truncated: int = 0

    @property
    def used(self) -> bool:
        """Whether the compressed cache affected any answer."""
        return self.touched > 0


@dataclass(frozen=True)
class Context:
    """A tokenized context.

    Attributes:
        ids: Tokens that are compressed.
        later: Tokens that are read after compression: the question, if unseen.
        task: Name of the task.
    """

    ids: tuple[int, ...]
    later: tuple[int, ...]
    task: str


@dataclass
class Backend:
    """The three request types of lm-evaluation-harness, answered through a cache.

    Attributes:
        params: The model.
        config: The cache.
        batch: Contexts, and answers, per batch.
        chunk: Prefill chunk size.
        question: "seen" compresses a question with its context; "unseen" reads what follows the last `marker`
            afterwards.
        marker: Text that begins the question.
        receipts: Receipts by task.
    """

    params: Params
    config: CacheConfig
    batch: int
    chunk: int | None
    question: str
    marker: str
    receipts: dict[str, Receipt] = field(default_factory=dict)

    def tokens(self, text: str) -> list[int]:
        return self.params.tokenizer.encode(text)

    @property
    def start(self) -> int:
        """The token that represents an empty context."""
        first = self.params.tokenizer.bos_id
        begins = stop_ids_of(self.params) if first is None else (first,)
        if not begins:
            raise ValueError("an empty context is the token that texts begin or end with, and this model has neither")
        return begins[0]

    @narrow
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log p(continuation | context) in nats, whether it is the greedy continuation) per request."""
        pairs = [self._pair(*request.args, task=str(request.task_name)) for request in requests]
        return [(sum(p), greedy) for p, greedy in self._answered(pairs)]

    @narrow
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of whole texts in nats, in windows of the model's context.

        The first window follows the token of an empty context, each later one as many preceding tokens as fit.
        """
        pairs, whose, most = [], [], self.params.config.context
        for i, request in enumerate(requests):
            ids = self.params.tokenizer.within(request.args[0])
            for at in range(0, len(ids), most):
                window = ids[at : at + most]
                before = ids[at + len(window) - most - 1 : at] if at else [self.start]
                pairs.append((Context(tuple(before), (), str(request.task_name)), window))
                whose.append(i)
        out = [0.0] * len(requests)
        for i, (p, _) in zip(whose, self._answered(pairs), strict=True):
            out[i] += sum(p)
        return out

    @narrow
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate the text after each context, up to a stop string."""
        out = [""] * len(requests)
        ways = [_way(request.args[1]) for request in requests]
        contexts = []
        for request, way in zip(requests, ways, strict=True):
            whole = self._context(request.args[0], str(request.task_name))
            contexts.append(self._cut(whole, way["max_new_tokens"]))
            self._receipt(whole.task).truncated += contexts[-1] != whole
        # Batches share generation options and have contexts of similar length.
        order = sorted(range(len(requests)), key=lambda i: (repr(ways[i]), -len(contexts[i].ids)))
        with console.progress(len(order)) as say:
            while order:
                way = ways[order[0]]
                now = [i for i in order[: self.batch] if ways[i] == way]
                order = order[len(now) :]
                some = [contexts[i] for i in now]
                if self.question == "seen":
                    made = generate(self.params, self.config, [list(c.ids) for c in some], chunk=self.chunk, **way)
                    self._note(some, made.cache, [1] * len(some))
                else:
                    cache, _ = self._read(some, way["max_new_tokens"], [0] * len(some))
                    made = generate(self.params, cache, [list(c.later) for c in some], **way)
                    self._note(some, made.cache, [1] * len(some))
                for i, text in zip(now, made.text, strict=True):
                    out[i] = text
                    say(f"{len(text)} characters")
        return out

    def _pair(self, context: str, continuation: str, task: str) -> tuple[Context, list[int]]:
        """Tokenize a context and its continuation as the harness's other models do.

        Spaces at the border belong to the continuation. If a token spans the border, the continuation is tokenized
        alone. Raises ValueError for a continuation without tokens.
        """
        bare = context.rstrip()
        after = context[len(bare) :] + continuation
        own = self.params.tokenizer.within(after)
        if not own:
            raise ValueError(f"{task}: the continuation {continuation!r} has no token, so there is nothing to score")
        if not bare:
            begun = len(own) > 1 and own[0] == self.start
            return Context((self.start,), (), task), own[begun:]
        made = self._context(bare, task)
        return made, self.tokens(context + continuation)[len(made.ids) + len(made.later) :] or own

    def _context(self, text: str, task: str) -> Context:
        if self.question == "seen":
            return Context(tuple(self.tokens(text)), (), task)
        at = text.rfind(self.marker)
        if at < 1:
            raise ValueError(
                f"a context of {task} has no {self.marker!r} behind its beginning, so no question to leave unseen: "
                "give another marker=, or question='seen'"
            )
        ids, before = self.tokens(text), self.tokens(text[:at])
        same = next((i for i, (x, y) in enumerate(zip(ids, before, strict=False)) if x != y), len(before))
        return Context(tuple(ids[:same]), tuple(ids[same:]), task)

    def _cut(self, context: Context, after: int) -> Context:
        """Drop the start of a context if it and `after` more tokens exceed the model's context."""
        over = len(context.ids) + len(context.later) + after - self.params.config.context
        if over <= 0 or self.config.unlimited:
            return context
        if over >= len(context.ids):
            raise ValueError(f"{context.task}: {after} tokens after a context leave no room for it in the model's")
        return Context(context.ids[over:], context.later, context.task)

    def _receipt(self, task: str) -> Receipt:
        return self.receipts.setdefault(task, Receipt())

    def _read(self, contexts: list[Context], reserve: int, answers: Sequence[int]) -> tuple[Cache, Array]:
        """Prefill contexts, without the tokens that are read later.

        Args:
            reserve: Tokens to reserve after them.
            answers: Number of answers of each context, for the receipts.
        """
        later = max(len(c.later) for c in contexts)
        reserve = -(-max(reserve + later, 1) // ROOM) * ROOM
        if not self.config.unlimited:
            reserve = min(reserve, self.params.config.context - max(len(c.ids) for c in contexts))
        cache, logits = prefill(
            self.params, self.config, [list(c.ids) for c in contexts], reserve=reserve, chunk=self.chunk
        )
        self._note(contexts, cache, answers)
        return cache, logits

    def _note(self, contexts: list[Context], cache: Cache, answers: Sequence[int]) -> None:
        """Add what a cache holds of contexts to the receipts.

        Args:
            answers: Number of answers of each context; 0 marks a row that only fills the batch.
        """
        seen, kept = np.asarray(cache.seen), kept_by_row(cache)
        for i, (context, there) in enumerate(zip(contexts, touched(cache), strict=True)):
            if answers[i]:
                receipt = self._receipt(context.task)
                receipt.contexts += 1
                receipt.answers += answers[i]
                receipt.seen += int(seen[i])
                receipt.kept += float(kept[i])
                receipt.touched += bool(there)

    def _answered(self, pairs: list[tuple[Context, list[int]]]) -> list[tuple[list[float], bool]]:
        """Return the log-probabilities of each pair's continuation tokens, and whether they are greedy."""
        out: list[tuple[list[float], bool]] = [([], False)] * len(pairs)
        whose: dict[Context, list[int]] = {}
        for i, (context, ids) in enumerate(pairs):
            cut = self._cut(context, len(ids) - 1)  # the last one is predicted, and not read
            if cut not in whose and cut != context:
                self._receipt(cut.task).truncated += 1
            whose.setdefault(cut, []).append(i)
        # Batches of contexts that all have, or all lack, tokens to read later.
        order = sorted(whose, key=lambda c: -len(c.ids))
        parts = [c for c in order if c.later], [c for c in order if not c.later]
        batches = [part[i : i + self.batch] for part in parts for i in range(0, len(part), self.batch)]
        with console.progress(len(batches)) as say:
            for some in batches:
                rows = [(row, i) for row, context in enumerate(some) for i in whose[context]]
                reserve, counts = max(len(pairs[i][1]) for _, i in rows) - 1, [len(whose[c]) for c in some]
                filled = some + some[:1] * (self.batch - len(some))  # a constant batch size needs one program
                cache, logits = self._read(filled, reserve, counts + [0] * self.batch)
                reached = touched(cache)
                if some[0].later:
                    cache, logits = extend(self.params, cache, [list(c.later) for c in filled])
                # All answers of these contexts, a batch at a time.
                for at in range(0, len(rows), self.batch):
                    now = rows[at : at + self.batch]
                    full = now + now[:1] * (self.batch - len(now))
                    at_rows = jnp.asarray([row for row, _ in full])
                    ids = [pairs[i][1] for _, i in full]
                    found, after = followed(self.params, cache.pick(at_rows), logits[at_rows], ids)
                    for (row, i), answer, there in zip(now, found, touched(after), strict=False):
                        out[i] = answer
                        if there and not reached[row]:  # the budget was reached in the answer
                            reached[row] = True
                            self._receipt(some[row].task).touched += 1
                say(f"{len(rows)} answers")
        return out

    # Names that the harness expects.

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat as text without the begin token, which tokenization adds, as in the harness's other models."""
        return str(self.params.tokenizer.chat(chat_history, add_generation_prompt=add_generation_prompt))

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.params.tokenizer.template or ""

    @property
    def tokenizer_name(self) -> str:
        return fingerprint(self.params)

    def get_model_info(self) -> dict[str, Any]:
        return {"jkv": {"cache": str(self.config), "exactness": self.config.exactness, "question": self.question}}


def touched(cache: Cache) -> list[bool]:
    """Return per row whether any of its tokens was evicted, is quantized, or may be left unread.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> [touched(jkv.prefill(params, x, [[5, 6] * 30])[0]) for x in ("full", "int8", "snapkv(budget=40, window=8)")]
    [[False], [True], [True]]
    """
    out = np.zeros(cache.rows, bool)
    for layer, plan in zip(cache.layers, cache.plan, strict=True):
        out |= np.asarray((layer_kept(layer) < cache.seen[:, None]).any(1))
        for tier, config in zip(layer.tiers, plan.tiers, strict=True):
            if config.select is not None or not (config.k.exact and config.v.exact):
                out |= np.asarray((tier.pos >= 0).any((1, 2)))
    return out.tolist()


def _way(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the harness's generation options to those of `generate`; raises ValueError for an unknown one."""
    rest = dict(given)
    stop = rest.pop("until", ())
    draws = bool(rest.pop("do_sample", False))
    heat = float(rest.pop("temperature", 0.0))
    way: dict[str, Any] = {"max_new_tokens": int(rest.pop("max_gen_toks", NEW))}
    way["stop"] = tuple(x for x in ((stop,) if isinstance(stop, str) else stop or ()) if x)
    way["temperature"] = heat if draws else 0.0
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if name in rest:
            way[name] = rest.pop(name)
    if rest:
        raise ValueError(f"generation option {min(rest)!r} of a task is not known here")
    return way


def harness(
    params: Params,
    cache: str | CacheConfig | None = None,
    *,
    batch: int = 8,
    chunk: int | None = None,
    question: str = "seen",
    marker: str = "\nQuestion:",
) -> LM:
    """Build a model for `lm_eval.simple_evaluate(model=...)` that answers through a compressed cache.

    A context is compressed once for all of its answers. The model's `receipts` say by task what the cache held, and
    whether the task reached the budget at all.

    Args:
        params: The model.
        cache: The cache, as text or a config; None for the full cache.
        batch: Contexts, and answers, per batch.
        chunk: Prefill chunk size.
        question: "seen" compresses whole contexts, "unseen" only what precedes the last `marker`.
        marker: Text that begins the question of a context.

    Raises:
        ImportError: lm-evaluation-harness is not installed.
        ValueError: The model has no tokenizer, or an argument is invalid.
    """
    model(params)
    if params.tokenizer is None:
        raise ValueError("the harness's tasks are texts, and this model has no tokenizer")
    if question not in ("seen", "unseen"):
        raise ValueError(f"question={question!r}: seen or unseen")
    if batch < 1:
        raise ValueError(f"batch={batch}: rows at a time, 1 or more")
    try:
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]  an extra
    except ImportError as error:
        raise ImportError(f"lm-evaluation-harness is not installed; {install('lm-eval')}") from error
    made = type("Harness", (Backend, LM), {})
    own = made(params, composition(cache), batch, chunk, question, marker)
    LM.__init__(own)
    return own


def evaluated(lm: Any, tasks: Sequence[str], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `lm_eval.simple_evaluate`.

    Args:
        lm: A model from `harness`.
        tasks: Names of tasks.
        **options: Options of `simple_evaluate`, and `include`, a folder with more tasks.

    Returns:
        The results and the receipts, both by task.

    Raises:
        ValueError: A task does not exist.
    """
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]  an extra
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  an extra

    manager = TaskManager(include_path=options.pop("include", None))
    if missing := [name for name in tasks if name not in manager.all_tasks]:
        close = [name for name in manager.all_tasks if missing[0].split("_")[0] in name][:5]
        raise ValueError(
            f"no task {missing[0]!r} here; " + (f"such as: {', '.join(close)}" if close else "see lm_eval")
        )
    lm.receipts.clear()
    found = simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, log_samples=False, **options)
    assert found is not None
    return found["results"], {name: _said(lm.receipts.get(name, Receipt())) for name in found["results"]}


def _said(receipt: Receipt) -> dict[str, Any]:
    n = max(receipt.contexts, 1)
    shares = {"seen": round(receipt.seen / n, 1), "kept": round(receipt.kept / n, 1)}
    return vars(receipt) | shares | {"used": receipt.used}


def flagged(receipts: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Yield a warning for each task whose contexts never reached the budget."""
    for task, own in receipts.items():
        if own["contexts"] and not own["used"]:  # task groups have no contexts of their own
            yield f"{task}: its contexts ({own['seen']:g} tokens) never reached the budget, so this is the full cache"


def plain(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Extract a task's metrics by name, standard errors as NAME_stderr; filter names are dropped.

    >>> plain({"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1})
    {'acc': 0.5, 'acc_stderr': 0.1}
    """
    return {name.partition(",")[0]: float(x) for name, x in numbers.items() if isinstance(x, int | float)}


def version() -> str:
    """Return the version of lm-evaluation-harness, which results depend on."""
    from importlib import metadata

    return metadata.version("lm_eval")


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table with one line per cache, task and metric: value, standard error, and what the cache held."""
    out = Table(*("cache", "task", "metric", "value", "error", "tokens", "kept", "used"), box=MARKDOWN)
    for row in rows:
        own, metrics = row["receipt"], row["metrics"]
        held = f"{own['seen']:g}", f"{own['kept']:g}", "yes" if own["used"] else "no" if own["contexts"] else "-"
        for name, x in metrics.items():
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                out.add_row(row["cache"], row["task"], name, f"{x:.4f}", "" if error is None else f"{error:.4f}", *held)
    return out
