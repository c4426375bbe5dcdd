"""transformers' server beside jkv's: how it is started and asked, and the folder that it reads."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.serve import beside, folder
from jkv import models
from jkv.bench.serve import ask, load, resident
from jkv.io.load import load as loaded
from jkv.io.load import read
from support import ggufs

PEER = """
import http.server, sys
if "--broken" in sys.argv:
    sys.exit("no fastapi")
class Says(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(422 if b'"cache"' in asked else 200)
        self.end_headers()
        for said in ('"text": "a", "finish_reason": null}]', '"text": "", "finish_reason": "length"}], "usage": USED'):
            said = said.replace("USED", '{"completion_tokens": 2}')
            self.wfile.write(("data: {\\"choices\\": [{" + said + "}\\n\\n").encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[1:5] == ["serve", sys.argv[2], "--dtype", "float32"] and sys.argv[-1] == "--continuous-batching"
http.server.HTTPServer(("127.0.0.1", port), Says).serve_forever()
"""


def test_a_peer_is_asked_for_no_cache_and_says_no_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "transformers" / "cli"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    (package / "transformers.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with beside(tmp_path, "--continuous-batching", 1) as (port, pid):
        assert ask(port, {"prompt": "x"}).wrong == "no end" and ask(port, {"prompt": "x"}, b"").wrong == ""
        answers, held, _ = load(port, pid, "m", [""], 2, 0.1, 8, b"")
        assert (
            answers
            and all((x.wrong, x.tokens, len(x.pieces), x.first) == ("", 2, 1, 1) for x in answers)
            and held[0] > 0
        )
        assert ask(port, {"prompt": "x", "cache": "full"}, b"").wrong == "status 422"
    assert resident(pid) is None
    with pytest.raises(ChildProcessError, match="no fastapi"), beside(tmp_path, "--broken", 1):
        pass


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # of torch and transformers, not ours
def test_a_folder_is_the_same_model_to_transformers(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = ggufs.tiny(tmp_path / "m.gguf")
    made = folder(read(path), tmp_path / "made")
    params, text = loaded(path), "hello there"
    ids = transformers.AutoTokenizer.from_pretrained(made)(text)["input_ids"]
    assert ids == params.tokenizer.encode(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(made)
    theirs = model(torch.tensor([ids])).logits.detach().numpy()
    own = models.forward(params, jnp.asarray([ids]), jnp.arange(len(ids))[None])
    np.testing.assert_allclose(np.asarray(own), theirs, atol=1e-4)
