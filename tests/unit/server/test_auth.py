"""API keys: their sources, the stored hashes, and the errors of an invalid keys file."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from llaisys.config import Config, load_config
from llaisys.errors import RejectedError
from llaisys.server.middleware.auth import FILE_BYTES_MAX, Keyring
from llaisys.server.middleware.hosts import check_exposure
from llaisys.server.protocol import cache_salt, engine_id

SECURITY = Path(__file__).parents[3] / "docs" / "operations" / "security.md"


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keyring(tmp_path: Path, text: str, *keys: str) -> Keyring:
    path = tmp_path / "keys.txt"
    path.write_text(text, "utf-8")
    return Keyring.of(Config(api_key=keys, api_key_file=path))


def test_a_keys_file_names_its_clients(tmp_path: Path) -> None:
    text = f"# ours\n\nalice {hashed('a1')}\nalice\t{hashed('a2').upper()}\n  bob.2 {hashed('schlüssel')}\n"
    keys = keyring(tmp_path, text, "plain")
    assert [keys.client_of(key.encode()) for key in ("a1", "a2", "schlüssel")] == ["alice", "alice", "bob.2"]
    assert keys.client_of(b"plain") == hashed("plain")[:16]
    for wrong in (b"", b"a", b"a1 ", b"alice", hashed("a1").encode(), "schlüssel".encode("latin-1")):
        assert keys.client_of(wrong) is None


def test_clients_are_counted_by_name(tmp_path: Path) -> None:
    text = f"a {hashed('a1')}\na {hashed('a2')}\nb {hashed('b')}\n"
    assert keyring(tmp_path, text).n_clients == 2
    assert keyring(tmp_path, text, "plain").n_clients == 3
    assert Keyring().n_clients == 0


def test_cache_salts_and_request_ids_of_different_clients_never_collide() -> None:
    """Client names contain no slash, so no salt of a client can imitate another client."""
    salts = {
        (c, s): cache_salt(c, s, "per-key") for c in ("a", "b", "a-b") for s in ("", "b/", "/", "a/x", "x")
    }
    assert len(set(salts.values())) == len(salts)
    assert cache_salt("a", "x", "all") == cache_salt("", "x", "per-key") == "x"
    assert len({engine_id(c, i) for c in ("", "a", "b") for i in ("cmpl-a", "cmpl-b")}) == 6
    assert engine_id("", "cmpl-a") == "cmpl-a"


def test_without_keys_the_keyring_is_empty() -> None:
    assert not Keyring.of(Config())


def test_only_hashes_of_keys_are_stored(tmp_path: Path) -> None:
    keys = keyring(tmp_path, f"a {hashed('in-the-file')}\n", "canary-key")
    assert "canary-key" not in repr(vars(keys))
    assert "canary-key" not in repr(Config(api_key=("canary-key",)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no keys"),
        ("# nothing\n", "has no keys"),
        ("alice canary-key\n", "line 1: expected NAME"),
        (f"ok {hashed('a')}\ncanary-key\n", "line 2: expected NAME"),
        (f"a/b {hashed('canary-key')}\n", "line 1: expected NAME"),
        (f"a {hashed('k')} more\n", "line 1"),
        (f"a {hashed('k')}\nb {hashed('k')}\n", "line 2: an earlier line has the same key"),
        (f"a {hashed('k')}\nb {hashed('')}\n", "line 2: this is the hash of an empty key"),
        ("a" * (FILE_BYTES_MAX + 1), "larger than"),
    ],
)
def test_an_invalid_keys_file_stops_the_start_and_shows_no_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RejectedError, match=says) as caught:
        keyring(tmp_path, text)
    assert caught.value.param == "api_key_file"
    assert "canary-key" not in str(caught.value)


def test_a_keys_file_that_is_missing_or_not_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match=r"missing.*No such file"):
        Keyring.of(Config(api_key_file=tmp_path / "missing"))
    (tmp_path / "keys.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(RejectedError, match="not UTF-8"):
        Keyring.of(Config(api_key_file=tmp_path / "keys.txt"))


def test_an_invalid_key_in_the_configuration_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("api_key: [[canary-key]]\n")
    with pytest.raises(RejectedError, match="api_key") as caught:
        load_config(yaml_path=tmp_path / "c.yaml")
    assert "canary-key" not in str(caught.value)


def test_a_keys_file_allows_other_addresses(tmp_path: Path) -> None:
    check_exposure(Config(host="0.0.0.0", api_key_file=tmp_path / "keys.txt"))


def test_the_documented_commands_make_a_key(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```bash\n(key=.*?)```", SECURITY.read_text("utf-8"), re.DOTALL)
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    keys = Keyring.of(Config(api_key_file=tmp_path / "keys.txt"))
    assert keys.client_of(done.stdout.strip().encode()) == "alice"
