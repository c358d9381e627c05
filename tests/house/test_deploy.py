"""The systemd unit and the Dockerfile match the server. Neither is built or started here."""

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
# Restrictions that protect the machine from a compromised server.
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
    """Return each directive of the unit with its values in order, after checking every line."""
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


def test_the_unit_allows_time_for_a_drain() -> None:
    """The stop timeout covers the drain, a running step and the exit. A dead engine is restarted."""
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


def test_local_files_are_excluded_from_the_image() -> None:
    ignored = set((ROOT / ".dockerignore").read_text("utf-8").splitlines())
    assert {".git", ".venv*", "target", "**/*.so", "**/*.pem", "**/*.env", "webui/node_modules"} <= ignored
