"""Tool Attention (2604.21816): a gate decides which tools' schemas a prompt holds, and their place what is read again.

python examples/tool_attention.py [--model NAME] [--turns 8] [--tools 40]

Three layouts: `published`, schemas in front of the history, where a change of tools spoils the beginning that turns
share; `last`, behind the history; `chunks`, in front, as passages (approximate). Prompt tokens, and rows prefilled, by
`jkv.PrefixCache` and `jkv.ChunkCache`. The paper's gate is MiniLM's; here it is any encoder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import jkv

Encoder = Callable[[Sequence[str]], np.ndarray]  # texts -> vectors f32[n,D]
LAYOUTS = ("published", "last", "chunks")


@dataclass(frozen=True)
class Tool:
    """needs: facts without which it cannot be called."""

    name: str
    summary: str
    schema: str
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Turn:
    """What the user says, the facts that hold by then, and what is answered."""

    says: str
    answer: str
    facts: frozenset[str] = frozenset()


class Gate:
    """The k tools whose summaries are nearest to a message: e_q . e_i >= theta, preconditions met, in the tools' order.

    None is near enough: the nearest one whose precondition is met. ValueError where there is none at all.
    """

    def __init__(self, tools: Sequence[Tool], encode: Encoder, theta: float = 0.28, k: int = 10) -> None:
        if not tools or k < 1:
            raise ValueError(f"{len(tools)} tools, k={k}: a gate chooses 1 or more of 1 or more tools")
        self.tools, self.encode, self.theta, self.k = list(tools), encode, theta, k
        self.vectors = unit(encode([x.summary for x in tools]))

    def active(self, message: str, facts: Iterable[str] = ()) -> list[Tool]:
        near, there = self.vectors @ unit(self.encode([message]))[0], {*facts}
        order = [i for i in np.argsort(-near, kind="stable") if self.tools[i].needs <= there]
        if not order:
            raise ValueError(f"no tool can be called with the facts {sorted(there)}: give one that needs none")
        some = [i for i in order if near[i] >= self.theta][: self.k] or order[:1]
        return [self.tools[i] for i in sorted(some)]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)


def embedding(params: Any, about: Sequence[str] = ()) -> Encoder:
    """The mean of the model's own embeddings of a text's tokens, less the mean of the texts `about`."""

    def mean(text: str) -> np.ndarray:
        return np.asarray(params.embed, np.float32)[params.tokenizer.within(text)].mean(0)

    common = np.mean([mean(x) for x in about], axis=0) if about else np.float32(0)
    return lambda texts: np.stack([mean(x) - common for x in texts])


def refusal(name: str, active: Sequence[Tool]) -> dict[str, Any] | None:
    """What a call of a tool that was not offered is answered, for the model to try again; None: it was."""
    names = [x.name for x in active]
    return None if name in names else {"error": "tool_not_active", "tool": name, "active": names}


def parts(layout: str, tools: Sequence[Tool], active: Sequence[Tool], history: Sequence[str], says: str) -> list[str]:
    """A prompt as texts: all summaries, the schemas of the active tools, the history and the message."""
    head = "You call tools.\n" + "".join(f"{x.name}: {x.summary}\n" for x in tools)
    schemas, last = [f"{x.schema}\n" for x in active], f"user: {says}\n"
    return [head, *history, *schemas, last] if layout == "last" else [head, *schemas, *history, last]


def counted(params: Any, gate: Gate, turns: Sequence[Turn], layout: str, cache: str = "full") -> dict[str, int]:
    """Tokens of the prompts of a conversation, and rows that were prefilled for them; of passages also those that each
    was read with by itself."""
    within, told = params.tokenizer.within, {"tokens": 0, "rows": 0}
    history: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        store: Any = jkv.ChunkCache("pie") if layout == "chunks" else jkv.PrefixCache(folder)
        known: set[tuple[int, ...]] = set()
        for turn in turns:
            active = gate.active(turn.says, turn.facts)
            texts = [within(x) for x in parts(layout, gate.tools, active, history, turn.says)]
            ids, before = [i for x in texts for i in x], store.read if layout == "chunks" else store.reused
            for x in {*map(tuple, texts)} - known if layout == "chunks" else ():
                if len(x) >= 16:  # a shorter one is read with every prompt
                    store.add(params, list(x), lead=[])
                    told["rows"] += len(x)
            known |= {*map(tuple, texts)}
            jkv.prefill(params, cache, [ids], reserve=0, prefix_cache=store)
            told["tokens"] += len(ids)
            told["rows"] += round(store.read - before) if layout == "chunks" else len(ids) - (store.reused - before)
            history += [f"user: {turn.says}\n", f"answer: {turn.answer}\n"]
    return told


def scripted(tools: int, turns: int, seed: int = 0) -> tuple[list[Tool], list[Turn]]:
    """A world of tools by subject and deed, and a conversation that stays with a subject for some turns."""
    rng = np.random.default_rng(seed)
    subjects = ["invoices", "photos", "trains", "recipes", "tickets", "letters", "sensors", "contracts"]
    deeds = ["list", "find", "delete", "rename", "share"]
    made, none, confirmed = [], frozenset[str](), frozenset({"confirmed"})
    for i in range(tools):
        what, deed = subjects[i % len(subjects)], deeds[i % len(deeds)]
        fields = "".join(f', "{x}": {{"type": "string", "description": "{x} of the {what}"}}' for x in ("id", "from"))
        schema = f'{{"name": "{deed}_{what}_{i}", "description": "{deed} {what}"{fields}}}'
        made.append(Tool(f"{deed}_{what}_{i}", f"{deed} {what}", schema, confirmed if deed == "delete" else none))
    said = []
    for i in range(turns):
        what, deed = subjects[i // 2 % len(subjects)], deeds[i % len(deeds)]
        there = ", ".join(f"{what[:-1]} {x}" for x in rng.integers(1000, size=20))
        said.append(Turn(f"please {deed} the {what} of last week", f"these are there: {there}", confirmed))
    return made, said


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--model", default="smollm2-135m")
    for name, default in (("--turns", 8), ("--tools", 40)):
        asked.add_argument(name, type=int, default=default)
    given = asked.parse_args()
    params, (tools, turns) = jkv.load(given.model), scripted(given.tools, given.turns)
    encode = embedding(params, [x.summary for x in tools])
    every = counted(params, Gate(tools, encode, theta=-1, k=len(tools)), turns[:1], "published")
    print(f"every schema: {every['tokens']:,} tokens in the first prompt")
    for layout in LAYOUTS:
        found = counted(params, Gate(tools, encode, k=5), turns, layout)
        print(f"{layout}: {found['tokens']:,} tokens in {len(turns)} prompts, {found['rows']:,} rows prefilled")


if __name__ == "__main__":
    main()
