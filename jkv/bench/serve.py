"""Server load benchmark: concurrent streaming clients, latency, failures and memory."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from jkv.bench.environment import SEED
from jkv.eval.tasks.words import prose
from jkv.serve.batches import STRIDE

DONE = b"data: [DONE]"  # last line of a stream; transformers' server does not send it
WAIT = 600  # timeout in seconds for a server to start, and for a piece of an answer
WORDS = (20, 160)  # shortest and longest prompt, in words


@dataclass
class Answer:
    """One streamed answer.

    Attributes:
        pieces: Arrival times of pieces, in seconds after the request.
        tokens: Number of tokens.
        first: Tokens of the first piece.
        wrong: Error message; "" if the answer is complete.
    """

    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    first: int = 1
    wrong: str = ""


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Run `jkv serve` with these arguments; yields its port and process id, and ends it with SIGTERM.

    Raises:
        ChildProcessError: The server does not start; the message has its last output.
    """
    command = [sys.executable, "-m", "jkv.cli", "serve", *arguments]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said: list[str] = []
    port: list[int] = []
    there = threading.Event()

    def listen() -> None:
        assert child.stderr is not None
        for line in child.stderr:
            said.append(line.rstrip())
            if found := re.search(r"http://[^/]*:(\d+)/v1", line):
                port.append(int(found[1]))
                there.set()
        there.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        if not there.wait(WAIT) or not port:
            raise ChildProcessError(f"jkv serve did not start: {'; '.join(said[-3:]) or 'it said nothing'}")
        yield port[0], child.pid
    finally:
        terminate(child)


def terminate(child: subprocess.Popen[Any]) -> None:
    """End a server with SIGTERM, or kill it if it does not end."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(WAIT)
    except subprocess.TimeoutExpired:
        child.kill()


def ask(port: int, body: dict[str, Any], last: bytes = DONE) -> Answer:
    """Request one streamed completion. Failures do not raise; the answer records them.

    last: Last line of a complete stream; b"" accepts any, for transformers' server, whose pieces are single tokens.
    """
    answer, start = Answer(first=STRIDE if last else 1), time.perf_counter()
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    ended, done = False, not last
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)) as line:
            line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            with line.getresponse() as got:
                if got.status != 200:
                    return Answer(wrong=f"status {got.status}")
                for raw in got:
                    if not raw.startswith(b"data: "):
                        continue
                    if raw.startswith(DONE):
                        done = True
                        break
                    said = json.loads(raw[6:])
                    if any(x["text"] for x in said["choices"]):
                        answer.pieces.append(time.perf_counter() - start)
                    ended |= any(
                        x.get("finish_reason") for x in said["choices"]
                    )  # transformers omits a null finish reason
                    answer.tokens = (said.get("usage") or {}).get("completion_tokens", answer.tokens)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        answer.wrong = f"{type(error).__name__}: {error}"
    if not (ended and done and answer.tokens) and not answer.wrong:
        answer.wrong = "no end"
    return answer


def resident(pid: int) -> float | None:
    """Return the resident MiB of a process, or None if it has ended."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(found[1]) / 1024 if found else None  # a zombie process has no such line


def load(
    port: int,
    pid: int,
    model: str,
    caches: Sequence[str],
    clients: int,
    seconds: float,
    new: int,
    last: bytes = DONE,
) -> tuple[list[Answer], list[float], float]:
    """Load a server with clients that send one request after the other.

    Every cache answers once before the measurement. Clients stop if the server ends.

    Args:
        port, pid: Port and process id of the server.
        model: Model name of the requests.
        caches: Caches of the requests, in turns; "" for a server without caches.
        clients: Number of concurrent clients.
        seconds: Duration of the load.
        new: Tokens per answer.
        last: Last line of a complete stream; see `ask`.

    Returns:
        The answers; resident MiB of the server, four times a minute; and the seconds until the last answer ended.
    """
    texts = [prose(np.random.default_rng([SEED, i]), WORDS[0] + 37 * i % (WORDS[1] - WORDS[0])) for i in range(64)]

    def request(i: int, cache: str) -> dict[str, Any]:
        asked = {"model": model, "max_tokens": new, "temperature": 0.7, "prompt": texts[i % len(texts)]}
        return asked | ({"cache": cache} if cache else {})

    # Warm up every cache, so that nothing compiles under load.
    for cache in caches:
        for i in range(2):
            if wrong := ask(port, request(i, cache), last).wrong:
                raise ChildProcessError(f"{cache or model} was not answered ({wrong}): look at what the server says")
    start, held = time.monotonic(), [resident(pid) or 0.0]
    until = start + seconds

    def client(number: int) -> list[Answer]:
        out = []
        while time.monotonic() < until:
            i = number + clients * len(out)
            out.append(ask(port, request(i, caches[i % len(caches)]) | {"seed": i}, last))
            if out[-1].wrong and resident(pid) is None:
                break
        return out

    def watch() -> None:
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(15, left))
            if (now := resident(pid)) is None:
                break
            held.append(now)

    # Run all clients, and sample the server's memory meanwhile.
    with ThreadPoolExecutor(clients + 1) as pool:
        watching = pool.submit(watch)
        answers = [x for some in pool.map(client, range(clients)) for x in some]
        elapsed = time.monotonic() - start
        watching.result()
    return answers, held, elapsed


def row(answers: Sequence[Answer], held: Sequence[float], seconds: float) -> dict[str, Any]:
    """Summarize a load as one record.

    Fields: first_ms is the time to the first piece; piece_ms the time between pieces (strides of jkv's server);
    token_ms the time between an answer's first and last piece per token after the first piece; lost the number of
    incomplete answers and the reasons; mib the server's memory from the first request on.

    Args:
        answers: The answers of all clients.
        held: Resident MiB of the server over time.
        seconds: Time from the first request until the last answer ended.
    """
    good = [x for x in answers if not x.wrong]
    between = [b - a for x in good for a, b in zip(x.pieces, x.pieces[1:], strict=False)]
    each = [
        (x.pieces[-1] - x.pieces[0]) / (x.tokens - x.first) for x in good if len(x.pieces) > 1 and x.tokens > x.first
    ]
    times = {"first_ms": [x.pieces[0] for x in good if x.pieces], "piece_ms": between, "token_ms": each}
    return {
        "answers": len(good),
        "lost": len(answers) - len(good),
        "why": sorted({x.wrong for x in answers if x.wrong}),
        "tokens_per_s": round(sum(x.tokens for x in good) / seconds, 2),
        **{
            name: {f"p{p}": round(1e3 * float(np.percentile(x, p)), 1) for p in (50, 99)} if x else None
            for name, x in times.items()
        },
        "mib": [round(x) for x in held],
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Format the rows as a table that also renders as markdown."""
    heads = (
        "",
        "clients",
        "answers",
        "lost",
        "tokens/s",
        "first token, ms (p50, p99)",
        "a token, ms",
        "MiB, first and last",
    )
    out = Table(*heads, box=box.MARKDOWN)
    for r in found:
        both = [", ".join(f"{x:,.0f}" for x in (r[name] or {}).values()) for name in ("first_ms", "token_ms")]
        memory = f"{r['mib'][0]:,}, {r['mib'][-1]:,}"
        out.add_row(r["server"], *(str(r[x]) for x in ("clients", "answers", "lost", "tokens_per_s")), *both, memory)
    return out
