"""The page of a server: one HTML file, and a policy by which a browser runs nothing else and calls nobody else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources


@cache
def page() -> tuple[str, str]:
    """The page, and its Content-Security-Policy: its own script and style by their digests, and this server."""
    text = (resources.files("jkv.serve") / "page.html").read_text("utf-8")
    own = []
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        own.append(f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'")
    closed = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return text, "; ".join((*closed, *own, "connect-src 'self'"))
