"""The child process that renders chat templates, which are untrusted programs, within limits.

python -I -S chat_template_child.py FOLDER...   (folders with jinja2)

It imports only jinja2. Requests and answers are JSON, each preceded by its length in eight bytes: {"template", "names",
"seconds"} and {"text"} or {"error"}. The process ends with its input, or is killed by the operating system if a
template exceeds a limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

MEMORY = 1 << 30  # bytes of address space; Python and jinja2 take a twentieth
LONGEST = 1 << 26  # maximum characters of a prompt


def _environment() -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks assistant text for training; its content is rendered unchanged."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # Jinja's own tojson escapes HTML, which a model must not see.
    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # Templates use the Hugging Face dialect: these trims, loop controls and names are part of it.
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    env.filters["tojson"] = tojson
    return env


def _compiler() -> Callable[[str], Any]:
    return lru_cache(16)(_environment().from_string)


def _answer(compiled: Callable[[str], Any], request: dict[str, Any]) -> dict[str, str]:
    try:
        text = compiled(request["template"]).render(request["names"])
        if len(text) > LONGEST:
            raise ValueError(f"its text has {len(text):,} characters; {LONGEST:,} are the most")
        return {"text": text}
    except Exception as error:  # a template can raise anything
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _limit(seconds: float) -> None:
    """Limit the CPU time from now on; the operating system then kills this process."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the input ends."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = _compiler()
    while len(head := source.read(8)) == 8:
        request = json.loads(source.read(int.from_bytes(head, "little")))
        _limit(request["seconds"])
        said = json.dumps(_answer(compiled, request)).encode()
        sink.write(len(said).to_bytes(8, "little") + said)
        sink.flush()


if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])
    serve(sys.stdin.buffer, sys.stdout.buffer)
