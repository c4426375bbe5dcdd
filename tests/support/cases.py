"""What a session was asked for: a process that measures several cases at once need not measure the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def cases(request: pytest.FixtureRequest, test: Callable[..., Any]) -> list[str]:
    """The cases of a test of this module that run in this session."""
    items = [x for x in request.session.items if getattr(x, "function", None) is test]
    return [item.callspec.params["case"] for item in items]
