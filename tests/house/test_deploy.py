"""What an operator is given: the systemd unit and the Dockerfile fit the server that they are for. Neither is
built or started here."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

from llaisys.cli.config_flags import add_config_flags, overrides_of
from llaisys.config import Config

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "configs" / "llaisys.service"
# What keeps a server that was taken over from the machine.
HARDENING = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "RestrictSUIDSGID": "yes",
    "MemoryDenyWriteExecute": "yes",
    "SystemCallArchitectures": "native",
}


def unit() -> dict[str, list[str]]:
    """Directive -> its values, in their order. Every line is a comment, a section or a directive."""
    made: dict[str, list[str]] = {}
    for line in UNIT.read_text("utf-8").splitlines():
        if not line or line[0] in "#[":
            continue
        name, equals, value = line.partition("=")
        assert equals, line
        assert re.fullmatch(r"[A-Z][A-Za-z]+", name), line
        made.setdefault(name, []).append(value)
    return made


def test_the_unit_starts_a_command_that_exists() -> None:
    (command,) = unit()["ExecStart"]
    program, verb, *arguments = shlex.split(command)
    assert (Path(program).name, verb) == ("llaisys", "serve")
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    given = overrides_of(parser.parse_args(arguments))
    (runtime,) = unit()["RuntimeDirectory"]
    assert given["uds"] == Path("/run") / runtime / "llaisys.sock"


def test_the_unit_gives_a_drain_its_time() -> None:
    """For the drain, a step under way and the end of the process. A dead engine is restarted."""
    found = unit()
    assert int(found["TimeoutStopSec"][0]) >= Config().shutdown_timeout_s + 10
    assert (found["KillSignal"], found["KillMode"], found["Restart"]) == (
        ["SIGTERM"],
        ["mixed"],
        ["on-failure"],
    )


def test_the_unit_is_hardened() -> None:
    found = unit()
    assert {name: found.get(name) for name in HARDENING} == {n: [value] for n, value in HARDENING.items()}
    assert found["UMask"] == ["0007"]


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_does_not_run_as_root_and_stops_by_the_signal_that_drains() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", last, re.M)
    assert re.search(r"^STOPSIGNAL SIGTERM$", last, re.M)
    copied = [path for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for path in line.split()]
    assert all((ROOT / path).exists() for path in copied), copied


def test_nothing_of_this_machine_gets_into_the_image() -> None:
    ignored = set((ROOT / ".dockerignore").read_text("utf-8").splitlines())
    assert {".git", ".venv*", "target", "**/*.so", "**/*.pem", "**/*.env", "webui/node_modules"} <= ignored
