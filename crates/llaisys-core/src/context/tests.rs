//! Cases that only unit tests can cause: a panic in the middle of a forward pass or of a change, and NaN-filled cells.

use super::cpu_backend::Rank;
use super::kv::Change;
use super::*;
use crate::batch::{BatchArrays, output};
use crate::seq::SeqId;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A one-layer Llama of 32 channels and 16 tokens with all weights 0.25.
fn context() -> Context {
    split_context(1)
}

/// The same on several ranks.
fn split_context(n_ranks: usize) -> Context {
    let folder = std::env::temp_dir().join(format!("llaisys-context-{:?}", std::thread::current().id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32,
        "vocab_size": 16, "tie_word_embeddings": true, "max_position_embeddings": 64, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32"}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let bytes = 0.25_f32.to_le_bytes().repeat(32 * 32);
    let view = |shape: &[usize]| {
        let n_bytes = shape.iter().product::<usize>() * 4;
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), &bytes[..n_bytes])
            .unwrap()
    };
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), view(&[16, 32]))];
    tensors.push(("model.norm.weight".to_owned(), view(&[32])));
    for name in ["input_layernorm", "post_attention_layernorm"] {
        tensors.push((layer(name), view(&[32])));
    }
    for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        tensors.push((layer(&format!("self_attn.{name}")), view(&[32, 32])));
    }
    for name in ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] {
        tensors.push((layer(name), view(&[32, 32])));
    }
    safetensors::serialize_to_file(tensors, None, &folder.join("model.safetensors")).unwrap();
    let config = ContextConfig {
        mode: ComputeMode::Float32,
        kv_dtype: None,
        isa: None,
        n_cells: 32,
        n_seq_max: 2,
        n_streams: 1,
        n_states_kept: 0,
        lifo: false,
        nan_fill: false,
        n_batch: 4,
        max_model_len: 64,
        n_threads: 2,
        n_ranks,
        pins: true,
        prune_argmax: true,
        max_loras: 0,
        max_lora_rank: 16,
    };
    let context = Context::load(&folder, config).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    context
}

fn rank(context: &mut Context, rank: usize) -> &mut Rank {
    let backend: &mut dyn std::any::Any = &mut *context.backend;
    let cpu: &mut CpuBackend = backend.downcast_mut().expect("these contexts are on the CPU");
    &mut cpu.ranks[rank]
}

fn decode(context: &mut Context, seq: SeqId, positions: &[i32]) -> Result<DecodeResult> {
    let n = positions.len();
    let arrays = BatchArrays {
        tokens: &vec![1; n],
        positions,
        n_seq_id: &vec![1; n],
        seq_ids: &vec![seq.to_raw(); n],
        stream: &[],
        wants_output: &vec![output::LOGITS; n],
    };
    context.decode(&DecodeRequest { arrays, masks: None, return_logits: true })
}

#[test]
fn panic_in_the_forward_pass_of_any_rank_has_no_side_effects() {
    for (n_ranks, failing) in [(1, 0), (2, 0), (2, 1)] {
        let mut context = split_context(n_ranks);
        let seq = context.seq_acquire(0).unwrap();
        decode(&mut context, seq, &[0, 1, 2]).unwrap();
        let before = context.digest();
        // A norm of the wrong length fails the op's own check in the middle of the layer, in the second pass too, while
        // the other rank waits for the sum after the feed-forward block.
        let norm = rank(&mut context, failing).decoder.weights.layers[0].ffn_norm.replace(vec![1.0; 3]);
        let rows = [3, 4, 5, 6, 7, 8];
        let panicked = catch_unwind(AssertUnwindSafe(|| decode(&mut context, seq, &rows)));
        assert!(panicked.is_err());
        assert!(!context.is_broken());
        assert_eq!(context.digest(), before);
        context.check_integrity();
        rank(&mut context, failing).decoder.weights.layers[0].ffn_norm = norm;
        let after = decode(&mut context, seq, &[3, 4]).unwrap();
        let mut fresh = split_context(n_ranks);
        let seq = fresh.seq_acquire(0).unwrap();
        decode(&mut fresh, seq, &[0, 1, 2]).unwrap();
        assert_eq!(after.logits, decode(&mut fresh, seq, &[3, 4]).unwrap().logits);
    }
}

#[test]
fn panic_in_the_middle_of_a_change_marks_the_context_as_broken() {
    let mut context = context();
    let panicked =
        catch_unwind(AssertUnwindSafe(|| context.change::<()>(Change::None, |_| panic!("injected"))));
    assert!(panicked.is_err());
    assert!(context.is_broken());
}

#[test]
fn rejected_change_does_not_mark_the_context_as_broken() {
    let mut context = context();
    let (a, b) = (context.seq_acquire(0).unwrap(), context.seq_acquire(0).unwrap());
    assert!(context.seq_acquire(0).is_err());
    decode(&mut context, a, &[0, 1]).unwrap();
    decode(&mut context, b, &[0, 1]).unwrap();
    assert!(context.kv_seq_cp(a, b, -1, -1).is_err());
    assert!(!context.is_broken());
}

/// True if every element of the cell's keys and values is NaN, false if none is. Panics otherwise.
fn is_nan_filled(context: &mut Context, cell: usize) -> bool {
    let layer = rank(context, 0).storage.layer(0);
    let width = layer.n_kv_heads * layer.d_head;
    let values = [layer.k, layer.v].map(|tensor| &tensor.as_slice::<f32>()[cell * width..][..width]).concat();
    let n_nan = values.iter().filter(|x| x.is_nan()).count();
    assert!(n_nan == 0 || n_nan == values.len(), "{n_nan} of {} elements are NaN", values.len());
    n_nan > 0
}

#[test]
fn with_nan_fill_cells_are_nan_exactly_while_they_are_free() {
    let mut context = context();
    let seq = context.seq_acquire(0).unwrap();
    decode(&mut context, seq, &[0, 1, 2, 3]).unwrap();
    let written =
        |context: &mut Context| (0..32).filter(|&cell| !is_nan_filled(context, cell)).collect::<Vec<_>>();
    assert_eq!(written(&mut context), [0, 1, 2, 3]);
    context.kv_node_cache(1, seq, 0, 2).unwrap();
    context.kv_seq_rm(seq, 1, -1).unwrap();
    assert_eq!(written(&mut context), [0, 1], "the node caches cell 1");
    // After a panic with written cells, the next call fills them with NaN.
    let norm = std::mem::replace(&mut rank(&mut context, 0).decoder.weights.output_norm, vec![1.0; 3]);
    assert!(catch_unwind(AssertUnwindSafe(|| decode(&mut context, seq, &[1, 2]))).is_err());
    rank(&mut context, 0).decoder.weights.output_norm = norm;
    context.kv_node_trim(1, 1).unwrap();
    assert_eq!(written(&mut context), [0]);
    context.seq_release(seq).unwrap();
    context.kv_node_trim(1, 0).unwrap();
    assert_eq!(written(&mut context), [0_usize; 0]);
}
