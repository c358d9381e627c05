"""One task for the command lines of three coding agents: read two files, write a third, and report.

The agents and the server are real; the scripted server decides which tools are called. The words of the two
files are random and reach the prompt only as results of the agent's tools. So a third file with both words
shows that calls and results passed through template, tokenizer, parser and stream.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripted import Entry, call_text

from serving import Server

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "tests" / "clients" / "agents" / "node_modules"
# What docs/guides/agents.md names.
MODEL, URL = "local", "http://127.0.0.1:8000"
TASK = "Write the words of one.txt and two.txt into answer.txt."
# Sandboxes need what containers lack.
UNCONFINED = ("codex exec", "codex exec --skip-git-repo-check --sandbox danger-full-access")
THOUGHT = "The words are in two files."
N_TURNS = 3
LIMIT_S = 600
# Part of a prompt that the cache has from the prompt before: an agent appends to a conversation.
CACHED_SHARE = 0.9


@dataclass(frozen=True)
class Agent:
    """The command line of an agent.

    - `heading`: its section of docs/guides/agents.md, whose blocks are run as printed.
    - `config`: the file in its home folder that the first block is; None if all settings are variables.
    - `path`: the route of its protocol.
    - `tool`: a tool of its own, which tells its prompts from those of other agents and of requests without
      tools.
    - `reads`, `write`: its tool calls that do the task; `[[a]]` and `[[b]]` are the words.
    """

    name: str
    package: str
    heading: str
    config: str | None
    path: str
    tool: str
    reads: Sequence[str]
    write: str

    def settings(self) -> list[str]:
        """Return the blocks of its section of the docs; the last is the command."""
        page = (ROOT / "docs" / "guides" / "agents.md").read_text("utf-8")
        section = page.split(f"\n### {self.heading}\n")[1].split("\n### ")[0]
        return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)

    def script(self) -> list[Entry]:
        """Return the completions of its three turns, the last turn first."""
        task = f'"name": "{self.tool}".*{TASK.replace(".", "[.]")}'
        words = task + r".*<tool_response>.*first: (?P<a>\w+).*second: (?P<b>\w+)"
        reads = "\n".join(self.reads)
        return [
            (f"{words}.*<tool_call>.*<tool_response>", "The words are [[a]] and [[b]]."),
            (words, f"Now I write them.\n{self.write}"),
            (task, f"<think>\n{THOUGHT}\n</think>\n\nI read both.\n{reads}"),
        ]


def agents(folder: Path) -> list[Agent]:
    """Return the agents, whose work folders are in `folder`."""

    def file(agent: str, name: str) -> str:
        return str(folder / agent / "work" / name)

    def reads(agent: str, tool: str, parameter: str) -> list[str]:
        return [call_text(tool, **{parameter: file(agent, name)}) for name in ("one.txt", "two.txt")]

    answer = "[[a]] [[b]]"
    return [
        Agent(
            "codex",
            "@openai/codex",
            "Codex",
            ".codex/config.toml",
            "/v1/responses",
            "exec_command",
            [call_text("exec_command", cmd=f"cat {name}") for name in ("one.txt", "two.txt")],
            call_text("exec_command", cmd=f"printf '{answer}' > answer.txt"),
        ),
        Agent(
            "claude",
            "@anthropic-ai/claude-code",
            "Claude Code",
            None,
            "/v1/messages",
            "Write",
            reads("claude", "Read", "file_path"),
            call_text("Write", file_path=file("claude", "answer.txt"), content=answer),
        ),
        Agent(
            "opencode",
            "opencode-ai",
            "opencode",
            ".config/opencode/opencode.json",
            "/v1/chat/completions",
            "write",
            reads("opencode", "read", "filePath"),
            call_text("write", filePath=file("opencode", "answer.txt"), content=answer),
        ),
    ]


def version_of(agent: Agent) -> str:
    """Return the installed version of its package."""
    facts = json.loads((PACKAGES / agent.package / "package.json").read_text("utf-8"))
    return str(facts["version"])


def run_task(agent: Agent, server: Server, folder: Path, key: str) -> None:
    """Let the agent do the task; raise AssertionError if it was not done as its protocol prescribes."""
    home, work = folder / agent.name / "home", folder / agent.name / "work"
    work.mkdir(parents=True)
    words = [f"word{secrets.token_hex(4)}" for _ in range(2)]
    (work / "one.txt").write_text(f"first: {words[0]}\n", "utf-8")
    (work / "two.txt").write_text(f"second: {words[1]}\n", "utf-8")

    *configs, command = (block.replace(URL, server.url) for block in agent.settings())
    assert TASK in command
    if agent.config is not None:
        (home / agent.config).parent.mkdir(parents=True)
        (home / agent.config).write_text(configs[0], "utf-8")
    home.mkdir(exist_ok=True)
    n_lines = len(server.log.read_text("utf-8").splitlines())
    path = f"{PACKAGES / '.bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", "-k", "5", str(LIMIT_S), "bash", "-euo", "pipefail", "-c", command.replace(*UNCONFINED)],
        cwd=work,
        env={"PATH": path, "HOME": str(home), "LLAISYS_API_KEY": key},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert not any(tag in report for tag in ("<think>", "<tool_call>", "<|im_")), report
    assert f"The words are {words[0]} and {words[1]}." in done.stdout, report
    assert (work / "answer.txt").read_text("utf-8").strip() == " ".join(words), report

    def logged() -> list[dict[str, Any]]:
        lines = server.log.read_text("utf-8").split("\n")[n_lines:-1]
        return [json.loads(line) for line in lines if line.startswith('{"time"')]

    server.wait_for(lambda: len(turns_of(logged())) >= N_TURNS)
    check_requests(agent, logged())


def turns_of(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the requests of the conversation. Others, such as that for a title, are far shorter."""
    sizes = [request.get("prompt_tokens", 0) for request in requests]
    return [request for request, size in zip(requests, sizes, strict=True) if size > max(sizes) / 2]


def check_requests(agent: Agent, requests: Sequence[Mapping[str, Any]]) -> None:
    """Raise AssertionError unless the task took three streams of the agent's route, and nothing failed.

    Each prompt after the first must begin with the cached prompt before it.
    """
    assert all(request["status"] == 200 for request in requests), requests
    assert {request["path"] for request in requests} == {agent.path}, requests
    assert all(request["stream"] for request in requests), requests
    turns = turns_of(requests)
    assert len(turns) == N_TURNS, requests
    for before, turn in pairwise(turns):
        assert turn["prompt_tokens"] > before["prompt_tokens"], turns
        assert turn["cached_tokens"] > CACHED_SHARE * before["prompt_tokens"], turns


def run_agents(server: Server, folder: Path, key: str) -> int:
    """Let each agent do the task; print one line per agent, and return the number that failed."""
    all_agents = agents(folder)
    print("# agents:", ", ".join(f"{agent.package} {version_of(agent)}" for agent in all_agents), flush=True)
    n_failed = 0
    for agent in all_agents:
        try:
            run_task(agent, server, folder, key)
        except (AssertionError, OSError) as e:
            n_failed += 1
            print(f"FAILED  {agent.name:20} {type(e).__name__}: {str(e)[:4000]}", flush=True)
        else:
            print(f"ok      {agent.name:20} two files read, a third written, over {agent.path}", flush=True)
    print(f"{len(all_agents) - n_failed} of {len(all_agents)} tasks")
    return n_failed
