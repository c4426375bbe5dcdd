"""The demo page, served with a strict Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources


@cache
def page() -> tuple[str, str]:
    """Return the page and its Content-Security-Policy.

    The policy allows only the script and style of the page, by their digests, and requests to this server.
    """
    text = (resources.files("jkv.serve") / "page.html").read_text("utf-8")
    # Hash the script and the style.
    own = []
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        own.append(f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'")
    closed = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return text, "; ".join((*closed, *own, "connect-src 'self'"))
