"""The rows of the comparison, their engines with settings, and the targets."""

from __future__ import annotations

from dataclasses import dataclass, field

# Steps of a few streams begin at both ends of the contexts 64 to 512, those of many in the middle, as their
# prompts take long. A step's time grows linearly with the context: both are the mean over all of 64 to 512.
ENDS, MIDDLE = (64, 480), (280,)
PROMPT, OUTPUT = 128, 64  # tokens of a request over HTTP
THREADS = 2
BEST = "best peer"

PRECISIONS = ("bf16", "8bit", "4bit", "smollm2")
STREAMS = (1, 4, 8, 16, 32)
HTTP_STREAMS = (1, 8, 16, 32)

# Engine -> model file or folder under the peers' models. A name with `/` is one engine with another setting.
FILES: dict[str, dict[str, str]] = {
    "bf16": {
        "llaisys": "q05",
        "llama.cpp": "q05-bf16.gguf",
        "ik_llama.cpp": "q05-bf16.gguf",
        "openvino": "q05-ov-bf16",
    },
    "8bit": {
        "llaisys": "q05-q8_0.gguf",
        "llaisys/int8": "q05",
        "llama.cpp": "q05-q8_0.gguf",
        "ik_llama.cpp": "q05-q8_0.gguf",
        "openvino": "q05-ov-int8",
    },
    "4bit": {
        "llaisys": "q05-q4_0.gguf",
        "llaisys/int4": "q05",
        "llama.cpp": "q05-q4_0.gguf",
        "ik_llama.cpp": "q05-q4_0.gguf",
        "openvino": "q05-ov-int4",
    },
    "smollm2": {"llaisys": "smollm2.gguf", "llama.cpp": "smollm2.gguf", "ik_llama.cpp": "smollm2.gguf"},
}

# (peer, at least) by row; the peer is one of them or the best of each round.
TARGETS: dict[str, tuple[str, float]] = {
    "decode-1-bf16": (BEST, 1.0),
    "decode-1-8bit": (BEST, 1.0),
    "decode-1-4bit": (BEST, 1.2),
    "decode-16-bf16": ("openvino", 1.5),
    "decode-16-8bit": ("openvino", 2.3),
    "decode-16-4bit": ("openvino", 2.5),
    "prefill-512-bf16": ("openvino", 1.1),
    "prefill-512-8bit": ("openvino", 1.45),
    "decode-1-smollm2": ("llama.cpp", 2.0),
    "decode-16-smollm2": ("llama.cpp", 6.0),
    "prefill-512-smollm2": ("llama.cpp", 8.0),
    "http-16-bf16": ("llama.cpp", 2.5),
    "http-16-8bit": ("llama.cpp", 5.0),
    "http-16-smollm2": ("llama.cpp", 5.0),
}
# 16 streams against one of SmolLM2; the share of a step outside the core; the share of the read bandwidth.
SCALING_AT_LEAST = 4.0
OVERHEAD_AT_MOST = 0.03
BANDWIDTH_AT_LEAST = 0.9


@dataclass(frozen=True)
class Row:
    """One line of the table: `kind` is decode, prefill, http or overhead; `n` its streams, or its tokens."""

    kind: str
    n: int
    precision: str
    engines: dict[str, str] = field(hash=False)

    @property
    def name(self) -> str:
        """As `--only` selects it."""
        return f"{self.kind}-{self.n}-{self.precision}"

    @property
    def contexts(self) -> tuple[int, ...]:
        """Context lengths of the sequences of `decode`."""
        return ENDS if self.n <= 4 else MIDDLE

    @property
    def n_new(self) -> int:
        """Timed steps at each context: enough for a stable time, few enough for seven rounds."""
        return 24 if self.n == 1 else 16


def rows() -> list[Row]:
    """All rows, those of one model together, so that engines stay loaded."""
    made = []
    for precision in PRECISIONS:
        files = FILES[precision]
        made += [Row("decode", n, precision, files) for n in STREAMS]
        made.append(Row("prefill", 512, precision, files))
    made.append(Row("overhead", 16, "bf16", {"llaisys": FILES["bf16"]["llaisys"]}))
    for precision in ("bf16", "8bit", "smollm2"):
        files = {name: file for name, file in FILES[precision].items() if name in ("llaisys", "llama.cpp")}
        made += [Row("http", n, precision, files) for n in HTTP_STREAMS]
    return made


def is_ours(engine: str) -> bool:
    """Return whether the engine is LLAISYS, with any settings."""
    return engine.split("/")[0] == "llaisys"
