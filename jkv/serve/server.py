"""A server from its start to SIGTERM: no new calls then, and those that are there are answered."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

import uvicorn

from jkv.methods import parse
from jkv.models import Params
from jkv.prefix_cache.store import Store
from jkv.serve.batches import Limits
from jkv.serve.engine_thread import Engine
from jkv.serve.metrics import Metrics
from jkv.serve.routes import Access, Server

LOCAL = ("127.0.0.1", "localhost", "::1")
BESIDE = 64  # connections beside those whose rows run or wait


def serve(
    params: Params,
    name: str,
    caches: tuple[str, ...],
    limits: Limits,
    access: Access,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace: int = 30,
    store: Store | None = None,
    draft: str | None = None,
) -> None:
    """Answer until SIGTERM or SIGINT, then finish what has begun, for `grace` seconds at most.

    caches: the first is what a request that names none gets; its batch is compiled before the port opens.
    draft: of all batches that can verify guesses, what guesses. Raises
    ValueError for a server that would be open to a network without a token, and for a cache that cannot run.
    """
    if host not in LOCAL and not access.token:
        raise ValueError(f"host {host}: others could call it, so it needs a token; give --token-file or JKV_TOKEN")
    if params.tokenizer is None:
        raise ValueError("the model has no tokenizer, and HTTP is about texts: give a model that has one")
    metrics = Metrics()
    engine = Engine(params, limits, metrics.watch(), store, draft)
    configs = [engine.maker.usable(parse(text)) for text in caches]
    engine.start(configs[0])
    server = Server(engine, name, caches, metrics, replace(access, hosts=(*access.hosts, host)))
    most = limits.queue + limits.rows * limits.caches + BESIDE
    config = uvicorn.Config(
        server.app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        http="h11",
        ws="none",
        limit_concurrency=most,
        timeout_graceful_shutdown=grace,
        server_header=False,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them once more when it has ended
        signal.signal(number, lambda *_: None)
    Told(config, f"jkv serves {name}").run()


class Told(uvicorn.Server):
    """Says where it is, once it is there."""

    def __init__(self, config: uvicorn.Config, text: str) -> None:
        super().__init__(config)
        self.text = text

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(f"{self.text}: http://{where}/v1", file=sys.stderr, flush=True)
