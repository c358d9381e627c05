"""Retired identifiers are not used again; each has a replacement in the field's terms."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = {".rs", ".py", ".pyi", ".cu", ".cuh"}

# Whole identifiers, case-sensitive. Names that are also ordinary words (`run`, `part`) are not listed.
RETIRED = {
    # KV cache
    "Books": "KvCache",
    "Holding": "Allocation",
    "RowPlace": "KvRow",
    "check_lent": "check_acquired",
    "foresee": "peek_next",
    "let_go": "release",
    "kv_retain": "kv_node_cache",
    "kv_attach": "kv_node_attach",
    "kv_segment_split": "kv_node_split",
    "kv_segment_trim": "kv_node_trim",
    "kv_export": "kv_node_export",
    "kv_import": "kv_node_import",
    "n_sequences_lent": "n_sequences_acquired",
    "poison": "nan_fill",
    # weights and forward pass
    "FamilyFacts": "ArchSpec",
    "LayerSlot": "LayerWeight",
    "Fitter": "Quantizer",
    "screens_head": "prune_argmax",
    "takes_largest": "is_greedy",
    # CUDA
    "KernelFile": "KernelSource",
    "cuda_units": "cuda_kernel_sources",
    "Landing": "InFlight",
    "Seat": "NcclRank",
    "Told": "a name that ends in Callback",
    "RowAhead": "NextRow",
    "launch_ahead": "launch_next",
    "DecodeSteps": "Backend",
    # watchdog, threads
    "Judge": "StallDetector",
    "in_line": "waiting_for_pool",
    "EVENTS_PER_TURN": "EVENTS_PER_ITERATION",
    # scheduler
    "near_need": "lookahead_cells",
    "is_secured": "worst_case_reserved",
    "FairState": "DeficitRoundRobin",
    "Retention": "KvCacheManager",
    # engine
    "SessionCall": "SessionRequest",
    "SessionCalls": "SessionRequestHandler",
    "SessionAnswer": "SessionReply",
    "Recall": "TimelineRequest",
    "Recalled": "TimelineReply",
    "Tally": "EngineStatsRecorder",
    "Meter": "RequestStats",
    "Chronicle": "TimelineRecorder",
    "Story": "Timeline",
    "FairThreads": "FairThreadPool",
    "EngineHooks": "EngineCallbacks",
    "Displaced": "Preemption",
    # API and text
    "Mailbox": "RequestOutputCollector",
    "Arrivals": "OutputHandler",
    "ResidentEngine": "LazyEngine",
    "SessionDoor": "SessionClient",
    "open_model": "load_model_assets",
    "TextPool": "TokenizerPool",
    "text_pool": "tokenizer_pool",
    "TextStream": "IncrementalDetokenizer",
    "AnswerParser": "CompletionParser",
    "CATALOGUE": "CATALOG",
    "first_flaw": "first_invalid_field",
    # server
    "HostGate": "HostMiddleware",
    "KeyGate": "AuthMiddleware",
    "RateGate": "RateLimitMiddleware",
    "BodyGate": "BodyLimitMiddleware",
    "QueueGate": "QueueLimitMiddleware",
    "RequestBound": "OpenRequestLimitMiddleware",
    "RequestTrace": "AccessLogMiddleware",
    "ChatShape": "ChatCompletionBuilder",
    "CompletionShape": "TextCompletionBuilder",
    "AnswerParts": "ChoiceParser",
    "AnswerOptions": "ResponseOptions",
    "RequestBook": "RequestRegistry",
    "fan_in": "merge_streams",
    "SERVER_ONLY": "the fields of ServerConfig",
}


PATTERN = re.compile(rf"(?<!\w)({'|'.join(RETIRED)})(?!\w)")


def listed(*patterns: str) -> list[str]:
    """Return the names of the tracked files that match git's patterns; all without any."""
    command = ["git", "ls-files", "-z", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return [name for name in done.stdout.split("\0") if name]


def test_retired_names_are_not_used() -> None:
    found = [
        f"{name}:{number}: {match} is now {RETIRED[match]}"
        for name in listed()
        if Path(name).suffix in CODE and name != str(Path(__file__).relative_to(ROOT))
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        for match in PATTERN.findall(line)
    ]
    assert not found, "\n".join(found)


def test_retired_names_are_found_as_whole_identifiers() -> None:
    assert PATTERN.findall("self.books: Books = foresee(text_pool)") == ["Books", "foresee", "text_pool"]
    assert PATTERN.findall("BooksReader my_text_pool context_pool") == []


# Phrases, and what the field says instead, in the text of pages and of code that ships.
RETIRED_PHRASES = {
    "somebody": "the request, the client, a person",
    "nobody": "no request, no client",
    "anew": "again",
    "at hand": "available",
    "but for": "except",
    "beside": "next to, compared with",
    "tokens a second": "tokens per second",
    "at most so many": "up to N",
    "gets on": "makes progress",
}
PHRASES = re.compile(rf"(?<![\w-])({'|'.join(RETIRED_PHRASES)})(?![\w-])", re.IGNORECASE)
SHIPPED = ("*.md", "*.yaml", "python/*.py", "crates/*/src/*.rs", "webui/src/*.ts", "webui/src/*.svelte")


def test_retired_phrases_are_not_used() -> None:
    names = listed(*SHIPPED, ":!tests/data", ":!CHANGELOG.md")
    found = [
        f"{name}:{number}: {phrase}: {RETIRED_PHRASES[phrase.lower()]}"
        for name in names
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        for phrase in PHRASES.findall(line)
    ]
    assert len(names) > 300
    assert not found, "\n".join(found)
