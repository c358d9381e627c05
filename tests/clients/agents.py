"""One task for the command lines of three coding agents: read two files, write a third, and report.

The agents and the server are real; the scripted server decides which tools are called. The words of the two
files are random and reach the prompt only as results of the agent's tools. So a third file with both words
shows that calls and results passed through template, tokenizer, parser and stream.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripted import Entry, call_text

from serving import Server

PACKAGES = Path(__file__).parent / "agents"
MODEL = "smollm2"
TASK = "Write the words of one.txt and two.txt into answer.txt."
THOUGHT = "The words are in two files."
LIMIT_S = 300
# Part of a prompt that the cache has from the prompt before: an agent appends to a conversation.
CACHED_SHARE = 0.9

CODEX_CONFIG = """\
model = "{model}"
model_provider = "llaisys"

[model_providers.llaisys]
name = "LLAISYS"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LLAISYS_API_KEY"
"""
OPENCODE_CONFIG: dict[str, Any] = {
    "model": "llaisys/{model}",
    "small_model": "llaisys/{model}",
    "provider": {
        "llaisys": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "{env:LLAISYS_API_KEY}"},
            "models": {"{model}": {"tool_call": True, "limit": {"context": 65536, "output": 8192}}},
        }
    },
}


@dataclass(frozen=True)
class Agent:
    """A command line with its settings for our server.

    - `path`: the route of its protocol.
    - `command`: its arguments before the task.
    - `reads`, `write`: its tool calls that do the task; `[[a]]` and `[[b]]` are the words.
    - `tool`: a tool of its own, which tells its prompts from those of other agents and of requests without
      tools.
    - `variables`, `files`: its environment, and files in its home folder, for the server's address.
    """

    name: str
    package: str
    path: str
    command: Sequence[str]
    tool: str
    reads: Sequence[str]
    write: str
    variables: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)

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
    models = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    return [
        Agent(
            "codex",
            "@openai/codex",
            "/v1/responses",
            ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
            "exec_command",
            [call_text("exec_command", cmd=f"cat {name}") for name in ("one.txt", "two.txt")],
            call_text("exec_command", cmd=f"printf '{answer}' > answer.txt"),
            {"LLAISYS_API_KEY": "{key}"},
            {".codex/config.toml": CODEX_CONFIG},
        ),
        Agent(
            "claude",
            "@anthropic-ai/claude-code",
            "/v1/messages",
            ("-p", "--permission-mode", "acceptEdits", "--allowedTools", "Read,Write", "--"),
            "Write",
            reads("claude", "Read", "file_path"),
            call_text("Write", file_path=file("claude", "answer.txt"), content=answer),
            {
                "ANTHROPIC_BASE_URL": "{url}",
                "ANTHROPIC_AUTH_TOKEN": "{key}",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                **{f"ANTHROPIC_{name}": "{model}" for name in models},
            },
        ),
        Agent(
            "opencode",
            "opencode-ai",
            "/v1/chat/completions",
            ("run",),
            "write",
            reads("opencode", "read", "filePath"),
            call_text("write", filePath=file("opencode", "answer.txt"), content=answer),
            {"LLAISYS_API_KEY": "{key}"},
            {".config/opencode/opencode.json": json.dumps(OPENCODE_CONFIG)},
        ),
    ]


def version_of(agent: Agent) -> str:
    """Return the installed version of its package."""
    facts = json.loads((PACKAGES / "node_modules" / agent.package / "package.json").read_text("utf-8"))
    return str(facts["version"])


def run_task(agent: Agent, server: Server, folder: Path, key: str) -> None:
    """Let the agent do the task; raise AssertionError if it was not done as its protocol prescribes."""
    home, work = folder / agent.name / "home", folder / agent.name / "work"
    work.mkdir(parents=True)
    words = [f"word{secrets.token_hex(4)}" for _ in range(2)]
    (work / "one.txt").write_text(f"first: {words[0]}\n", "utf-8")
    (work / "two.txt").write_text(f"second: {words[1]}\n", "utf-8")

    def filled(text: str) -> str:
        return text.replace("{url}", server.url).replace("{key}", key).replace("{model}", MODEL)

    for name, text in agent.files.items():
        path = home / name
        path.parent.mkdir(parents=True)
        path.write_text(filled(text), "utf-8")
    home.mkdir(exist_ok=True)
    variables = {name: filled(value) for name, value in agent.variables.items()}
    n_lines = len(server.log.read_text("utf-8").splitlines())
    done = subprocess.run(
        [str(PACKAGES / "node_modules" / ".bin" / agent.name), *agent.command, TASK],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert not any(tag in report for tag in ("<think>", "<tool_call>", "<|im_")), report
    assert f"The words are {words[0]} and {words[1]}." in done.stdout, report
    assert (work / "answer.txt").read_text("utf-8").strip() == " ".join(words), report
    logged = server.log.read_text("utf-8").splitlines()[n_lines:]
    check_requests(agent, [json.loads(line) for line in logged if line.startswith('{"time"')])


def check_requests(agent: Agent, requests: Sequence[Mapping[str, Any]]) -> None:
    """Raise AssertionError unless the task took three streams of the agent's route, and nothing failed.

    Each prompt after the first must begin with the cached prompt before it.
    """
    assert all(request["status"] == 200 for request in requests), requests
    assert {request["path"] for request in requests} == {agent.path}, requests
    assert all(request["stream"] for request in requests), requests
    # The first turn has the longest new prompt; a request for a title is shorter.
    longest = max(requests, key=lambda request: request["prompt_tokens"])["prompt_tokens"]
    turns = [request for request in requests if request["prompt_tokens"] > longest / 2]
    assert len(turns) == 3, requests
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
        except (AssertionError, OSError, subprocess.TimeoutExpired) as e:
            n_failed += 1
            print(f"FAILED  {agent.name:20} {type(e).__name__}: {str(e)[:4000]}", flush=True)
        else:
            print(f"ok      {agent.name:20} two files read, a third written, over {agent.path}", flush=True)
    print(f"{len(all_agents) - n_failed} of {len(all_agents)} tasks")
    return n_failed
