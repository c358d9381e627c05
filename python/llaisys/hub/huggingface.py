"""Downloads models of the Hugging Face Hub by id, with `huggingface_hub`.

The library's cache is shared with other programs, and it honors `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
`HF_ENDPOINT` and `HF_HUB_OFFLINE`. It is imported at first use, because its HTTP client is slow to import. A
pull resumes after a dropped connection; an interrupted pull keeps complete files and downloads the others
again.
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
from llaisys.hub.pull_error import PullError

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
# Files that are read in addition to the weights: required, then optional.
_REQUIRED = ("config.json", "tokenizer.json")
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
# The default of llama.cpp and Ollama for a repository with several GGUF files.
_DEFAULT_VARIANT = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name`, or one of its GGUF files: `variant` is the file name or its last part (`Q4_K_M`)."""

    repo: str
    variant: str | None

    def __str__(self) -> str:
        return self.repo if self.variant is None else f"{self.repo}:{self.variant}"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the Hub's cache: the `name` to request it by; `ref` is its branch, tag or commit."""

    name: str
    ref: str
    n_bytes: int
    path: Path


def parse(name: str) -> HubId | None:
    """Parse `org/name[:variant]`, with or without the Hub's address; return None if it is not an id."""
    match = _ID.fullmatch(name)
    return HubId(match["repo"], match["variant"]) if match else None


def fetch(hub_id: HubId, revision: str | None, progress: bool) -> Path:
    """Download the needed files into the Hub's cache; return the folder or the GGUF file.

    Without a connection to the Hub, use cached files and log a warning. Raises PullError, or RejectedError or
    UnsupportedError if the repository has no supported model.
    """
    import huggingface_hub

    try:
        commit = huggingface_hub.resolve_revision(hub_id.repo, revision=revision)
        sizes, failure = _listed(hub_id, commit)
    except Exception as e:  # includes errors of the library's HTTP client, which varies by version
        raise _pull_error(hub_id, revision, e) from e
    try:
        chosen = choose(hub_id, sizes)
    except (RejectedError, UnsupportedError) as e:
        raise (_pull_error(hub_id, revision, failure) if failure is not None else e) from failure
    if failure is None:
        _check_free_space(hub_id, {name: sizes[name] for name in chosen}, commit)
    try:  # one by one on this thread: a download on another thread would continue after Ctrl-C
        paths = [
            huggingface_hub.hf_hub_download(
                hub_id.repo,
                name,
                revision=commit,
                local_files_only=failure is not None,
                tqdm_class=None if progress else _SilentBar,
            )
            for name in chosen
        ]
    except Exception as e:
        raise _pull_error(hub_id, revision, failure or e) from e
    return Path(paths[0]) if len(paths) == 1 else Path(paths[0]).parent


def choose(hub_id: HubId, files: Collection[str]) -> list[str]:
    """Return the files of a repository to download: one GGUF, or those of a folder, weights last.

    A pure function. Raises RejectedError (no such variant) or UnsupportedError (pickles, split files, no
    tokenizer).
    """
    ggufs = sorted(
        name for name in files if name.endswith(".gguf") and not PurePosixPath(name).name.startswith("mmproj")
    )
    if hub_id.variant is not None:
        return [_gguf(hub_id.repo, hub_id.variant, ggufs)]
    weights = _safetensors(files)
    if weights and _REQUIRED[0] in files:
        if _REQUIRED[1] not in files:
            raise UnsupportedError(
                f"{hub_id} has no tokenizer.json, the only supported tokenizer file", param="model"
            )
        return [*_REQUIRED, *(name for name in _OPTIONAL if name in files), *weights]
    if ggufs:
        return [ggufs[0] if len(ggufs) == 1 else _gguf(hub_id.repo, _DEFAULT_VARIANT, ggufs)]
    if any(name.endswith(_PICKLES) for name in files):
        raise UnsupportedError(
            f"{hub_id} has its weights only as pickles, which can run code when loaded; "
            "use a repository with safetensors or GGUF files",
            param="model",
        )
    raise UnsupportedError(
        f"{hub_id} has no supported model: neither config.json with {_SINGLE} (or shards), nor a .gguf",
        param="model",
    )


def cached_models() -> list[CachedModel]:
    """Return the supported models in the Hub's cache, ordered by name; damaged entries are skipped."""
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
            if _safetensors(sizes) and _REQUIRED[0] in sizes:
                n_bytes = sum(n for name, n in sizes.items() if not name.endswith(".gguf"))
                found.append(CachedModel(repo.repo_id, ref, n_bytes, root))
            ggufs = [name for name in sizes if name.endswith(".gguf")]
            found += [CachedModel(f"{repo.repo_id}:{name}", ref, sizes[name], root / name) for name in ggufs]
    return sorted(found, key=lambda model: (model.name, model.ref))


def remove(repo_id: str) -> tuple[Path, int] | None:
    """Delete all revisions of a model from the Hub's cache; return its folder and the bytes freed, or
    None."""
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


class _SilentBar(tqdm):  # type: ignore[type-arg]  # generic in its stub only
    """A progress bar that shows nothing."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **{**settings, "disable": True})  # type: ignore[call-overload]  # passed on


def _safetensors(files: Collection[str]) -> list[str]:
    """Return the weight files as transformers selects them: one file, or the index and all shards."""
    if _SINGLE in files:
        return [_SINGLE]
    shards = sorted(name for name in files if _SHARD.fullmatch(name))
    whole = len(shards) > 0 and shards[-1].endswith(f"-of-{len(shards):05}.safetensors")
    return [_INDEX, *shards] if whole and _INDEX in files else []


def _gguf(repo: str, variant: str, ggufs: list[str]) -> str:
    """Return the one file that `variant` names or that ends with it (`x-Q4_K_M.gguf`), case-insensitively."""
    wanted = variant.lower()
    exact = [name for name in ggufs if wanted in (name.lower(), PurePosixPath(name).name.lower())]
    ending = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}\.gguf")
    found = exact or [name for name in ggufs if ending.fullmatch(name.lower())]
    if len(found) == 1:
        if _SPLIT_GGUF.fullmatch(found[0]):
            raise UnsupportedError(
                f"{repo}: {found[0]} is one part of a split GGUF, which is not supported; "
                "merge the parts with llama-gguf-split --merge",
                param="model",
            )
        return found[0]
    problem = "no GGUF file" if not ggufs else ("no file" if not found else "more than one file")
    there = f"; there are: {', '.join(ggufs)}" if ggufs else ""
    raise RejectedError(f"{repo} has {problem} for {variant}{there}. Use {repo}:FILE.gguf", param="model")


def _listed(hub_id: HubId, commit: ResolvedRevision) -> tuple[Mapping[str, int], Exception | None]:
    """Return names and sizes of the repository's files from the Hub, or from the cache with the Hub's error.

    Raises the library's errors if neither is available.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        model_info = huggingface_hub.HfApi().model_info(
            hub_id.repo, revision=commit.resolved, files_metadata=True
        )
        return {file.rfilename: file.size or 0 for file in model_info.siblings or ()}, None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except Exception as e:  # noqa: BLE001 -- as in `fetch`
        failure = e
    try:
        folder = huggingface_hub.snapshot_download(hub_id.repo, revision=commit, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        raise failure from None
    if not isinstance(failure, errors.OfflineModeIsEnabled):
        _LOG.warning("cannot reach the Hub for %s (%s); using the cache", hub_id, _one_line(failure))
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}, failure


def _check_free_space(hub_id: HubId, sizes: Mapping[str, int], commit: ResolvedRevision) -> None:
    """Raise PullError before the download if the disk has too little space."""
    import huggingface_hub
    from huggingface_hub import constants

    missing = [
        n_bytes
        for name, n_bytes in sizes.items()
        if not isinstance(
            huggingface_hub.try_to_load_from_cache(hub_id.repo, name, revision=commit.resolved), str
        )
    ]
    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    n_free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if sum(missing) > n_free:
        raise PullError(
            f"{hub_id} needs {sum(missing) >> 20} MiB more, {cache} has {n_free >> 20} MiB free. "
            "Set HF_HOME to another folder",
            param="model",
        )


def _pull_error(hub_id: HubId, revision: str | None, error: Exception) -> PullError:
    """Translate an error of the library to a PullError with the fix."""
    from huggingface_hub import constants, errors

    hub, at = constants.ENDPOINT, f" at revision {revision}" if revision else ""
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        text = f"{hub_id} is gated: accept its terms at {hub}/{hub_id.repo}, then set HF_TOKEN to your token"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"{hub} has no model {hub_id.repo}, or it is private: check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{hub_id.repo} has no revision {revision}; it is a branch, a tag or a commit"
    elif isinstance(error, errors.HFValidationError):
        text = f"{hub_id.repo} is not a name that the Hub can have: {_one_line(error)}"
    elif status in (401, 403):
        text = f"{hub} rejects the token for {hub_id.repo} ({status}): check HF_TOKEN"
    elif isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        text = f"{hub_id}{at} is not (completely) cached, and HF_HUB_OFFLINE is set; unset it to download"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = f"the disk is full while {hub_id} is downloaded into {constants.HF_HUB_CACHE}"
    else:
        text = (
            f"{hub_id}{at} could not be downloaded from {hub} ({_one_line(error)}). Check the network and "
            "HF_ENDPOINT and pull again; complete files are kept. Or use a model folder or a .gguf file"
        )
    return PullError(text, param="model")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
