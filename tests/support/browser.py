"""A headless Chromium that is spoken to through two pipes, in the words of its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


class Tab:
    """One page; `said`: what its console and its security policy have complained of."""

    def __init__(self, told: int, tells: int) -> None:
        self.told, self.tells, self.number = told, os.fdopen(tells, "rb"), 0
        self.session: str | None = None
        self.said: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command; an error of it is raised."""
        self.number += 1
        asked = {"id": self.number, "method": method, "params": params}
        os.write(self.told, json.dumps(asked | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            raw = bytearray()
            while (byte := self.tells.read(1)) not in (b"\0", b""):
                raw += byte
            if not raw:
                raise ChildProcessError("the browser has gone")
            got = json.loads(raw)
            if got.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.said.append(str(got["params"]))
            if got.get("id") == self.number:
                assert "error" not in got, got["error"]
                return got["result"]

    def does(self, code: str) -> Any:
        """The value of an expression in the page, awaited."""
        got = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def until(self, code: str, seconds: float = 60) -> None:
        """Until an expression is true; TimeoutError with the page's text otherwise."""
        wait = f"""new Promise(done => {{
          const look = () => ({code}) ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 20);
          const end = performance.now() + {1000 * seconds}; look() }})"""
        if not self.does(wait):
            raise TimeoutError(f"{code}: {self.does('document.body.innerText')}")


@contextmanager
def browsing(url: str, folder: Path) -> Iterator[Tab]:
    """A page in a browser of its own, whose profile is in the folder."""
    assert CHROMIUM is not None
    (theirs, told), (tells, back) = os.pipe(), os.pipe()
    args = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *QUIET, "--remote-debugging-pipe"]
    args += [f"--user-data-dir={folder / 'own'}", "about:blank"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{back}', "bash", *args]
    with subprocess.Popen(shell, pass_fds=(theirs, back), stderr=subprocess.DEVNULL) as child:
        os.close(theirs)
        os.close(back)
        tab = Tab(told, tells)
        try:
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Runtime", "Log", "Page"):
                tab.call(f"{domain}.enable")
            tab.call("Page.navigate", url=url)
            tab.until("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield tab
        finally:
            child.kill()
            os.close(told)
            tab.tells.close()
