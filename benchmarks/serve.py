"""Load of `jkv serve` and of transformers' server on the same weights: python -m benchmarks.serve --vs transformers"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import safetensors.numpy
import typer

from benchmarks.requirements import check_engine
from jkv.bench.serve import WAIT, load, row, terminate
from jkv.cli.app import application, main
from jkv.cli.bench_common import Load, load_server
from jkv.io.load import read
from jkv.io.model_source import Source


def folder(source: Source, path: Path) -> Path:
    """Write a model folder for transformers: config, float32 tensors, tokenizer (ValueError if there is none)."""
    if source.tokenizer is None:
        raise ValueError("the model has no tokenizer, and a server is about texts: give a model that has one")
    from transformers.models.auto.modeling_auto import (  # pyright: ignore[reportMissingImports]  an extra
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS,
    )

    path.mkdir(parents=True, exist_ok=True)
    config, ends = source.config, {"eos_token_id": list(source.tokenizer.eos_ids)}
    named = {"config": {"architectures": [MODELS[config["model_type"]]], **config, **ends}, "generation_config": ends}
    for name, said in (named | {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}}).items():
        (path / f"{name}.json").write_text(json.dumps(said))
    source.tokenizer.core.save(str(path / "tokenizer.json"))
    tensors = {name: np.ascontiguousarray(get(), np.float32) for name, get in source.tensors.items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@contextmanager
def beside(path: Path, options: str, threads: int) -> Iterator[tuple[int, int]]:
    """Run `transformers serve` on this folder in float32 on the CPU; yields port and process id, as `started` does.

    options: Further options of that server, such as "--continuous-batching".
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(path), "--dtype", "float32"]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *shlex.split(options)]
    own = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    with (path / "server.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=own)
    try:
        until = time.monotonic() + WAIT
        while not _healthy(port):
            if child.poll() is not None or time.monotonic() > until:
                said = (path / "server.log").read_text(errors="replace").strip().splitlines()
                raise ChildProcessError(
                    f"transformers serve did not start: {'; '.join(said[-3:]) or 'it said nothing'}"
                )
            time.sleep(0.2)
        yield port, child.pid
    finally:
        terminate(child)


def _healthy(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as line:
            line.request("GET", "/health")
            return line.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def serve(
    o: Load,
    vs: Annotated[
        list[str] | None,
        typer.Option(help='"transformers", followed by options of its `serve`; repeatable. Default: transformers.'),
    ] = None,
) -> None:
    """Load `jkv serve`, then transformers' server: time to first token, ms per token, failed answers, memory."""
    peers = [x.partition(" ") for x in vs or ["transformers"]]
    if unknown := [name for name, *_ in peers if name != "transformers"]:
        raise ValueError(f"--vs {unknown[0]}: transformers, the only server beside jkv's")
    check_engine("transformers")

    def rows(cores: int) -> Iterator[dict[str, Any]]:
        with TemporaryDirectory() as place:
            path = folder(read(o.model), Path(place) / "model")
            for name, _, options in peers:
                with beside(path, options, cores) as (port, pid):
                    answers, held, elapsed = load(port, pid, str(path), [""], o.clients, o.seconds, o.new, b"")
                server = f"{name} {options}".strip()
                yield {"server": server, "clients": o.clients, **row(answers, held, elapsed)}

    load_server(o, rows, len(peers))


app = application(serve)

if __name__ == "__main__":
    main(app)
