"""The server process: start, serve until SIGTERM, finish open calls."""

from __future__ import annotations

import errno
import signal
import socket
import sys

import uvicorn

from jkv.methods import parse
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.serve.batches import Limits
from jkv.serve.engine_thread import Engine
from jkv.serve.metrics import Metrics
from jkv.serve.routes import Access, Server

LOCAL = ("127.0.0.1", "localhost", "::1")
BESIDE = 64  # connections beyond the rows that run or wait


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """Bind the address of a server, before anything is loaded or compiled.

    Args:
        host: address to bind.
        port: port to bind, 0 for a free one.
        token: the token that clients must send, or None.

    Raises:
        ValueError: the port is taken, the address is not this machine's, or it is open to a network without a token.
    """
    if host not in LOCAL and not token:
        raise ValueError(f"host {host}: others could call it, so it needs a token; give --token-file or JKV_TOKEN")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is taken: give another --port, or --port 0 for a free one") from None
        raise ValueError(
            f"cannot bind {host}:{port} ({error.strerror or error}); give another --host or --port"
        ) from error
    return bound


def serve(
    params: Params,
    name: str,
    caches: tuple[str, ...],
    limits: Limits,
    access: Access,
    bound: socket.socket,
    grace: int = 30,
    prefix_cache: PrefixCache | None = None,
    drafter: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish open calls.

    Args:
        name: name of the model for clients.
        caches: cache configs as text. The first is the default of requests, and its batch is compiled before the port
            opens.
        limits: capacity of the engine.
        access: who may call.
        bound: the socket that `bind` returned.
        grace: seconds for open calls after the signal.
        prefix_cache: prefix cache, or None.
        drafter: name of the drafter of all batches that can verify its drafts, or None.

    Raises:
        ValueError: a cache config cannot run, or the model has no tokenizer.
    """
    if params.tokenizer is None:
        raise ValueError("the model has no tokenizer, and HTTP is about texts: give a model that has one")
    # Start the engine with the default cache.
    metrics = Metrics()
    engine = Engine(params, limits, metrics.watch(), prefix_cache, drafter)
    configs = [engine.maker.usable(parse(text)) for text in caches]
    engine.start(configs[0])
    # Run the HTTP server.
    server = Server(engine, name, caches, metrics, access)
    most = limits.queue + limits.rows * limits.caches + BESIDE
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        http="h11",
        ws="none",
        limit_concurrency=most,
        timeout_graceful_shutdown=grace,
        server_header=False,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after it has ended
        signal.signal(number, lambda *_: None)
    AnnouncingServer(config, f"jkv serves {name}").run([bound])


class AnnouncingServer(uvicorn.Server):
    """A uvicorn server that prints its address once it listens."""

    def __init__(self, config: uvicorn.Config, text: str) -> None:
        super().__init__(config)
        self.text = text

    async def startup(self, sockets: list | None = None) -> None:
        """Listen, then print the address."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(f"{self.text}: http://{where}/v1", file=sys.stderr, flush=True)
