"""EngineConfig: the settings of one engine (model, capacity, scheduling and compute resources)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llaisys.config.kv_events_config import KvEventsConfig
from llaisys.config.speculative_config import SpeculativeConfig

DEFAULT_MODEL = "smollm2"


class EngineConfig(BaseModel):
    """The settings of one engine, in `LLM` and in a server."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # model
    model: str = Field(
        DEFAULT_MODEL,
        description="model to load: a folder, a .gguf file, an embedded model, or a Hugging Face id "
        "(org/name[:FILE.gguf])",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="branch, tag or commit of a Hugging Face id (default: its main branch); set a commit to "
        "keep the model from changing",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="type of weights and products; auto keeps the checkpoint's precision; float32 takes "
        "twice the memory of bfloat16; set float32 to compare with a reference, bfloat16 to "
        "halve the memory of an f32 or f16 checkpoint",
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="quantize a float checkpoint while it loads: int8 takes 8.25 bits per weight, int4 takes "
        "4.5 (6.25 in the head) (default: none); set it to save memory and bandwidth",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="device that runs the model; auto selects the GPU if it can run this model with these "
        "settings, otherwise the CPU; set cuda to fail instead of falling back",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of the GPU's memory for weights, K and V (device cuda); lower it if other "
        "programs use the GPU",
    )
    cuda_device: int = Field(
        0,
        ge=0,
        le=63,
        description="number of the GPU, in the driver's order (device cuda); set it on a machine with "
        "several GPUs",
    )
    cuda_sync: bool = Field(
        False,
        description="wait for each CUDA kernel, so that an error names the kernel that failed; slow, for "
        "debugging (device cuda)",
    )
    cuda_overlap: bool = Field(
        True,
        description="launch a decode step before the tokens of the previous one are known (device cuda); "
        "turn it off only for debugging",
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "int8_per_token_head"] = Field(
        "auto",
        description="type of K and V; auto is float32 with dtype float32, else bfloat16 (on a GPU the "
        "weights' type); int8 (vLLM's int8_per_token_head) takes about half of bfloat16, for longer contexts "
        "or more sequences",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto",
        description="source of default sampling parameters: auto uses the model's, vllm uses vLLM's neutral "
        "defaults; set vllm to compare with a vLLM server",
    )
    chat_template: Path | None = Field(
        None,
        description="Jinja file that replaces the model's chat template (default: the model's own); set it "
        "if that is missing or wrong",
    )
    pooling_type: Literal["auto", "mean", "last", "cls", "max"] = Field(
        "auto",
        description="pooling of embeddings: the mean of all last hidden states, the last or first (cls) one, "
        "or the largest numbers; auto uses the model's setting; set it if that is missing",
    )
    score_type: Literal["auto", "cosine", "yes_no"] = Field(
        "auto",
        description="scores of /v1/rerank and /score: cosine similarities of embeddings, or Qwen3-Reranker's "
        "probability of yes; auto knows a reranker by its score head, its name or `classifier_from_token` in "
        "config.json",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="default seed for requests that do not set one")

    # capacity
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="context of one request, in tokens (default: the model's); lower it to fit more requests "
        "in the KV cache. Above its original context (4096 for Phi-4-mini), a LongRoPE model uses its long "
        "factors for every request",
    )
    max_num_seqs: int = Field(
        64,
        ge=1,
        le=256,
        description="sequences that run at the same time, one for each choice of a request; raise it for "
        "throughput, lower it for latency. The default is lower for a model with recurrent layers if their "
        "states would take more than a fifth of the memory",
    )
    max_concurrent_requests: int | None = Field(
        None,
        ge=1,
        description="upper bound of max_num_seqs and max_batch_size (default: max_num_seqs); set it to bound "
        "both at once",
    )
    max_batch_size: int | None = Field(
        None,
        ge=1,
        description="sequences in one step; more of them alternate (default: all that run); lower it to "
        "bound the duration of a step",
    )
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        description="tokens in one step, over all requests; raise it for faster prefill, lower it for "
        "smoother streams",
    )
    max_num_queued_reqs: int = Field(
        256,
        ge=0,
        description="requests that may wait in the queue; further ones get 429; raise it for bursts, lower "
        "it so that clients go elsewhere sooner",
    )
    max_num_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens that may wait in the queue; a request beyond them gets 429 (default: no "
        "bound); set it to bound the wait when prompts are long",
    )
    max_input_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of one prompt; a longer one gets 400 (default: the context); set it to keep long "
        "prompts away",
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of one completion; a request that asks for more gets 400 (default: the context); "
        "set it to bound the time of a request",
    )
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="candidates of one token that a request may ask logprobs for; more get 400; -1 is no "
        "limit, so that logprobs=-1 returns the whole vocabulary; raise it only for trusted clients, because "
        "each candidate takes about 100 bytes of memory and response",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for K and V, in bytes (default: up to a fifth of the available memory); raise it "
        "if requests are preempted or prefixes evicted",
    )
    num_kv_cells: int | None = Field(
        None,
        ge=1,
        description="KV cells, one token each (default: as many as kv_cache_memory_bytes holds); with both "
        "the smaller applies; set it to think in tokens instead of bytes",
    )
    num_kv_streams: int = Field(
        1,
        ge=1,
        le=64,
        description="KV streams that the cells are divided into; prefixes are shared across streams by "
        "copying, so keep 1 unless you measure a gain",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep computed prefixes in the KV cache for later requests"
    )
    kv_eviction_policy: Literal["lru"] = Field(
        "lru", description="which cached prefix is evicted first: the least recently used"
    )
    kv_eviction_threshold: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the KV cells in use above which cached prefixes are evicted in advance; lower "
        "it to keep cells free for bursts",
    )
    kv_cleanup_interval_s: float = Field(
        1.0, gt=0, le=3600, description="interval of the check of kv_eviction_threshold, in seconds"
    )
    max_sessions: int = Field(
        256,
        ge=0,
        description="named sessions of all clients together, and saved sessions of each client; raise it for "
        "more users with long conversations",
    )
    session_kv_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the KV cells that sessions may protect from eviction; raise it for many long "
        "conversations",
    )
    session_store: Path | None = Field(
        None,
        description="folder for saved sessions (default: sessions cannot be saved); set it to keep "
        "conversations over a restart",
    )

    prefix_cache_dir: Path | None = Field(
        None,
        description="folder for the disk tier of the prefix cache (default: off); cached prefixes are also "
        "written there, survive a restart, and are loaded if that is faster than computing; the "
        "files reveal prompts to everyone who can read them; set it if long prompts return after "
        "a restart or an eviction",
    )
    prefix_cache_disk_bytes: int = Field(
        2**33,
        ge=1,
        description="bytes of prefix_cache_dir (default: 8 GiB); above it the least recently used blocks are "
        "deleted; raise it if prefixes are computed again after some time",
    )

    # scheduling
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="age at which a request ends with 408, in seconds; raise it for long completions on a "
        "slow machine",
    )
    timeout_scan_s: float = Field(
        1.0, ge=0.5, le=5, description="interval of the check of request ages, in seconds"
    )
    max_queue_wait_s: float = Field(
        60.0,
        gt=0,
        description="wait, in seconds, after which a request is scheduled before all others, whatever its "
        "priority; lower it if low priorities wait too long",
    )
    max_step_time_s: float = Field(
        0.25,
        gt=0,
        description="expected duration of a step, in seconds, above which no more prompt tokens join it "
        "(four times that without streams); lower it for smoother streams",
    )
    long_prefill_token_threshold: int | None = Field(
        None,
        ge=1,
        description="prompt tokens of one request in a step (default: no bound); set it so that one long "
        "prompt does not fill every step",
    )
    max_client_tokens_per_step: int | None = Field(
        None,
        ge=1,
        description="tokens of one client in a step with prefill (default: no bound); set it so that one "
        "client does not fill every step",
    )
    speculative_config: SpeculativeConfig | None = Field(
        SpeculativeConfig("auto"),
        description='speculative decoding as JSON, as in vLLM: {"method": "suffix"}, {"method": "ngram", '
        '"num_speculative_tokens": 8}, {"method": "draft_model", "model": "org/small"} or {"method": "none"} '
        "(default: suffix on the CPU, none on a GPU); the tokens are the same; set draft_model if a much "
        "smaller model has the same tokenizer",
    )
    kv_events_config: KvEventsConfig | None = Field(
        None,
        description='KV events for routers as JSON, as in vLLM: {"enable_kv_cache_events": true, "endpoint": '
        '"tcp://*:5557"} (default: off); anyone who can reach the endpoint sees the token ids of '
        "all cached prompts; set it behind a router that chooses servers by their prefixes",
    )

    # LoRA
    enable_lora: bool = Field(
        False,
        description="compute requests with LoRA adapters (on the CPU, one rank); takes memory for "
        "max_loras adapters of max_lora_rank",
    )
    max_loras: int = Field(
        16,
        ge=1,
        le=1024,
        description="LoRA adapters that may be loaded at the same time; one step may use all of them; lower "
        "it to save memory",
    )
    max_lora_rank: int = Field(
        16,
        ge=1,
        le=512,
        description="highest rank of a LoRA adapter; one with a higher rank is refused; raise it to the "
        "highest rank of your adapters",
    )

    # process
    engine_process: bool = Field(
        False,
        description="run the engine in its own process, which is restarted if it dies; protects the server "
        "from faults in native code; set it for servers that must stay up",
    )
    watchdog_window_s: float = Field(
        30.0,
        gt=0,
        le=86400,
        description="seconds without progress after which the engine or the event loop counts as stuck and "
        "the process exits with code 70; waiting requests without an admission, and a late event loop, are "
        "reported after a sixth of it; raise it for very slow machines",
    )

    # cpu
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="compute threads (default: one for each usable core); lower it to share the machine",
    )
    cpu_threads_bind: str = Field(
        "auto",
        description="CPUs that compute threads are pinned to: auto (one of each core, unless a CPU quota is "
        "smaller), nobind, or a list such as 0-3,8; with several ranks one list for each: "
        "0-3|4-7; set it to keep cores free for other programs",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="ranks that the model is split over, each with an equal share of the threads; on CPUs "
        "use one for each NUMA node",
    )
    screen_lm_head: bool = Field(
        True,
        description="keep an 8-bit copy of a 16- or 32-bit lm_head to find greedy tokens with less memory "
        "traffic (pruned argmax); the tokens are the same, and lm_head takes 27 to 53 % more memory",
    )
    isa: Literal["auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "scalar"] = Field(
        "auto",
        description="instruction set of the CPU kernels; auto selects the best of this machine (`llaisys "
        "doctor` lists them); set it to reproduce another machine's results",
    )
