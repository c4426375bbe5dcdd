"""HTTP routes: completions, chat completions, models, health, metrics and the demo page, with access control."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jkv.engine.formats import CHAT, TEXT
from jkv.serve.engine_thread import Engine, Full
from jkv.serve.metrics import Metrics
from jkv.serve.openai_requests import NotFound, OpenAIRequest, Reader
from jkv.serve.openai_responses import Answer, error
from jkv.serve.page import page
from jkv.serve.request_state import End, Event, Fault, Kept

OPEN = ("/", "/health")  # paths that need no token; the page lets the user enter it
AGAIN = {429: "2", 503: "10"}  # Retry-After by status, in seconds
PATIENCE = 30.0  # seconds in which a body must arrive


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may call, and how large a body may be.

    Attributes:
        token: bearer token that a caller must send; "" for none.
        hosts: accepted Host names, checked if no token is set. A foreign page in a local browser cannot have such a
            name, which prevents DNS rebinding.
        body: bytes of the largest body.
    """

    token: str = ""
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    body: int = 1 << 20


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error response, with Retry-After where a later attempt may succeed."""
    more = {"Retry-After": AGAIN[status]} if status in AGAIN else {}
    return JSONResponse(error(status, message), status, {**more, **(headers or {})})


class Guard:
    """Middleware that rejects callers without the token and counts responses."""

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self.app, self.access, self.metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = scope["path"].startswith("/v1/models/")  # all names share one metric
                known = "/v1/models/..." if named else scope["path"] if "endpoint" in scope else "other"
                self.metrics.answers.labels(known, str(message["status"])).inc()
            await send(message)

        refused = self._refusal(scope)
        await (refused or self.app)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response that rejects a caller, or None if it may call."""
        headers = Headers(scope=scope)
        if self.access.token:
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self.access.token.encode())
            if scope["path"] not in OPEN and not (right and kind.lower() == "bearer"):
                return failure(
                    401, "give the server's token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"}
                )
        elif _name(headers.get("host", "")) not in self.access.hosts:
            return failure(403, "this server has no token, so it answers to its own names only")
        return None


def _name(host: str) -> str:
    """Return the name in a Host header, without the port.

    >>> _name("localhost:8000"), _name("[::1]:8000"), _name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class Server:
    """The ASGI application of one engine.

    Attributes:
        app: the application with its middleware, for an ASGI server.
        name: name of the model for clients.
    """

    def __init__(self, engine: Engine, name: str, caches: tuple[str, ...], metrics: Metrics, access: Access) -> None:
        self.engine, self.name, self.metrics, self.access = engine, name, metrics, access
        self.reader = Reader(engine, name, caches)
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.told),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route(CHAT, self.call, methods=["POST"]),
            Route(TEXT, self.call, methods=["POST"]),
        ]
        handlers: Any = {HTTPException: self.refused, ClientDisconnect: self.left}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.life)
        self.app = Guard(app, access, metrics)

    @contextlib.asynccontextmanager
    async def life(self, _: Any) -> AsyncIterator[None]:
        """Stop the engine when the application shuts down, after the last call. The engine has already started."""
        yield
        await run_in_threadpool(self.engine.stop)

    async def refused(self, _: Request, why: Exception) -> Response:
        """Answer an HTTPException."""
        assert isinstance(why, HTTPException)
        return failure(why.status_code, why.detail, dict(why.headers or {}))

    async def left(self, _: Request, why: Exception) -> Response:
        """Answer a client that has disconnected, for the metrics only."""
        return Response(status_code=499)  # the client is gone; only the metrics see it

    async def page(self, _: Request) -> Response:
        """GET /: the demo page."""
        text, policy = page()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while the engine runs, else 503."""
        return JSONResponse({"status": "ok"}) if self.engine.well else failure(503, "the engine has stopped")

    async def told(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(self.engine), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._about]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        if request.path_params["name"] != self.name:
            raise HTTPException(404, f"this is {self.name}")
        return JSONResponse(self._about)

    @property
    def _about(self) -> dict[str, Any]:
        """Description of the model, with limits and running caches."""
        limits = self.engine.limits
        about = {"max_prompt_tokens": limits.prompt, "max_tokens": limits.new, "caches": list(self.engine.running)}
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "jkv", **about}

    async def call(self, request: Request) -> Response:
        """POST a completion or chat completion."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # another type needs no CORS preflight, so a foreign page could send it
            raise HTTPException(415, "the body is JSON: Content-Type: application/json")
        raw = await self._body(request)
        try:
            asked = await run_in_threadpool(self.reader.read, raw, request.url.path)
        except NotFound as why:
            raise HTTPException(404, str(why)) from None
        except (ValueError, RecursionError, MemoryError, OverflowError) as why:
            raise HTTPException(400, str(why)[:1000] or type(why).__name__) from None
        return Call(self, asked)

    async def _body(self, request: Request) -> bytes:
        """Read the body. Raises HTTPException if it is too large or arrives too slowly."""
        most, raw = self.access.body, bytearray()
        try:
            async with asyncio.timeout(PATIENCE):
                async for part in request.stream():
                    raw += part
                    if len(raw) > most:
                        raise HTTPException(413, f"the body has more than {most:,} bytes", {"Connection": "close"})
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {PATIENCE:g} s to arrive") from None
        return bytes(raw)


class Unsent:
    """Queue of events between the engine thread and a client.

    Events keep their order. Of the interim receipts of a row only the newest is kept, because a client may read more
    slowly than its rows decode.
    """

    def __init__(self) -> None:
        self.events: OrderedDict[Any, tuple[int, Event]] = OrderedDict()
        self.there = asyncio.Event()
        self.numbers = itertools.count()

    def put(self, i: int, event: Event) -> None:
        """Add an event of row i."""
        key = ("kept", i) if isinstance(event, Kept) else next(self.numbers)
        self.events.pop(key, None)
        self.events[key] = i, event
        self.there.set()

    async def get(self) -> tuple[int, Event]:
        """Wait for the next event. Returns its row and the event."""
        while not self.events:
            self.there.clear()
            await self.there.wait()
        return self.events.popitem(last=False)[1]


class Call(Response):
    """Response to one call while its rows run. If the client disconnects, the rows are cancelled."""

    def __init__(self, server: Server, asked: OpenAIRequest) -> None:
        self.server, self.asked = server, asked
        self.events = Unsent()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, engine = asyncio.get_running_loop(), self.server.engine

        def tell(i: int) -> Any:
            return lambda event: loop.call_soon_threadsafe(self.events.put, i, event)

        tickets = self.asked.tickets(tell)
        try:
            engine.submit(tickets)
        except Full:
            status = 429 if engine.well else 503
            why = "as many rows wait as there is room for" if engine.well else "the server stops"
            return await failure(status, f"{why}; ask again later")(scope, receive, send)
        try:
            if not await _unless_gone(receive, self._answer(scope, receive, send)):
                self.server.metrics.gone.inc()
        finally:
            engine.cancel(tickets)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer, or stream it as server-sent events."""
        said = Answer(self.asked, self.server.name, self.server.engine.params.tokenizer)
        # Collect all events and send one body.
        if not self.asked.stream:
            rows: list[list[Event]] = [[] for _ in self.asked.requests]
            async for i, event in self._all():
                if isinstance(event, Fault):
                    return await failure(event.status, event.error)(scope, receive, send)
                rows[i].append(event)
            return await JSONResponse(said.whole(rows))(scope, receive, send)
        # Stream: the status is sent with the first event, so that an early failure can still set it.
        begun = False
        async for i, event in self._all():
            if isinstance(event, Fault) and not begun:
                return await failure(event.status, event.error)(scope, receive, send)
            if not begun:
                begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                for chunk in said.opening():
                    await _send(send, chunk)
            if isinstance(event, Fault):
                await _send(send, error(event.status, event.error))
                return await send({"type": "http.response.body", "body": b""})
            await _send(send, said.chunk(i, event))
        for chunk in said.closing():
            await _send(send, chunk)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _all(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all rows until the last row ends or one fails."""
        left = len(self.asked.requests)
        while left:
            i, event = await self.events.get()
            left -= isinstance(event, End)
            yield i, event
            if isinstance(event, Fault):
                return


async def _send(send: Send, chunk: dict[str, Any]) -> None:
    """Send one server-sent event."""
    await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` unless the client disconnects first.

    Returns:
        Whether `work` finished.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        for x in (task, watch):
            x.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
