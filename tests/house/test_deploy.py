"""The systemd unit, the Dockerfile and the Kubernetes manifests match the server. None is started here."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from dockerfile import Build, stages
from llaisys.cli.config_flags import add_config_flags, overrides_of
from llaisys.config import Config

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "configs" / "kubernetes" / "llaisys.yaml"
# The oldest version that had support when the manifests were written.
KUBERNETES = "1.33"
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


def test_every_step_of_the_dockerfile_is_run_by_a_test_or_needs_root() -> None:
    """`tests/e2e/test_dockerfile.py` runs the steps; these are the ones that it leaves out."""
    found = stages((ROOT / "Dockerfile").read_text("utf-8"), Path("/image"))
    left_out = [
        command.split()[0]
        for stage in found.values()
        for step in stage.steps
        if step.name == "RUN"
        for command in map(str.strip, step.text.split("&&"))
        if command not in step.commands()
    ]
    assert left_out == ["apt-get", "apt-get", "rm", "useradd"]
    wheel = found["wheel"]
    (_, pip) = wheel.steps[1].commands()
    assert Build(found, ROOT, {}).moved(wheel, pip).startswith("/image/wheel/venv/bin/pip install ")


def test_local_files_are_excluded_from_the_image() -> None:
    ignored = set((ROOT / ".dockerignore").read_text("utf-8").splitlines())
    assert {".git", ".venv*", "target", "**/*.so", "**/*.pem", "**/*.env", "webui/node_modules"} <= ignored


def manifests() -> dict[str, Any]:
    """Return the manifests by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFESTS.read_text("utf-8"))}


def container() -> dict[str, Any]:
    (made,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(made)


def test_the_manifests_are_valid() -> None:
    for manifest in manifests().values():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_manifest_selects_the_pods_of_the_deployment() -> None:
    found = manifests()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == found["Deployment"]["metadata"]["name"]
    claim = found["Deployment"]["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"][
        "claimName"
    ]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_container_starts_a_command_that_exists_and_probes_routes_that_exist() -> None:
    verb, *arguments = container()["args"]
    assert verb == "serve"
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    given = overrides_of(parser.parse_args(arguments))
    assert given["engine_process"] is True
    probes = {name: container()[name]["httpGet"]["path"] for name in container() if name.endswith("Probe")}
    assert probes == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/livez"}
    (port,) = container()["ports"]
    assert port["containerPort"] == Config().port


def test_a_pod_has_time_to_leave_the_proxies_and_to_drain() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    sleep, pause_s = container()["lifecycle"]["preStop"]["exec"]["command"]
    arguments = container()["args"]
    shutdown_s = int(arguments[arguments.index("--shutdown-timeout") + 1])
    assert sleep == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(pause_s) + shutdown_s + 10
    assert manifests()["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_autoscaler_reads_a_metric_of_the_server() -> None:
    (metric,) = manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f'"{name}"' in (ROOT / "python" / "llaisys" / "server" / "metrics.py").read_text("utf-8")
