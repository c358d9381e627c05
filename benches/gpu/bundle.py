"""Make one archive that runs all phases on a bare machine with a GPU.

usage: bundle.py [--wheel FILE] [--out dist/gpu] [--limit-mb 52] [--nano-vllm CHECKOUT]

The archive has the wheel and those of its packages that PyTorch's environment lacks, unpacked for that
machine's Python. It also has the parity tests as programs, the phases with their inputs (prepare.py), and a
manifest. This script needs a network and Rust, which that machine does not have. It fails if the archive is
over its limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import parity_tests

ROOT = parity_tests.ROOT
GOLDENS = ROOT / "tests" / "data" / "goldens"
# The archive and the source tree without tests/data (10 MB) may have 64 MiB together.
LIMIT_MB = 52.0
PYTHON, PLATFORMS = "3.12", [f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)]
# The packages that `import llaisys` and the server need and that PyTorch and transformers do not install.
PACKAGES = (
    "annotated-types",
    "fastapi",
    "llguidance",
    "msgspec",
    "opentelemetry-api",
    "pydantic",
    "pydantic-settings",
    "pydantic_core",
    "python-dotenv",
    "starlette",
    "typing-inspection",
    "typing_extensions",
    "uvicorn",
)


class TooLarge(Exception):
    """The archive is over its limit; the text has the sizes."""


def newest_wheel() -> Path:
    """Return the newest wheel of `make wheel`."""
    found = sorted((ROOT / "dist").glob("llaisys-*-abi3-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("dist/ has no wheel: run `make wheel`, or name one with --wheel")
    return found[-1]


def install(wheel: Path, site: Path) -> None:
    """Unpack the wheel, and its packages in the versions of requirements.lock, for the other machine."""
    locked = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    pins = {line.partition("==")[0]: line for line in locked if "==" in line}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    command += [f"--platform={platform}" for platform in ("manylinux2014_x86_64", *PLATFORMS)]
    subprocess.run([*command, "--target", site, wheel, *(pins[name] for name in PACKAGES)], check=True)


def copy_tests(folder: Path) -> None:
    """Copy the parity tests, and the checkpoints that they read to the folder that `golden` uses."""
    folder.mkdir()
    shutil.copy2(parity_tests.build("parity"), folder / parity_tests.BINARY)
    sources = parity_tests.SOURCES.glob("*.rs")
    used = {name for path in sources for name in re.findall(r'golden\("([\w-]+)"\)', path.read_text("utf-8"))}
    for name in used:
        shutil.copytree(GOLDENS / name, folder / "goldens" / name)


def copy_scripts(folder: Path) -> None:
    """Copy the scripts of this folder, except those that make the bundle."""
    ignored = shutil.ignore_patterns("bundle.py", "prepare.py", "inputs", "__pycache__", ".*")
    shutil.copytree(Path(__file__).parent, folder, ignore=ignored)


def write_manifest(folder: Path, revision: str) -> None:
    """Write the size and SHA-256 of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    text = json.dumps({"revision": revision, "python": PYTHON, "files": entries}, indent=1)
    (folder / "manifest.json").write_text(text + "\n", "utf-8")


def pack(folder: Path, archive: Path, limit_mb: float) -> str:
    """Pack a folder and return the sizes as text. Raises TooLarge, and removes the archive."""
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    sizes = {
        path.name: sum(
            f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file()
        )
        for path in folder.iterdir()
    }
    parts = sorted(sizes.items(), key=lambda item: -item[1])
    lines = [f"{size / 1e6:8.1f} MB {name}" for name, size in parts if size >= 1e5]
    packed_mb = archive.stat().st_size / 1e6
    text = "\n".join([*lines, f"{packed_mb:8.1f} MB {archive}, of {limit_mb:.0f}"])
    if packed_mb > limit_mb:
        archive.unlink()
        raise TooLarge(text)
    return text


def main(given: Sequence[str] | None = None) -> None:
    """Parse the flags and make the archive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="default: the newest in dist/")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu")
    parser.add_argument("--limit-mb", type=float, default=LIMIT_MB)
    parser.add_argument("--nano-vllm", type=Path, help="passed to prepare.py: a peer of phase 4")
    options = parser.parse_args(given)
    folder: Path = options.out / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    copy_scripts(folder)
    copy_tests(folder / "tests")
    install(options.wheel or newest_wheel(), folder / "site")
    prepare = Path(__file__).with_name("prepare.py")
    peer = ["--nano-vllm", options.nano_vllm] if options.nano_vllm else []
    subprocess.run([sys.executable, prepare, "--out", folder / "inputs", *peer], check=True)
    write_manifest(folder, git.stdout.strip())
    try:
        print(pack(folder, options.out / "llaisys-gpu.tar.xz", options.limit_mb))
    except TooLarge as sizes:
        raise SystemExit(f"the bundle is too large:\n{sizes}") from None


if __name__ == "__main__":
    main()
