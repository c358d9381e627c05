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
EXPERTS = ("experts-4bit", "experts-8bit")
HYBRIDS = ("hybrid-4bit", "hybrid-8bit")
STREAMS = (1, 4, 8, 16, 32)
HTTP_STREAMS = (1, 8, 16, 32)

# Tokens of long prompts, and of the contexts that steps see, by precision (the model ends at 32,768).
LONG = {"8k": 8192, "8k-int8": 8192, "32k": 32_000, "32k-int8": 32_000}
LONG_STREAMS = 8
# Tokens that streams at such a context may add, in all.
LONG_NEW = 768

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
    "experts-4bit": dict.fromkeys(("llaisys", "llama.cpp", "ik_llama.cpp"), "experts-q4_0.gguf"),
    "experts-8bit": dict.fromkeys(("llaisys", "llama.cpp", "ik_llama.cpp"), "experts-q8_0.gguf"),
    "hybrid-4bit": dict.fromkeys(("llaisys", "llama.cpp"), "hybrid-q4_0.gguf"),
    "hybrid-8bit": dict.fromkeys(("llaisys", "llama.cpp"), "hybrid-q8_0.gguf"),
    "encoder-bf16": {"llaisys": "encoder", "llama.cpp": "encoder-bf16.gguf"},
    **{name: dict.fromkeys(("llaisys", "llama.cpp", "ik_llama.cpp"), "q05-q8_0.gguf") for name in LONG},
}

# Settings of LLAISYS by precision (flags of peer_ours.py). Tokens of experts are drawn at random: greedy ones
# of random weights repeat, and would use the same experts again and again.
SETTINGS: dict[str, list[str]] = {
    "experts-4bit": ["--temperature", "1"],
    "experts-8bit": ["--temperature", "1"],
    "encoder-bf16": ["--encoder"],
}
for _name, _n_tokens in LONG.items():
    SETTINGS[_name] = ["--max-model-len", str(_n_tokens + LONG_NEW)]
    SETTINGS[_name] += ["--num-kv-cells", str(LONG_STREAMS * _n_tokens + LONG_NEW)]
    SETTINGS[_name] += ["--kv-cache-dtype", "int8"] if _name.endswith("-int8") else []

# (peer, at least) by row; the peer is one of them or the best of each round.
TARGETS: dict[str, tuple[str, float]] = {
    "decode-1-bf16": (BEST, 1.0),
    "decode-1-8bit": (BEST, 1.0),
    "decode-1-4bit": (BEST, 1.2),
    "http-16-smollm2": ("llama.cpp", 5.0),
    "decode-1-experts-4bit": (BEST, 1.2),
    "decode-16-experts-4bit": (BEST, 2.0),
    "decode-1-experts-8bit": (BEST, 1.2),
    "decode-16-experts-8bit": (BEST, 2.0),
    "decode-1-hybrid-4bit": (BEST, 1.0),
    "decode-16-hybrid-4bit": (BEST, 1.0),
    "prefill-512-hybrid-4bit": (BEST, 1.0),
    "embed-512-encoder-bf16": (BEST, 1.0),
    **{f"decode-{n}-{name}": (BEST, 1.0) for name in LONG for n in (1, LONG_STREAMS)},
    "prefill-8192-8k": (BEST, 1.0),
    "prefill-32000-32k": (BEST, 1.0),
    "shared-16-8k": ("llama.cpp", 3.0),
}
# 16 streams against one of SmolLM2; the share of a step outside the core. Shares of the physical limit are in
# peers_limits.py.
SCALING_AT_LEAST = 4.0
OVERHEAD_AT_MOST = 0.03


@dataclass(frozen=True)
class Row:
    """One line of the table: `kind` is decode, shared, prefill, embed, http or overhead; `n` its streams, or
    its tokens. Streams of `shared` have the same prompt."""

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
        """Context lengths of the sequences of `decode` and `shared`."""
        if self.precision in LONG:
            return (LONG[self.precision],)
        return ENDS if self.n <= 4 else MIDDLE

    @property
    def n_new(self) -> int:
        """Timed steps at each context: enough for a stable time, few enough for seven rounds."""
        return 24 if self.n == 1 or self.precision in HYBRIDS else 16

    @property
    def has_int8_cells(self) -> bool:
        """Whether keys and values are in 8 bits (Q8_0 in the peers) instead of bf16 (f16)."""
        return self.precision.endswith("-int8")

    @property
    def copies_prompt(self) -> bool:
        """Whether llama.cpp computes one prompt for all streams; it cannot copy recurrent states."""
        return self.precision not in HYBRIDS

    def n_rounds(self, n: int) -> int:
        """Of at most `n`: three if a round takes minutes."""
        return min(n, 3) if self.precision in LONG else n


def rows() -> list[Row]:
    """All rows, those of one model together, so that engines stay loaded."""
    made = []
    for precision in PRECISIONS:
        files = FILES[precision]
        made += [Row("decode", n, precision, files) for n in STREAMS]
        made.append(Row("prefill", 512, precision, files))
    made.append(Row("overhead", 16, "bf16", {"llaisys": FILES["bf16"]["llaisys"]}))
    for precision in EXPERTS + HYBRIDS:
        made += [Row("decode", n, precision, FILES[precision]) for n in (1, 4, 16)]
        made.append(Row("prefill", 512, precision, FILES[precision]))
    made.append(Row("embed", 512, "encoder-bf16", FILES["encoder-bf16"]))
    for precision, n_tokens in LONG.items():
        files = FILES[precision]
        one = Row("decode", 1, precision, files)
        made += [one] if one.has_int8_cells else [Row("prefill", n_tokens, precision, files), one]
        # ik_llama.cpp's streams share one cache: it can only copy a prompt by sharing its cells.
        copies = {name: file for name, file in files.items() if name != "ik_llama.cpp"}
        made.append(Row("decode", LONG_STREAMS, precision, copies))
        made += [Row("shared", 16, precision, files)] if precision == "8k" else []
    for precision in ("bf16", "8bit", "smollm2"):
        files = {name: file for name, file in FILES[precision].items() if name in ("llaisys", "llama.cpp")}
        made += [Row("http", n, precision, files) for n in HTTP_STREAMS]
    return made


def isa(machine: str) -> str:
    """Return the best instruction set that LLAISYS may use, which ends a machine's name in the rounds."""
    return machine.rsplit(" ", 1)[1]


def is_ours(engine: str) -> bool:
    """Return whether the engine is LLAISYS, with any settings."""
    return engine.split("/")[0] == "llaisys"
