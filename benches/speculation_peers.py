"""Compare speculative decoding with that of llama.cpp: its n-gram and draft modes, and ours, over HTTP.

    python benches/speculation_peers.py [--rounds 5] [--streams 1 4] [--max-tokens 128]

All servers read the same SmolLM2 file and complete the eight `copy` chats of `speculation_prompts.py`,
greedy, on the same two threads. Each round starts new servers, so that none of them has the outputs of an
earlier round. They take turns after every group of chats that run together. Each group's prompts are computed
before it is timed. llama-server is built by `scripts/build-peers.sh --only-server`.

Each line of `benches/results/speculation-peers.jsonl` is one mode in one round. `ratio` is its tokens per
second divided by those of the same engine without speculation (mode `none`). `equal_texts`: completions with
the text of the mode `none`, of `texts`. `drafts` and `accepted` count draft tokens, as the server reports
them. The mode `control` of llama.cpp is a second server without speculation: its ratio and equal texts show
what changes without any speculation. `draft-simple` has the model as its own draft, because there is no
smaller model with this tokenizer. So it measures equality and cost, not the gain of a real draft model.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.hub import resolve_model
from peers import cpu_name
from peers_engines import BUILDS, PeerError, environment
from peers_http import ServerProcess, free_port
from peers_rows import THREADS
from speculation_prompts import Work, copy_heavy

RESULTS = Path(__file__).parent / "results" / "speculation-peers.jsonl"
N_CHATS = 8
N_CELLS = 1024  # of each chat
OURS, LLAMA = "llaisys", "llama.cpp"
DRAFTED = re.compile(r"spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\d+)")


@dataclass(frozen=True)
class Mode:
    """A server of an engine with the options of one mode. `{model}` in an option is the model's path."""

    engine: str
    name: str
    options: tuple[str, ...] = ()


def _llama(name: str, options: str) -> Mode:
    return Mode(LLAMA, name, tuple(options.split()))


# The n-gram modes have llama.cpp's defaults (a match of 12 tokens and 48 drafts; ngram-mod 24 and 48 to 64)
# and, as `... short`, a match and drafts as short as ours. ngram-cache has no options for them.
MODES = (
    Mode(LLAMA, "none"),
    Mode(LLAMA, "control"),
    _llama("ngram-simple", "--spec-type ngram-simple"),
    _llama(
        "ngram-simple short",
        "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8",
    ),
    _llama("ngram-map-k", "--spec-type ngram-map-k"),
    _llama(
        "ngram-map-k short",
        "--spec-type ngram-map-k --spec-ngram-map-k-size-n 4 --spec-ngram-map-k-size-m 8",
    ),
    _llama("ngram-map-k4v", "--spec-type ngram-map-k4v"),
    _llama(
        "ngram-map-k4v short",
        "--spec-type ngram-map-k4v --spec-ngram-map-k4v-size-n 4 --spec-ngram-map-k4v-size-m 8",
    ),
    _llama("ngram-mod", "--spec-type ngram-mod"),
    _llama(
        "ngram-mod short",
        "--spec-type ngram-mod --spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max 8",
    ),
    _llama("ngram-cache", "--spec-type ngram-cache"),
    _llama("draft-simple", f"--spec-type draft-simple -md {{model}} -td {THREADS} -tbd {THREADS}"),
    Mode(OURS, "none", ("--speculative-config", '{"method": "none"}')),
    Mode(OURS, "suffix", ("--speculative-config", '{"method": "suffix"}')),
    Mode(OURS, "ngram", ("--speculative-config", '{"method": "ngram"}')),
)


@dataclass
class Totals:
    """Sums of one mode in one round."""

    seconds: float = 0.0
    n_tokens: int = 0
    n_equal: int = 0


class ChatServer(ServerProcess):
    """A server that completes chats. One client thread per stream."""

    def __init__(self, mode: Mode, model: Path, streams: int) -> None:
        port = free_port()
        options = [option.replace("{model}", str(model)) for option in mode.options]
        # One stream: a slot for each chat. Several: as many slots as streams, with one pool of cells, since
        # drafts of different lengths are one batch only then.
        self._n_slots = N_CHATS if streams == 1 else streams
        if mode.engine == OURS:
            command = [sys.executable, "-m", "llaisys", "serve", str(model), "--port", str(port)]
            command += ["--num-threads", str(THREADS), "--max-num-seqs", str(streams)]
            command += ["--num-kv-cells", str(N_CHATS * N_CELLS), "--max-model-len", str(N_CELLS)]
            command += ["--log-level", "warning"]
        else:
            command = [str(BUILDS[LLAMA] / "llama-server"), "-m", str(model), "--port", str(port)]
            command += ["-t", str(THREADS), "-tb", str(THREADS), "-fa", "on", "-b", "2048", "-ub", "512"]
            command += ["-np", str(self._n_slots), "-c", str(self._n_slots * N_CELLS), "--cache-ram", "0"]
            command += ["--metrics", "--no-kv-unified" if streams == 1 else "--kv-unified"]
        is_ours = mode.engine == OURS
        env = None if is_ours else environment(LLAMA)
        super().__init__([*command, *options], port, "/ready" if is_ours else "/health", env)
        self._is_ours = is_ours
        self._clients = ThreadPoolExecutor(streams)

    def complete(self, works: Sequence[tuple[int, Work]], max_tokens: int) -> list[dict[str, Any]]:
        """Complete numbered chats together."""
        return [*self._clients.map(lambda each: self._complete(*each, max_tokens), works)]

    def drafted(self) -> tuple[int, int]:
        """Return how many draft tokens the server has verified and accepted since its start."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as reply:
            found = dict(DRAFTED.findall(reply.read().decode()))
        return int(found.get("draft", 0)), int(found.get("accepted", 0))

    def _complete(self, index: int, work: Work, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": work.message}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if not self._is_ours:
            body |= {"cache_prompt": True, "id_slot": index % self._n_slots}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            completion: dict[str, Any] = json.load(reply)
        return completion


def _plain(mode: Mode) -> Mode:
    """Return the mode without speculation of the same engine."""
    return next(each for each in MODES if (each.engine, each.name) == (mode.engine, "none"))


def start(modes: Sequence[Mode], model: Path, streams: int) -> dict[Mode, ChatServer]:
    """Start a server for each mode, without those that llama-server refuses."""
    servers = {}
    for mode in modes:
        try:
            servers[mode] = ChatServer(mode, model, streams)
        except PeerError as error:
            if mode.engine == OURS or mode.name == "none":
                raise
            print(f"skipped {mode.name}: {error}", flush=True)
    return servers


def measure_round(
    model: Path, modes: Sequence[Mode], works: Sequence[Work], streams: int, round_: int, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield the result of each mode in one round."""
    servers: dict[Mode, ChatServer] = {}
    try:
        servers = start(modes, model, streams)
        totals = {mode: Totals() for mode in servers}
        numbered = [*enumerate(works)]
        for i in range(0, len(works), streams):
            group = numbered[i : i + streams]
            prompts = {}
            for mode, server in servers.items():
                computed = server.complete(group, 1)
                prompts[mode] = [completion["usage"]["prompt_tokens"] for completion in computed]
            if len({tuple(n_tokens) for n_tokens in prompts.values()}) > 1:
                raise PeerError(f"the prompts of the engines differ in length: {prompts}")
            texts = {}
            first = (round_ + i // streams) % len(servers)
            order = [*servers]
            for mode in order[first:] + order[:first]:
                begin_s = time.perf_counter()
                completions = servers[mode].complete(group, max_tokens)
                totals[mode].seconds += time.perf_counter() - begin_s
                totals[mode].n_tokens += sum(each["usage"]["completion_tokens"] for each in completions)
                texts[mode] = [each["choices"][0]["message"]["content"] for each in completions]
            for mode in servers:
                without = texts[_plain(mode)]
                totals[mode].n_equal += sum(a == b for a, b in zip(texts[mode], without, strict=True))
        rates = {mode: of.n_tokens / of.seconds for mode, of in totals.items()}
        for mode, of in totals.items():
            n_drafts, n_accepted = servers[mode].drafted()
            yield {
                "streams": streams,
                "round": round_,
                "engine": mode.engine,
                "mode": mode.name,
                "options": " ".join(mode.options),
                "tokens": of.n_tokens,
                "seconds": round(of.seconds, 3),
                "tokens_per_s": round(rates[mode], 2),
                "ratio": round(rates[mode] / rates[_plain(mode)], 3),
                "drafts": n_drafts,
                "accepted": n_accepted,
                "texts": len(works),
                "equal_texts": of.n_equal,
            }
    finally:
        for server in servers.values():
            server.close()


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per mode with medians, and per number of streams our rate by that of llama.cpp's best."""
    for streams in dict.fromkeys(r["streams"] for r in results):
        at = [r for r in results if r["streams"] == streams]
        for engine, mode in dict.fromkeys((r["engine"], r["mode"]) for r in at):
            of = [r for r in at if (r["engine"], r["mode"]) == (engine, mode)]
            rate, ratio, seconds = (
                statistics.median(r[key] for r in of) for key in ("tokens_per_s", "ratio", "seconds")
            )
            n_equal, n_texts = (sum(r[key] for r in of) for key in ("equal_texts", "texts"))
            n_accepted, n_drafts = (sum(r[key] for r in of) for key in ("accepted", "drafts"))
            yield (
                f"{streams} streams  {engine:9}  {mode:19}  {seconds:6.2f} s  {rate:6.1f} tokens per second  "
                f"ratio {ratio:.2f}  equal texts {n_equal} of {n_texts}  accepted {n_accepted} of {n_drafts}"
            )
        ahead = statistics.median(
            _ahead([r for r in at if r["round"] == n]) for n in {r["round"] for r in at}
        )
        yield f"{streams} streams  suffix by llama.cpp's best of each round, median: {ahead:.2f}"


def _ahead(round_: Sequence[dict[str, Any]]) -> float:
    """Return the rate of our mode `suffix` divided by the highest rate of llama.cpp."""
    best = max(r["tokens_per_s"] for r in round_ if r["engine"] == LLAMA)
    (ours,) = (r["tokens_per_s"] for r in round_ if (r["engine"], r["mode"]) == (OURS, "suffix"))
    return float(ours / best)


def main() -> None:
    """Measure all rounds, write them and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", nargs="+", type=int, choices=(1, 2, 4, 8), default=[1, 4])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--chats", type=int, default=N_CHATS, help="number of chats; fewer only for a trial")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not (BUILDS[LLAMA] / "llama-server").exists():
        parser.error("llama-server is not built; run scripts/build-peers.sh --only-server")
    model = resolve_model("smollm2").path
    works = copy_heavy()[: args.chats]
    machine, results = {"machine": cpu_name()}, []
    for streams in args.streams:
        for round_ in range(args.rounds):
            measured = measure_round(model, MODES, works, streams, round_, args.max_tokens)
            results += [{**machine, **each} for each in measured]
            args.output.write_text("".join(json.dumps(each) + "\n" for each in results), "utf-8")
    print("\n".join(table(results)))
    print("draft-simple has the model as its own draft: equality and cost count, not its gain")
    if any(r["equal_texts"] < r["texts"] for r in results if r["engine"] == OURS):
        raise SystemExit("our speculation changed a text")


if __name__ == "__main__":
    main()
