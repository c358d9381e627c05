"""`llaisys generate` and `llaisys chat`, without and with a server."""

from __future__ import annotations

import os
import subprocess

import pytest

from serving import COMMAND, END_S, GOLDENS, Server, environment

MODEL = str(GOLDENS / "qwen2-tied-bf16")
EXACT = ("--temperature", "0", "--max-tokens", "8")
LOCAL = (MODEL, "--dtype", "float32", "--num-kv-cells", "512")


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, env=environment(), timeout=END_S
    )


def test_generate_prints_the_completion_of_a_server(tiny: Server) -> None:
    body = {"prompt": "Hello there", "temperature": 0, "max_tokens": 8}
    expected = tiny.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    typed = run("generate", *LOCAL, *EXACT, "--prompt", "Hello there")
    assert (typed.returncode, typed.stdout) == (0, f"{expected}\n"), typed.stderr
    assert run("generate", *LOCAL, *EXACT, stdin="Hello there").stdout == typed.stdout


def test_generate_reports_invalid_arguments() -> None:
    assert "temperature is 9" in run("generate", *LOCAL, "--prompt", "x", "--temperature", "9").stderr
    assert "context" in run("generate", *LOCAL, "--prompt", "x", "--max-tokens", "100K").stderr
    unknown = run("generate", "--max-tokns", "3")
    assert unknown.returncode == 2
    assert "--max-tokens" in unknown.stderr


def test_chat_is_the_same_in_this_process_and_on_a_server(tiny: Server) -> None:
    lines = "Hello\n\nAnd now?\n/clear\nHello\n/exit\nnever\n"
    here = run("chat", *LOCAL, *EXACT, "--system", "Be brief.", stdin=lines)
    assert here.returncode == 0, here.stderr
    there = run("chat", "--url", tiny.url, *EXACT, "--system", "Be brief.", stdin=lines)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    response = tiny.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert here.stdout.startswith(response + "\n")
    assert here.stdout.endswith(response + "\n")
    assert len(here.stdout) > 2 * len(response)


def test_chat_continues_after_a_rejected_message(tiny: Server) -> None:
    done = run("chat", *LOCAL, "--max-tokens", "8", stdin=f"{'word ' * 1000}\nHello\n")
    assert done.returncode == 0
    assert "512" in done.stderr
    assert done.stdout.strip()
    remote = run("chat", "--url", f"{tiny.url}/v1/", "--temperature", "9", stdin="Hello\n")
    assert "temperature is 9" in remote.stderr


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:1"])
def test_chat_names_a_server_that_cannot_be_reached(url: str) -> None:
    done = run("chat", "--url", url, stdin="Hello\n")
    assert url in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["chat", "chat --url", "generate", "config"])
def test_a_closed_stdout_ends_a_command(tiny: Server, command: str) -> None:
    """As in `llaisys chat | head -1`: the command exits with 141 and prints no error."""
    more = {"chat --url": (tiny.url,), "config": ("show",)}.get(command, (*LOCAL, *EXACT))
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *command.split(), *more],
            input="Hello\n",
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=END_S,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_help_has_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"llaisys {command}" in done.stdout.split("examples:")[1]
