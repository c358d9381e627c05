"""Settings that name a file: none blocks on a FIFO, and other than regular files are rejected."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from llaisys.config import FILE_BYTES_MAX, Config, load_config
from llaisys.errors import RejectedError
from llaisys.files import open_regular
from llaisys.server.listener import tls_options
from llaisys.server.middleware.auth import Keyring
from llaisys.text.model_files import read_text
from open_files import open_files


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A FIFO without a writer: opening it as a plain file would block forever."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_a_regular_file_is_opened_and_so_is_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    for name in ("plain", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"text"


def test_other_files_are_rejected_at_once(tmp_path: Path, fifo: Path) -> None:
    for path in (fifo, tmp_path, Path("/dev/zero"), Path("/dev/tty"), tmp_path / "missing"):
        with pytest.raises(OSError, match=r"regular file|No such"):
            open_regular(path)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            open_regular(tmp_path / "socket")
    assert not open_files(tmp_path) + open_files(Path("/dev/zero")) + open_files(Path("/dev/tty"))


@pytest.mark.parametrize(
    ("param", "read"),
    [
        ("api_key_file", lambda path: Keyring.of(Config(api_key_file=path))),
        ("ssl_certfile", lambda path: tls_options(Config(ssl_certfile=path, ssl_keyfile=path))),
        ("model", read_text),  # a chat template, and each text file of a model folder
    ],
)
def test_a_fifo_is_rejected_by_the_name_of_its_setting(
    fifo: Path, param: str, read: Callable[[Path], object]
) -> None:
    with pytest.raises(RejectedError, match=f"{fifo}: it is not a regular file") as caught:
        read(fifo)
    assert caught.value.param == param


def test_a_configuration_may_come_from_another_program() -> None:
    """The shell's `<(...)` is the reading end of a pipe."""
    reading, writing = os.pipe()
    os.write(writing, b"max_num_seqs: 7\n")
    os.close(writing)
    try:
        assert load_config(yaml_path=Path(f"/dev/fd/{reading}")).max_num_seqs == 7
    finally:
        os.close(reading)


def test_an_endless_or_binary_configuration_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match=f"/dev/zero is larger than {FILE_BYTES_MAX} bytes"):
        load_config(yaml_path=Path("/dev/zero"))
    (tmp_path / "c.yaml").write_bytes(b"\xff")
    with pytest.raises(RejectedError, match="cannot read the configuration file"):
        load_config(yaml_path=tmp_path / "c.yaml")
