"""The cheap cases of the attack corpus against one server: their replies, and the state that they leave.

`make attack` runs all cases on a real model, and measures how long other clients wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from attack.corpus import CASES
from attack.target import Case, Target
from serving import GOLDENS, Server, serving

KEYS = ("sk-attacker-0123456789", "sk-neighbor-0123456789")
FLAGS = ("--dtype", "float32", "--max-num-seqs", "8", "--num-kv-cells", "4096", "--log-level", "warning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attack")
    with serving(folder, str(GOLDENS / "qwen2-tied-bf16"), *FLAGS, key=",".join(KEYS)) as made:
        yield made


@pytest.fixture(scope="module")
def target(server: Server) -> Target:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return Target(host, int(port), server.process.pid, *KEYS)


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 120
    assert len({(case.group, case.name) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.is_long], ids=lambda case: f"{case.group}-{case.name}"
)
def test_each_case_gets_an_allowed_reply(case: Case, target: Target, server: Server) -> None:
    assert case.check(case.attack(target)) > 0
    assert server.process.poll() is None, server.log.read_text("utf-8")[-2000:]
    assert target.get("/livez", key=None).status == 200
    after = target.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, key=target.other_key)
    assert after.status == 200, after.head


def test_no_state_is_left_behind(target: Target, server: Server) -> None:
    """After all cases the process runs, no request is open, and the log has no traceback."""
    server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
    server.wait_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert psutil.Process(target.pid).is_running()
    log = server.log.read_text("utf-8")
    assert "Traceback" not in log, log[-3000:]
