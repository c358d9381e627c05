//! The names of models with recurrent layers.

use super::{
    DeltaWeight, ExpertPart, FEED_FORWARD, FOLDER_NAMES, GGUF_ATTENTION, GGUF_FEED_FORWARD, GGUF_NAMES,
    GGUF_NORMS, LayerWeight, NameTable, Names, QK_NORMS, ShortConvWeight, TWO_NORMS,
};

const GATED_ATTENTION: Names = &[
    (LayerWeight::QAndGate, "self_attn.q_proj.weight"),
    (LayerWeight::K, "self_attn.k_proj.weight"),
    (LayerWeight::V, "self_attn.v_proj.weight"),
    (LayerWeight::O, "self_attn.o_proj.weight"),
];
const DELTA_NET: Names = &[
    (LayerWeight::Delta(DeltaWeight::Conv), "linear_attn.conv1d.weight"),
    (LayerWeight::Delta(DeltaWeight::ALog), "linear_attn.A_log"),
    (LayerWeight::Delta(DeltaWeight::DtBias), "linear_attn.dt_bias"),
    (LayerWeight::Delta(DeltaWeight::Norm), "linear_attn.norm.weight"),
    (LayerWeight::Delta(DeltaWeight::Out), "linear_attn.out_proj.weight"),
];
const DELTA_NET_PROJECTIONS: Names = &[
    (LayerWeight::Delta(DeltaWeight::Qkv), "linear_attn.in_proj_qkv.weight"),
    (LayerWeight::Delta(DeltaWeight::Z), "linear_attn.in_proj_z.weight"),
    (LayerWeight::Delta(DeltaWeight::B), "linear_attn.in_proj_b.weight"),
    (LayerWeight::Delta(DeltaWeight::A), "linear_attn.in_proj_a.weight"),
];
const SHARED_EXPERT: Names = &[
    (LayerWeight::Shared(ExpertPart::Gate), "mlp.shared_expert.gate_proj.weight"),
    (LayerWeight::Shared(ExpertPart::Up), "mlp.shared_expert.up_proj.weight"),
    (LayerWeight::Shared(ExpertPart::Down), "mlp.shared_expert.down_proj.weight"),
    (LayerWeight::SharedScale, "mlp.shared_expert_gate.weight"),
];

/// Names in a folder of Qwen3.5.
pub const QWEN3_5_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[TWO_NORMS, GATED_ATTENTION, QK_NORMS, DELTA_NET, DELTA_NET_PROJECTIONS, FEED_FORWARD],
    skipped: &["mtp."],
    ..FOLDER_NAMES
};

/// Names in a folder of Qwen3.5 MoE: all experts of a layer are in two tensors.
pub const QWEN3_5_MOE_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        GATED_ATTENTION,
        QK_NORMS,
        DELTA_NET,
        DELTA_NET_PROJECTIONS,
        &[
            (LayerWeight::Router, "mlp.gate.weight"),
            (LayerWeight::ExpertsGateUp, "mlp.experts.gate_up_proj"),
            (LayerWeight::Experts(ExpertPart::Down), "mlp.experts.down_proj"),
        ],
        SHARED_EXPERT,
    ],
    ..QWEN3_5_FOLDER_NAMES
};

/// Names in a folder of Qwen3-Next.
pub const QWEN3_NEXT_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        GATED_ATTENTION,
        QK_NORMS,
        DELTA_NET,
        &[
            (LayerWeight::Delta(DeltaWeight::Qkvz), "linear_attn.in_proj_qkvz.weight"),
            (LayerWeight::Delta(DeltaWeight::Ba), "linear_attn.in_proj_ba.weight"),
        ],
        FEED_FORWARD,
        SHARED_EXPERT,
    ],
    ..QWEN3_5_FOLDER_NAMES
};

const GGUF_HYBRID: Names = &[
    (LayerWeight::AttnNorm, "attn_norm.weight"),
    (LayerWeight::FfnNorm, "post_attention_norm.weight"),
    (LayerWeight::QAndGate, "attn_q.weight"),
    (LayerWeight::K, "attn_k.weight"),
    (LayerWeight::V, "attn_v.weight"),
    (LayerWeight::QNorm, "attn_q_norm.weight"),
    (LayerWeight::KNorm, "attn_k_norm.weight"),
    (LayerWeight::O, "attn_output.weight"),
    (LayerWeight::Delta(DeltaWeight::Qkv), "attn_qkv.weight"),
    (LayerWeight::Delta(DeltaWeight::Z), "attn_gate.weight"),
    (LayerWeight::Delta(DeltaWeight::Conv), "ssm_conv1d.weight"),
    (LayerWeight::Delta(DeltaWeight::MinusRate), "ssm_a"),
    (LayerWeight::Delta(DeltaWeight::DtBias), "ssm_dt.bias"),
    (LayerWeight::Delta(DeltaWeight::Norm), "ssm_norm.weight"),
    (LayerWeight::Delta(DeltaWeight::Out), "ssm_out.weight"),
    (LayerWeight::Shared(ExpertPart::Gate), "ffn_gate_shexp.weight"),
    (LayerWeight::Shared(ExpertPart::Up), "ffn_up_shexp.weight"),
    (LayerWeight::Shared(ExpertPart::Down), "ffn_down_shexp.weight"),
    (LayerWeight::SharedScale, "ffn_gate_inp_shexp.weight"),
];

/// Names in a GGUF file of Qwen3.5, dense or with experts.
pub const QWEN3_5_GGUF_NAMES: NameTable = NameTable {
    in_layer: &[
        GGUF_HYBRID,
        &[
            (LayerWeight::Delta(DeltaWeight::B), "ssm_beta.weight"),
            (LayerWeight::Delta(DeltaWeight::A), "ssm_alpha.weight"),
        ],
        GGUF_FEED_FORWARD,
    ],
    ..GGUF_NAMES
};

/// Names in a GGUF file of Qwen3-Next.
pub const QWEN3_NEXT_GGUF_NAMES: NameTable = NameTable {
    in_layer: &[GGUF_HYBRID, &[(LayerWeight::Delta(DeltaWeight::Ba), "ssm_ba.weight")], GGUF_FEED_FORWARD],
    ..GGUF_NAMES
};

const LFM2_LAYER: Names = &[
    (LayerWeight::AttnNorm, "operator_norm.weight"),
    (LayerWeight::FfnNorm, "ffn_norm.weight"),
    (LayerWeight::Q, "self_attn.q_proj.weight"),
    (LayerWeight::K, "self_attn.k_proj.weight"),
    (LayerWeight::V, "self_attn.v_proj.weight"),
    (LayerWeight::O, "self_attn.out_proj.weight"),
    (LayerWeight::QNorm, "self_attn.q_layernorm.weight"),
    (LayerWeight::KNorm, "self_attn.k_layernorm.weight"),
    (LayerWeight::ShortConv(ShortConvWeight::In), "conv.in_proj.weight"),
    (LayerWeight::ShortConv(ShortConvWeight::Conv), "conv.conv.weight"),
    (LayerWeight::ShortConv(ShortConvWeight::Out), "conv.out_proj.weight"),
    (LayerWeight::Gate, "feed_forward.w1.weight"),
    (LayerWeight::Up, "feed_forward.w3.weight"),
    (LayerWeight::Down, "feed_forward.w2.weight"),
    (LayerWeight::Router, "feed_forward.gate.weight"),
    (LayerWeight::RouterBias, "feed_forward.expert_bias"),
    (LayerWeight::Expert(0, ExpertPart::Gate), "feed_forward.experts.{}.w1.weight"),
    (LayerWeight::Expert(0, ExpertPart::Up), "feed_forward.experts.{}.w3.weight"),
    (LayerWeight::Expert(0, ExpertPart::Down), "feed_forward.experts.{}.w2.weight"),
];

/// Names in a folder of LFM2, dense or with experts. The norm after the last layer is called that of the embeddings.
pub const LFM2_FOLDER_NAMES: NameTable =
    NameTable { output_norm: "model.embedding_norm.weight", in_layer: &[LFM2_LAYER], ..FOLDER_NAMES };

const GGUF_LFM2: Names = &[
    (LayerWeight::ShortConv(ShortConvWeight::In), "shortconv.in_proj.weight"),
    (LayerWeight::ShortConv(ShortConvWeight::Conv), "shortconv.conv.weight"),
    (LayerWeight::ShortConv(ShortConvWeight::Out), "shortconv.out_proj.weight"),
    (LayerWeight::RouterBias, "exp_probs_b.bias"),
];

/// Names in a GGUF file of LFM2, dense or with experts. As in a folder, the norm after the last layer is called that of the embeddings.
pub const LFM2_GGUF_NAMES: NameTable = NameTable {
    output_norm: "token_embd_norm.weight",
    in_layer: &[GGUF_NORMS, GGUF_ATTENTION, GGUF_LFM2, GGUF_FEED_FORWARD],
    ..GGUF_NAMES
};
