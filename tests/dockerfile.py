"""The steps of the Dockerfile in a plain shell: a stage is a folder, and absolute paths lie in it.

What this cannot show: the base images, their Python, Node and Rust, and steps that need root (`NEEDS_ROOT`).
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Commands that change the system of an image, not files of ours.
NEEDS_ROOT = ("apt-get", "rm -rf /var/lib/apt", "useradd")
# Instructions that describe the image and run nothing.
METADATA = ("VOLUME", "EXPOSE", "STOPSIGNAL", "USER", "HEALTHCHECK")


@dataclass(frozen=True)
class Step:
    """One instruction of a stage, with its continued lines joined. `flags`: those before the arguments."""

    name: str
    flags: tuple[str, ...]
    text: str

    def commands(self) -> list[str]:
        """Return the parts of a RUN step that need no root."""
        parts = [part.strip() for part in self.text.split("&&")]
        return [part for part in parts if not part.startswith(NEEDS_ROOT)]

    def words(self) -> list[str]:
        """Return the arguments of the JSON form (ENTRYPOINT, CMD)."""
        return [str(word) for word in json.loads(self.text)]


@dataclass
class Stage:
    """A stage: the folder that stands for `/`, the working directory in it, and its environment."""

    root: Path
    steps: list[Step]
    folder: str = "/"
    env: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return where a path of the image lies."""
        return self.root / str(Path(self.folder) / name).lstrip("/")


def stages(text: str, root: Path) -> dict[str, Stage]:
    """Return the stages by name (the last one is `final`), after reading every line of the file."""
    made: dict[str, Stage] = {}
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.M))
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            assert image
            name = stage or "final"
            made[name] = Stage(root / name, [])
            continue
        words = rest.split()
        has_flags = name in ("COPY", "HEALTHCHECK")
        flags = tuple(word for word in words if has_flags and word.startswith("--"))
        for flag in flags:
            rest = rest.replace(flag, "", 1)
        assert re.fullmatch(r"[A-Z]+", name), line
        list(made.values())[-1].steps.append(Step(name, flags, rest.strip()))
    return made


class Build:
    """Carries out the stages of a Dockerfile with the build context `context`.

    `tools`: variables of each command, such as the `PATH` with what the base images have.
    """

    def __init__(self, made: Mapping[str, Stage], context: Path, tools: Mapping[str, str]) -> None:
        self._stages = made
        self._context = context
        self._tools = tools
        names = set().union(*map(_top_folders, made.values()))
        self._paths = re.compile(rf"(?<![\w/.])/(?=(?:{'|'.join(sorted(names))})(?:[/\s]|$))")

    def run(self, name: str) -> Stage:
        """Carry out a stage. Raises AssertionError with the output of a command that fails."""
        stage = self._stages[name]
        stage.root.mkdir()
        for step in stage.steps:
            if step.name == "WORKDIR":
                stage.folder = step.text
                stage.path("").mkdir(parents=True, exist_ok=True)
            elif step.name == "ENV":
                stage.env |= dict(word.split("=", 1) for word in shlex.split(step.text))
            elif step.name == "COPY":
                self._copy(stage, step)
            elif step.name == "RUN":
                for command in step.commands():
                    self._shell(stage, command)
            else:
                assert step.name in (*METADATA, "ENTRYPOINT", "CMD"), step
        return stage

    def _copy(self, stage: Stage, step: Step) -> None:
        *sources, target = step.text.split()
        (other,) = [self._stages[flag.removeprefix("--from=")] for flag in step.flags] or [None]
        for source in sources:
            found = self._context / source if other is None else other.path(source)
            assert found.exists(), f"{step}: {source} does not exist"
            to = stage.path(target)
            if found.is_dir():
                ignored = self._ignored if other is None else None
                shutil.copytree(found, to, dirs_exist_ok=True, ignore=ignored)
            else:
                to = to / found.name if target.endswith("/") else to
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, to)

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        """Return what `.dockerignore` excludes of a folder: patterns of the top, or `**/` of any depth."""
        patterns = (self._context / ".dockerignore").read_text("utf-8").split("\n")
        here = Path(folder).relative_to(self._context)
        found = set()
        for pattern in patterns:
            if pattern.startswith("**/"):
                found |= set(fnmatch.filter(names, pattern[3:]))
            elif pattern and not pattern.startswith("#"):
                found |= {name for name in names if fnmatch.fnmatch(str(here / name), pattern)}
        return found

    def _shell(self, stage: Stage, command: str) -> None:
        done = subprocess.run(
            ["sh", "-c", self.moved(stage, command)],
            cwd=stage.path(""),
            env={**self._tools, **stage.env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    def moved(self, stage: Stage, command: str) -> str:
        """Return a command with the paths of the image replaced by those in the stage's folder."""
        return self._paths.sub(f"{stage.root}/", command)


def _top_folders(stage: Stage) -> set[str]:
    """Return the names of the folders below `/` that the stage's steps name."""
    text = " ".join(step.text for step in stage.steps if step.name in ("RUN", "WORKDIR", "COPY"))
    return set(re.findall(r"(?<![\w/.])/(\w+)", text))
