"""The properties of each family of models, in the terms of Llama, as the NumPy forward pass needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """The properties that all models of a family share."""

    architecture: str
    gguf: str | None = None  # `general.architecture`; None: its files are another family's
    # Keys of `config.json` and the projections whose biases they switch on.
    biases: tuple[tuple[str, str], ...] = ()
    qkv_bias: bool = False  # always
    qk_norm: str = "none"
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0  # subtracted from norm weights in a folder
    activation: str = "silu"
    window: str = "none"  # or "all", "switched", "from_layer", "pattern"
    local_rope: bool = False
    unscaled_local_rope: bool = False
    partial: tuple[float, ...] = (1.0,)  # rotated shares of a head
    unrotated: bool = False  # some layers are not rotated
    scaled_queries: bool = False
    neighbors: bool = False  # pairs are rows 2i and 2i + 1 in a folder
    gguf_neighbors: bool = False  # and in a GGUF file
    fused: tuple[str, ...] = ()  # "qkv", "gate_up": projections in one tensor
    gguf_fused: bool = True  # also in a GGUF file
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    multipliers: bool = False
    scalar: bool = False
    soft_caps: tuple[str, ...] = ()
    experts: bool = False
    renamed: tuple[tuple[str, str], ...] = ()  # Llama's names -> a folder's


_FOUR_NORMS = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("attn_post_norm", "post_attention_layernorm"),
    ("ffn_post_norm", "post_feedforward_layernorm"),
)
_GLM_NORMS = (("attn_post_norm", "post_self_attn_layernorm"), ("ffn_post_norm", "post_mlp_layernorm"))
_ATTENTION_BIAS = (("attention_bias", "qkv o"),)
_OLMO: dict[str, Any] = {
    "biases": _ATTENTION_BIAS,
    "qk_norm": "projection",
    "pre_norms": False,
    "post_norms": True,
    "renamed": _FOUR_NORMS,
}
_MIXTRAL = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"), ("mlp.", "block_sparse_moe."))
_GEMMA: dict[str, Any] = {
    "post_norms": True,
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "window": "pattern",
    "scalar": True,
    "renamed": _FOUR_NORMS,
}

_LLAMA_BIASES = (*_ATTENTION_BIAS, ("mlp_bias", "mlp"))
_SEED_OSS_BIASES = (("attention_bias", "qkv"), ("attention_out_bias", "o"), ("mlp_bias", "mlp"))
_HUNYUAN = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
_SHARED_MLP = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", biases=_LLAMA_BIASES, gguf_neighbors=True),
    "mistral": Family("MistralForCausalLM", window="all"),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, window="from_layer"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", qk_norm="head", window="from_layer", biases=_ATTENTION_BIAS),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        window="all",
        ropes=("default", "longrope"),
        partial=(1.0, 0.75, 0.5),
        fused=("qkv", "gate_up"),
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", **_OLMO),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "olmo2",
        window="pattern",
        local_rope=True,
        unscaled_local_rope=True,
        ropes=("default", "yarn"),
        **_OLMO,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "smollm3", biases=_LLAMA_BIASES, unrotated=True, gguf_neighbors=True
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        "mistral3",
        window="all",
        ropes=("yarn",),
        scaled_queries=True,
        gguf_neighbors=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        "glm4",
        biases=(("attention_bias", "qkv"),),
        post_norms=True,
        partial=(0.5, 0.25),
        neighbors=True,
        gguf_neighbors=True,
        fused=("gate_up",),
        renamed=_GLM_NORMS,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        biases=(("use_bias", "qkv o mlp"),),
        neighbors=True,
        gguf_neighbors=True,
    ),
    "granite": Family(
        "GraniteForCausalLM", "granite", biases=_LLAMA_BIASES, multipliers=True, gguf_neighbors=True
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granite",
        biases=_ATTENTION_BIAS,
        multipliers=True,
        gguf_neighbors=True,
        fused=("gate_up",),
        gguf_fused=False,
        renamed=_SHARED_MLP,
    ),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", biases=_SEED_OSS_BIASES),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan-dense",
        biases=_ATTENTION_BIAS,
        qk_norm="rotated_head",
        ropes=("default", "dynamic"),
        renamed=_HUNYUAN,
    ),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", soft_caps=("attn", "final"), **_GEMMA),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "gemma3", qk_norm="head", local_rope=True, soft_caps=("final",), **_GEMMA
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "llama", window="all", experts=True, gguf_neighbors=True, renamed=_MIXTRAL
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "qwen3moe", qk_norm="head", window="switched", experts=True),
}
