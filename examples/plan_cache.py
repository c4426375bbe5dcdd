"""Agentic Plan Caching (2506.14852): a plan that worked is a template, which the next task of its kind adapts.

python examples/plan_cache.py [--tasks 60] [--capacity 8]

A scripted world in which a large model plans, a small one adapts plans, and an actor takes their steps: calls and
tokens (words) of each, with the cache and without; whether an adapted plan is as good is the script's to say. No model
runs: what a model would be asked is counted, and texts that begin alike are counted each time.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

VERSION = 1  # of `keyword`: keys of another one would name other kinds of tasks
FLOOR, TRIES = 0.5, 3  # the share of runs that a template has to end well, once it has had so many
SMALL = frozenset("the a an of and or in for to with from by on at please".split())


def keyword(text: str) -> str:
    """What a task asks for without whom and how many: no names, numbers or small words.

    >>> keyword("Compare the revenue of Acme and Borealis in 2019")
    '1:compare revenue'
    """
    first, *rest = re.findall(r"\w+", text)
    words = [first.lower(), *(x for x in rest if x.islower() and x not in SMALL)]
    return f"{VERSION}:{' '.join(words)}"


def template(plan: str, names: Sequence[str]) -> str:
    """A plan with names and numbers left open."""
    for i, name in sorted(enumerate(names), key=lambda one: -len(one[1])):  # one name may begin another
        plan = plan.replace(name, f"{{entity {i}}}")
    return re.sub(r"(?<!entity )\b\d+\b", "{number}", plan)


class Plans:
    """Templates by keyword, at most `capacity`: what was used longest ago goes first, and what fails too often."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: templates that are kept, 1 or more")
        self.capacity = capacity
        self.held: OrderedDict[str, str] = OrderedDict()
        self.ended: dict[str, list[bool]] = {}

    def get(self, key: str) -> str | None:
        if key in self.held:
            self.held.move_to_end(key)
        return self.held.get(key)

    def put(self, key: str, made: str, well: bool) -> None:
        """The template of a run; one that failed is not kept."""
        if well:
            self.held[key], self.ended[key] = made, []
            self.held.move_to_end(key)
            while len(self.held) > self.capacity:
                self.ended.pop(self.held.popitem(last=False)[0])

    def told(self, key: str, well: bool) -> None:
        """How a run by the template ended."""
        runs = self.ended[key]
        runs.append(well)
        if len(runs) >= TRIES and sum(runs) < FLOOR * len(runs):
            del self.held[key], self.ended[key]


@dataclass(frozen=True)
class Task:
    """What is asked, of whom, and whether the run of its plan ends well."""

    text: str
    names: tuple[str, ...]
    well: bool = True

    @property
    def plan(self) -> list[str]:
        """The steps that a planner gives, of which the actor takes each."""
        return [f"look up what {x} says of: {self.text}" for x in self.names] + ["put both beside each other", "answer"]


@dataclass
class Told:
    """Calls and tokens by who was asked, tasks that ended well, hits and misses."""

    calls: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    done: list[bool] = field(default_factory=list)
    hits: int = 0
    misses: int = 0

    def asked(self, whom: str, prompt: str, answer: str) -> None:
        self.calls[whom] += 1
        self.tokens[whom] += len(prompt.split()) + len(answer.split())


def run(tasks: Sequence[Task], plans: Plans | None, guide: str = "rule " * 200) -> Told:
    """Plan and act, task by task; guide: what a planner is told before every task."""
    told = Told()
    for task in tasks:
        key, made = keyword(task.text), "\n".join(task.plan)
        kept = None if plans is None else plans.get(key)
        if kept is None:
            told.asked("plan", f"{guide} {task.text}", made)
        else:
            told.asked("adapt", f"{kept} {task.text}", made)
        for step in task.plan:
            told.asked("act", step, "done")
        told.done.append(task.well)
        told.hits, told.misses = told.hits + (kept is not None), told.misses + (kept is None)
        if plans is not None and kept is None:
            plans.put(key, template(made, task.names), task.well)
        elif plans is not None:
            plans.told(key, task.well)
    return told


def scripted(tasks: int, seed: int = 0, fails: float = 0.1) -> list[Task]:
    """Tasks of ten kinds, some asked for more often than others, about ever other names and years."""
    rng = np.random.default_rng(seed)
    matters = ("revenue", "staff", "debts", "offers", "risks")
    kinds = [f"{x} the {y} of" for x in ("Compare", "Summarise") for y in matters]
    odds = 1 / np.arange(1, len(kinds) + 1)
    out = []
    for kind in rng.choice(len(kinds), tasks, p=odds / odds.sum()):
        a, b = (f"{x}{y}" for x, y in rng.choice(["Acme", "Borealis", "Cygnus", "Delta"], (2, 2)))
        text = f"{kinds[kind]} {a} and {b} in {2000 + int(rng.integers(26))}"
        out.append(Task(text, (a, b), bool(rng.random() >= fails)))
    return out


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--tasks", 60), ("--capacity", 8)):
        asked.add_argument(name, type=int, default=default)
    given = asked.parse_args()
    tasks = scripted(given.tasks)
    for name, plans in (("without a cache", None), (f"{given.capacity} templates", Plans(given.capacity))):
        told = run(tasks, plans)
        print(f"{name}: " + ", ".join(f"{x}: {n} calls, {told.tokens[x]:,} words" for x, n in told.calls.items()))


if __name__ == "__main__":
    main()
