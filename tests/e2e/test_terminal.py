"""`llaisys chat` in a terminal: a progress bar, Ctrl-C stops a completion, Ctrl-D exits."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import COMMAND, END_S, Server, environment, long_model

CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = rb"\r\n> $"


class Terminal:
    """A command in a pseudo-terminal that the test reads and writes."""

    def __init__(self, *command: str) -> None:
        self._unread = b""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(TERM="dumb"),
            start_new_session=True,
            preexec_fn=lambda: os.close(
                os.open(os.ttyname(0), os.O_RDWR)
            ),  # makes it the controlling terminal
        )
        os.close(theirs)

    def until(self, pattern: bytes) -> None:
        """Read up to the first match of a regular expression; the rest stays unread."""
        while (match := re.search(pattern, self._unread)) is None:
            readable, _, _ = select.select([self._ours], [], [], END_S)
            try:
                more = os.read(self._ours, 65536) if readable else b""
            except OSError:  # the other end is closed
                more = b""
            if not more:
                seen = self._unread.decode(errors="replace")
                pytest.fail(
                    f"the command ended, or printed nothing for {END_S:.0f} s, before {pattern!r}: {seen}"
                )
            self._unread += more
        self._unread = self._unread[match.end() :]

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture(params=["here", "there"])
def chat(request: pytest.FixtureRequest, tiny: Server, tmp_path: Path) -> Iterator[Terminal]:
    where = (
        ("--url", tiny.url)
        if request.param == "there"
        else (str(long_model(tmp_path)), "--dtype", "float32", "--num-kv-cells", "65536")
    )
    terminal = Terminal(*COMMAND, "chat", *where, "--temperature", "0", "--min-tokens", "10000")
    yield terminal
    terminal.close()


def test_stopping_a_completion_and_exiting(chat: Terminal) -> None:
    chat.until(PROMPT)
    for _ in range(2):
        chat.type(b"Hello\n")
        chat.until(rb"(?s)Hello.{500}")  # longer than the echo of the input, so it is the completion
        chat.type(CTRL_C)
        chat.until(PROMPT)
    chat.type(b"/help\n")
    chat.until(rb"/clear starts a new conversation")
    chat.until(PROMPT)
    chat.type(CTRL_D)
    assert chat.process.wait(timeout=END_S) == 0


@pytest.mark.parametrize("flags", [(), ("--engine-process",)], ids=["in this process", "in its own"])
def test_a_progress_bar_shows_the_load_of_the_weights(flags: tuple[str, ...], tmp_path: Path) -> None:
    model = long_model(tmp_path)
    terminal = Terminal(*COMMAND, "chat", str(model), "--num-kv-cells", "4096", *flags)
    try:
        terminal.until(rf"loading {re.escape(model.name)}: +100%.*B/s".encode())
        terminal.until(PROMPT)
    finally:
        terminal.close()


def test_no_progress_bar_without_a_terminal(tiny: Server) -> None:
    tiny.wait_logged("loaded /")
    log = tiny.log.read_text("utf-8")
    assert "%|" not in log
    assert "\r" not in log
    assert len(re.findall(r"loading /", log)) == 1
    assert len(re.findall(r"loaded /", log)) == 1
