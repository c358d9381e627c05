"""Models by Hugging Face id: `huggingface_hub` in a separate process against a fake Hub."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.hub import TOKEN, FakeHub, Repo, fake_hub
from serving import COMMAND, END_S, GOLDENS, environment

GOLDEN = GOLDENS / "qwen2-tied-bf16"
SHARDED = GOLDENS / "qwen2-odd-f32-sharded"
BIG = random.Random(1).randbytes(24 << 20)
EXTRA = {
    "README.md": b"# tiny",
    "pytorch_model.bin": b"\x80\x04.",
    "onnx/model.onnx": b"x",
}


def folder(path: Path) -> dict[str, bytes]:
    """Return the files of a golden model, without those of the tests."""
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.suffix != ".npz" and p.stat().st_size}


class Shell:
    """Run `llaisys` with its own empty Hugging Face cache."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        self.home, self.hub = folder / "hf", hub

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {k: v for k, v in environment().items() if not k.startswith(("HF_", "HUGGING"))}
        ours = {
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.hub.url,
            "LLAISYS_HOME": str(self.home / "ours"),
            "HF_HUB_ETAG_TIMEOUT": f"{END_S:.0f}",
            "HF_HUB_DOWNLOAD_TIMEOUT": f"{END_S:.0f}",
        }
        return {**kept, **ours, "NO_PROXY": "127.0.0.1", **extra}

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            capture_output=True,
            text=True,
            env=self.environment(**extra),
            timeout=END_S,
        )

    def fails(self, *arguments: str, **extra: str) -> str:
        """Return the last line of the error."""
        done = self.run(*arguments, **extra)
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1]

    def files(self) -> list[str]:
        """Return the names of complete files in the snapshots of the cache."""
        return sorted(p.name for p in self.home.glob("hub/models--*/snapshots/*/*"))


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    """Serve one repository of each kind."""
    tiny = folder(GOLDEN)
    with fake_hub(
        acme__tiny=Repo({**tiny, **EXTRA, "consolidated.safetensors": b"x"}),
        acme__sharded=Repo(folder(SHARDED)),
        acme__gated=Repo(tiny, gated=True),
        acme__private=Repo(tiny, private=True),
        acme__pickles=Repo({"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."}),
        acme__quants=Repo({f"quants-{q}.gguf": q.encode() * 9 for q in ("Q4_0", "Q8_0", "BF16")}),
        acme__flaky=Repo({"big.gguf": BIG}, cut=11 << 20, n_cuts=2),
    ) as made:
        yield made


@pytest.fixture
def shell(tmp_path: Path, hub: FakeHub) -> Shell:
    hub.requests.clear()
    return Shell(tmp_path, hub)


def test_a_model_is_pulled_listed_run_offline_and_removed(shell: Shell) -> None:
    done = shell.run("pull", "acme/tiny")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert {p.name for p in path.iterdir()} == set(folder(GOLDEN)), (
        "only files that are read: no pickles and no other formats"
    )
    assert (path / "model.safetensors").read_bytes() == (GOLDEN / "model.safetensors").read_bytes()

    shell.hub.requests.clear()
    again = shell.run("pull", "https://huggingface.co/acme/tiny", "--quiet")
    assert (again.stdout, again.stderr) == (done.stdout, "")
    assert shell.hub.fetched() == [], "complete files stay"

    shell.hub.requests.clear()
    flags = ("--prompt", "Hi", "--max-tokens", "4", "--temperature", "0", "--num-kv-cells", "64")
    offline = shell.run("generate", "acme/tiny", *flags, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == shell.run("generate", str(GOLDEN), *flags).stdout
    assert shell.hub.requests == []

    listed = next(line for line in shell.run("models").stdout.splitlines() if line.startswith("acme/tiny"))
    assert listed.split()[1:] == ["0.3", "MB", "-", "Hugging", "Face", "main", str(path)]
    assert "is not the name of a cached model" in shell.fails("rm", str(path))
    removed = shell.run("rm", "acme/tiny")
    assert removed.stdout.startswith(f"deleted {path.parents[1]} (")
    assert not path.parents[1].exists()
    assert "'acme/tiny' is not the name of a cached model; cached are: nothing" in shell.fails(
        "rm", "acme/tiny"
    )


def test_shards_are_fetched_with_their_index(shell: Shell) -> None:
    done = shell.run("pull", "acme/sharded", "--revision", shell.hub.repos["acme/sharded"].commit)
    assert done.returncode == 0, done.stderr
    names = {p.name for p in Path(done.stdout.strip()).iterdir()}
    assert names >= {
        "model.safetensors.index.json",
        *(f"model-0000{i}-of-00006.safetensors" for i in range(1, 7)),
    }


def test_one_gguf_of_several_is_pulled(shell: Shell) -> None:
    done = shell.run("pull", "hf.co/acme/quants:q8_0")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "quants-Q8_0.gguf"
    assert shell.hub.fetched() == ["quants-Q8_0.gguf"]
    assert "acme/quants:quants-Q8_0.gguf" in shell.run("models").stdout
    assert "there are: quants-BF16.gguf, quants-Q4_0.gguf, quants-Q8_0.gguf" in shell.fails(
        "pull", "acme/quants"
    )
    assert "rm deletes whole repositories only; use `llaisys rm acme/quants`" in shell.fails(
        "rm", "acme/quants:Q8_0"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("acme/absent",), "has no model acme/absent, or it is private: check the name, or set HF_TOKEN"),
        (("acme/tiny", "--revision", "v9"), "acme/tiny has no revision v9"),
        (("acme/gated",), "acme/gated is gated: accept its terms at"),
        (("acme/private",), "or it is private"),
        (("acme/pickles",), "only as pickles, which can run code"),
        (("acme/-x",), "no model 'acme/-x'"),
    ],
)
def test_an_error_of_the_hub_is_reported(shell: Shell, arguments: tuple[str, ...], words: str) -> None:
    assert words in shell.fails("pull", *arguments)
    assert not any(name.endswith((".safetensors", ".gguf", ".bin")) for name in shell.files())


def test_a_token_gives_access_to_a_gated_model(shell: Shell) -> None:
    assert "rejects the token" in shell.fails("pull", "acme/gated", HF_TOKEN="hf_wrong")
    done = shell.run("pull", "acme/gated", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in shell.files()


def test_a_dropped_download_is_resumed(shell: Shell) -> None:
    done = shell.run("pull", "acme/flaky")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == BIG
    ranges = [r for method, path, r in shell.hub.requests if method == "GET" and path.endswith(".gguf")]
    # The library writes pieces of 10 MiB, so a download that ends after 11 MiB continues after 10.
    assert ranges == ["", f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


def test_an_interrupted_pull_leaves_only_complete_files(tmp_path: Path) -> None:
    go_on = threading.Event()
    files = folder(GOLDEN)
    with fake_hub(acme__slow=Repo(files, stall=go_on)) as hub:
        shell = Shell(tmp_path, hub)
        command = [*COMMAND, "pull", "acme/slow"]
        with subprocess.Popen(command, env=shell.environment(), stderr=subprocess.PIPE, text=True) as process:
            assert hub.stalled.wait(timeout=END_S)
            process.send_signal(signal.SIGKILL)
        go_on.set()
        assert "model.safetensors" not in shell.files()
        assert "not (completely) cached" in shell.fails("pull", "acme/slow", HF_HUB_OFFLINE="1")
        hub.repos["acme/slow"].stall = None
        kept = set(shell.files())
        hub.requests.clear()
        assert shell.run("pull", "acme/slow").returncode == 0
        assert set(hub.fetched()) == set(shell.files()) - kept
        assert "model.safetensors" in shell.files()


def test_ctrl_c_ends_a_pull_at_once(tmp_path: Path) -> None:
    with fake_hub(acme__slow=Repo(folder(GOLDEN), trickle=True)) as hub:
        shell = Shell(tmp_path, hub)
        with subprocess.Popen([*COMMAND, "pull", "acme/slow"], env=shell.environment()) as process:
            assert hub.stalled.wait(timeout=END_S)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=END_S) == 130
        assert "model.safetensors" not in shell.files()


def test_without_a_hub_the_cache_serves(tmp_path: Path) -> None:
    with fake_hub(acme__tiny=Repo(folder(GOLDEN))) as hub:
        shell = Shell(tmp_path, hub)
        assert "HF_HUB_OFFLINE is set" in shell.fails("pull", "acme/tiny", HF_HUB_OFFLINE="1")
        first = shell.run("pull", "acme/tiny")
    done = shell.run("pull", "acme/tiny")
    assert (done.returncode, done.stdout) == (0, first.stdout)
    assert "using the cache" in done.stderr
    assert "Check the network and HF_ENDPOINT" in shell.fails("pull", "acme/other")


def test_a_cache_of_another_program_is_used(tmp_path: Path) -> None:
    """As transformers leaves it: without a list of the repository, and with files that are not read."""
    with fake_hub() as hub:
        shell = Shell(tmp_path, hub)
    repo = shell.home / "hub" / "models--acme--made"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    (repo / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for name, data in folder(GOLDEN).items():
        (repo / "blobs" / name).write_bytes(data)
        os.symlink(f"../../blobs/{name}", snapshot / name)
    done = shell.run("pull", "acme/made", HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == str(snapshot), done.stderr
    shutil.rmtree(repo / "refs")
    assert "not (completely) cached" in shell.fails("pull", "acme/made", HF_HUB_OFFLINE="1")
