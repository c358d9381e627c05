"""The Dockerfile's steps, run in a plain shell, give a server that starts, is healthy and drains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dockerfile import Build, Stage, stages
from serving import END_S, READY, environment

ROOT = Path(__file__).parents[2]
# It compiles the core, and npm and pip may have to download.
pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The last stage. A virtual environment stands for the Python of its base image."""
    root = tmp_path_factory.mktemp("image")
    made = stages((ROOT / "Dockerfile").read_text("utf-8"), root)
    tools = {name: os.environ[name] for name in ("PATH", "HOME")}
    python = root / "python"
    subprocess.run([sys.executable, "-m", "venv", python], check=True)
    # Kept between runs, as the layers of an image are.
    tools["CARGO_TARGET_DIR"] = str(ROOT / "target" / "dockerfile")
    Build(made, ROOT, tools).run("webui")
    Build(made, ROOT, tools).run("wheel")
    tools["PATH"] = f"{python / 'bin'}:/usr/bin:/bin"
    stage = Build(made, ROOT, tools).run("final")
    stage.env["PATH"] = tools["PATH"]
    return stage


@contextmanager
def started(image: Stage, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run the image's command, with the model cache of this machine."""
    words = [
        word
        for name in ("ENTRYPOINT", "CMD")
        for step in image.steps
        if step.name == name
        for word in step.words()
    ]
    cache = {k: v for k, v in environment().items() if k in ("HOME", "LLAISYS_HOME", "XDG_CACHE_HOME")}
    kept = {k: v for k, v in image.env.items() if k != "LLAISYS_HOME"}
    with subprocess.Popen(
        words,
        env={**kept, **cache, **env},
        cwd=image.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_web_ui_and_the_core_are_installed(image: Stage) -> None:
    code = "import llaisys, llaisys._core, pathlib; print(pathlib.Path(llaisys.__file__).parent)"
    done = subprocess.run(
        ["python", "-c", code], env=image.env, cwd=image.root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    package = Path(done.stdout.strip())
    assert not package.is_relative_to(ROOT)
    assert (package / "webui" / "index.html").is_file()


def test_without_a_key_it_refuses_to_listen(image: Stage) -> None:
    with started(image) as process:
        _, error = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert "LLAISYS_API_KEY" in error


def test_it_serves_is_healthy_and_drains(image: Stage) -> None:
    (check,) = [step.text for step in image.steps if step.name == "HEALTHCHECK"]
    (stop,) = [step.text for step in image.steps if step.name == "STOPSIGNAL"]
    with started(image, LLAISYS_API_KEY="secret", LLAISYS_PORT="0") as process:
        assert process.stdout is not None
        ready = READY.match(process.stdout.readline())
        assert ready is not None
        (port,) = re.findall(r":(\d+)$", ready[2])
        probe = [word.replace(":8000/", f":{port}/") for word in json.loads(check.removeprefix("CMD "))]
        assert subprocess.run(probe, env=image.env).returncode == 0
        process.send_signal(getattr(signal, stop))
        process.communicate(timeout=END_S)
        assert process.returncode == 0
