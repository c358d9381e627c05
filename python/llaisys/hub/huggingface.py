"""Models of the Hugging Face Hub, by id, through `huggingface_hub`.

The library keeps the cache that other programs share, and honours `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
`HF_ENDPOINT` and `HF_HUB_OFFLINE`. It is imported when it is used, as its HTTP client is slow to load. A
dropped connection is resumed within a pull; a pull that was ended keeps its whole files and begins the others
anew.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.hub.errors import PullError

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

_LOG = logging.getLogger(__name__)
_ID = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<variant>[\w.-]+(?:/[\w.-]+)*))?"
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SPLIT_GGUF = re.compile(r".*-\d{5}-of-\d{5}\.gguf")
# What is read of a folder beside the weights; the first two must be there.
_NEEDED = ("config.json", "tokenizer.json")
_OPTIONAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json",
    "quant_config.json",
    "modules.json",
    "1_Pooling/config.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# What llama.cpp and Ollama take of a repository with several files if nothing else is asked for.
_DEFAULT_VARIANT = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name`, or one GGUF file of it: `variant` is the file's name, or how it ends (`Q4_K_M`)."""

    repo: str
    variant: str | None

    def __str__(self) -> str:
        return self.repo if self.variant is None else f"{self.repo}:{self.variant}"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the Hub's cache: `name` asks for it, `ref` is its branch, tag or commit."""

    name: str
    ref: str
    n_bytes: int
    path: Path


def parse(name: str) -> HubId | None:
    """The id in `org/name[:variant]`, with or without the Hub's address; None if it is none."""
    match = _ID.fullmatch(name)
    return HubId(match["repo"], match["variant"]) if match else None


def fetch(asked: HubId, revision: str | None, progress: bool) -> Path:
    """Brings the files that are read into the Hub's cache; the folder, or the GGUF file.

    If the Hub cannot be reached, what is in the cache is used, with a warning. Raises PullError;
    RejectedError or UnsupportedError if the repository has nothing that can be read.
    """
    import huggingface_hub

    try:
        commit = huggingface_hub.resolve_revision(asked.repo, revision=revision)
        sizes, failure = _listed(asked, commit)
    except Exception as e:  # the library lets its HTTP client's errors through, and that client has changed
        raise _explained(asked, revision, e) from e
    try:
        chosen = choose(asked, sizes)
    except (RejectedError, UnsupportedError) as e:
        raise (_explained(asked, revision, failure) if failure is not None else e) from failure
    if failure is None:
        _check_room(asked, {name: sizes[name] for name in chosen}, commit)
    try:  # one after the other, here: what a thread fetches goes on after Ctrl-C
        paths = [
            huggingface_hub.hf_hub_download(
                asked.repo,
                name,
                revision=commit,
                local_files_only=failure is not None,
                tqdm_class=None if progress else _NoBar,
            )
            for name in chosen
        ]
    except Exception as e:
        raise _explained(asked, revision, failure or e) from e
    return Path(paths[0]) if len(paths) == 1 else Path(paths[0]).parent


def choose(asked: HubId, files: Collection[str]) -> list[str]:
    """The files to fetch of those that a repository has: a GGUF alone, or a folder's, weights last.

    Raises RejectedError (no such variant) or UnsupportedError (pickles, split files, no tokenizer). Pure.
    """
    ggufs = sorted(
        name for name in files if name.endswith(".gguf") and not PurePosixPath(name).name.startswith("mmproj")
    )
    if asked.variant is not None:
        return [_gguf(asked.repo, asked.variant, ggufs)]
    weights = _safetensors(files)
    if weights and _NEEDED[0] in files:
        if _NEEDED[1] not in files:
            raise UnsupportedError(
                f"{asked} has no tokenizer.json, the only tokenizer file that is read", param="model"
            )
        return [*_NEEDED, *(name for name in _OPTIONAL if name in files), *weights]
    if ggufs:
        return [ggufs[0] if len(ggufs) == 1 else _gguf(asked.repo, _DEFAULT_VARIANT, ggufs)]
    if any(name.endswith(_PICKLES) for name in files):
        raise UnsupportedError(
            f"{asked} has its weights as pickles only, which can run code when they are read; "
            "look for a repository with safetensors or GGUF files",
            param="model",
        )
    raise UnsupportedError(
        f"{asked} has no model that can be read: neither config.json with {_SINGLE} (or shards), nor a .gguf",
        param="model",
    )


def cached_models() -> list[CachedModel]:
    """What can be read of the models in the Hub's cache, by name. Damaged entries are left out."""
    import huggingface_hub
    from huggingface_hub import constants

    try:
        cache = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    except (huggingface_hub.CacheNotFound, OSError, ValueError):
        return []
    found = []
    for repo in cache.repos:
        for snapshot in repo.revisions if repo.repo_type == "model" else ():
            ref = ", ".join(sorted(snapshot.refs)) or snapshot.commit_hash[:12]
            root = snapshot.snapshot_path
            sizes = {str(f.file_path.relative_to(root)): f.size_on_disk for f in snapshot.files}
            if _safetensors(sizes) and _NEEDED[0] in sizes:
                n_bytes = sum(n for name, n in sizes.items() if not name.endswith(".gguf"))
                found.append(CachedModel(repo.repo_id, ref, n_bytes, root))
            ggufs = [name for name in sizes if name.endswith(".gguf")]
            found += [CachedModel(f"{repo.repo_id}:{name}", ref, sizes[name], root / name) for name in ggufs]
    return sorted(found, key=lambda model: (model.name, model.ref))


def remove(repo_id: str) -> tuple[Path, int] | None:
    """Deletes all revisions of a model from the Hub's cache; its folder and the bytes freed, or None."""
    import huggingface_hub
    from huggingface_hub import constants

    try:
        cache = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    except (huggingface_hub.CacheNotFound, ValueError):
        return None
    for repo in cache.repos:
        if (repo.repo_type, repo.repo_id) == ("model", repo_id):
            strategy = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
            strategy.execute()
            return repo.repo_path, strategy.expected_freed_size
    return None


class _NoBar(tqdm):  # type: ignore[type-arg]  # generic in its stub only
    """What the library shows when no progress is wanted."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **{**settings, "disable": True})  # type: ignore[call-overload]  # passed on


def _safetensors(files: Collection[str]) -> list[str]:
    """The weights that transformers would take: one file, or the index and all its shards."""
    if _SINGLE in files:
        return [_SINGLE]
    shards = sorted(name for name in files if _SHARD.fullmatch(name))
    whole = len(shards) > 0 and shards[-1].endswith(f"-of-{len(shards):05}.safetensors")
    return [_INDEX, *shards] if whole and _INDEX in files else []


def _gguf(repo: str, variant: str, ggufs: list[str]) -> str:
    """The one file that `variant` names, or that ends with it (`x-Q4_K_M.gguf`), in any case of letters."""
    wanted = variant.lower()
    exact = [name for name in ggufs if wanted in (name.lower(), PurePosixPath(name).name.lower())]
    ending = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}\.gguf")
    found = exact or [name for name in ggufs if ending.fullmatch(name.lower())]
    if len(found) == 1:
        if _SPLIT_GGUF.fullmatch(found[0]):
            raise UnsupportedError(
                f"{repo}: {found[0]} is one part of a split GGUF, which is not read; "
                "llama-gguf-split --merge makes one file of the parts",
                param="model",
            )
        return found[0]
    problem = "no GGUF file" if not ggufs else ("no file" if not found else "more than one file")
    there = f"; there are: {', '.join(ggufs)}" if ggufs else ""
    raise RejectedError(f"{repo} has {problem} for {variant}{there}. Ask for {repo}:FILE.gguf", param="model")


def _listed(asked: HubId, commit: ResolvedRevision) -> tuple[Mapping[str, int], Exception | None]:
    """Names and sizes of the repository's files: from the Hub, or from the cache and why.

    Raises the library's errors if neither is to be had.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        facts = huggingface_hub.HfApi().model_info(asked.repo, revision=commit.resolved, files_metadata=True)
        return {file.rfilename: file.size or 0 for file in facts.siblings or ()}, None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except Exception as e:  # noqa: BLE001 -- as in `fetch`
        failure = e
    try:
        folder = huggingface_hub.snapshot_download(asked.repo, revision=commit, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        raise failure from None
    if not isinstance(failure, errors.OfflineModeIsEnabled):
        _LOG.warning("the Hub cannot be asked for %s (%s): using the cache", asked, _one_line(failure))
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}, failure


def _check_room(asked: HubId, sizes: Mapping[str, int], commit: ResolvedRevision) -> None:
    """Refuses what the disk cannot take, before the first byte comes."""
    import huggingface_hub
    from huggingface_hub import constants

    missing = [
        n_bytes
        for name, n_bytes in sizes.items()
        if not isinstance(
            huggingface_hub.try_to_load_from_cache(asked.repo, name, revision=commit.resolved), str
        )
    ]
    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    n_free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if sum(missing) > n_free:
        raise PullError(
            f"{asked} needs {sum(missing) >> 20} MiB more, {cache} has {n_free >> 20} MiB free. "
            "HF_HOME chooses another folder",
            param="model",
        )


def _explained(asked: HubId, revision: str | None, error: Exception) -> PullError:
    """What the library's errors mean for the caller."""
    from huggingface_hub import constants, errors

    hub, at = constants.ENDPOINT, f" at revision {revision}" if revision else ""
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        text = (
            f"{asked} is gated: accept its terms at {hub}/{asked.repo}, then set HF_TOKEN to a token of yours"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"{hub} has no model {asked.repo}, or it is private: check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{asked.repo} has no revision {revision}; it is a branch, a tag or a commit"
    elif isinstance(error, errors.HFValidationError):
        text = f"{asked.repo} is not a name that the Hub can have: {_one_line(error)}"
    elif status in (401, 403):
        text = f"{hub} refuses the token for {asked.repo} ({status}): check HF_TOKEN"
    elif isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        text = f"{asked}{at} is not (wholly) in the cache, and HF_HUB_OFFLINE is set: unset it to ask the Hub"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = f"the disk is full while {asked} is fetched into {constants.HF_HUB_CACHE}"
    else:
        text = (
            f"{asked}{at} could not be fetched from {hub} ({_one_line(error)}). Check the network and "
            "HF_ENDPOINT and pull again: whole files are kept. Or give a model folder or a .gguf file"
        )
    return PullError(text, param="model")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
