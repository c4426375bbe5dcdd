"""Metrics of the server, in the text format of Prometheus."""

from __future__ import annotations

import sys

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jkv.serve.batches import Watch
from jkv.serve.engine_thread import Engine

SOONER = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
QUICKER = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters, gauges and histograms of one server; `text` is the body of /metrics."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.answers = Counter("jkv_requests", "Answers by path and status.", ("path", "status"), registry=own)
        self.gone = Counter("jkv_clients_gone", "Calls whose client left before the end.", registry=own)
        self.prompt = Counter("jkv_prompt_tokens", "Prompt tokens of rows that began.", registry=own)
        self.reused = Counter("jkv_store_tokens", "Those of them that the store had.", registry=own)
        self.new = Counter("jkv_new_tokens", "Generated tokens.", registry=own)
        self.drafted = Counter("jkv_drafted_tokens", "Drafted tokens of a row that batches verified.", registry=own)
        self.taken = Counter("jkv_drafted_tokens_taken", "Those of them that came.", registry=own)
        self.undrafted = Counter("jkv_undrafted_batches", "Batches that draft no more.", ("cache",), registry=own)
        self.first = Histogram("jkv_first_token_seconds", "To the first token.", registry=own, buckets=SOONER)
        self.between = Histogram("jkv_token_seconds", "Between two tokens.", registry=own, buckets=QUICKER)
        self.waiting = Gauge("jkv_rows_waiting", "Rows in the queue.", registry=own)
        self.running = Gauge("jkv_rows_running", "Rows that run, by cache.", ("cache",), registry=own)

    def watch(self) -> Watch:
        """Return the callbacks through which an engine reports."""

        def first(seconds: float, tokens: int) -> None:
            self.new.inc(tokens)
            self.first.observe(seconds)

        def later(seconds: float, tokens: int) -> None:
            self.new.inc(tokens)
            self.between.observe(seconds)

        def read(tokens: int, reused: int) -> None:
            self.prompt.inc(tokens)
            self.reused.inc(reused)

        def drafted(tokens: int, taken: int) -> None:
            self.drafted.inc(tokens)
            self.taken.inc(taken)

        def undrafted(cache: str, why: str) -> None:
            self.undrafted.labels(cache).inc()
            print(f"jkv serve: plain steps for {cache}: {why}", file=sys.stderr, flush=True)

        return Watch(read=read, first=first, later=later, drafted=drafted, undrafted=undrafted)

    def text(self, engine: Engine) -> bytes:
        """Return all metrics, after setting the gauges from the engine."""
        self.waiting.set(len(engine.waiting))
        self.running.clear()
        for cache, rows in engine.running.items():
            self.running.labels(cache).set(rows)
        return generate_latest(self.registry)
