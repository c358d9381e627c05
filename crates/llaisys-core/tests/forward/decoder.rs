//! The forward pass compared with a plain f64 one: every architecture, odd sizes, tied and separate heads.

use crate::common::{RMS_EPS, ROPE_THETA, Tiny, feed, load, settings};
use llaisys_core::dtype::{ComputeMode, KvDType};

type Rows = Vec<Vec<f64>>;

/// The forward pass of the papers, token by token, in f64 and without a cache.
struct Plain<'a>(&'a Tiny);

impl Plain<'_> {
    fn tensor(&self, name: &str) -> Vec<f64> {
        self.0.tensors[name].1.iter().map(|&v| f64::from(v)).collect()
    }

    /// Final hidden states and logits of each token.
    fn forward(&self, tokens: &[i32]) -> (Rows, Rows) {
        let m = self.0;
        let embed = self.tensor("model.embed_tokens.weight");
        let row = |&t: &i32| embed[t as usize * m.d_model..(t as usize + 1) * m.d_model].to_vec();
        let mut x: Rows = tokens.iter().map(row).collect();
        for layer in 0..m.n_layers {
            let at = |name: &str| self.tensor(&format!("model.layers.{layer}.{name}.weight"));
            let bias = |name: &str| self.bias(layer, name);
            let normed: Rows = x.iter().map(|r| rms_norm(r, &at("input_layernorm"))).collect();
            let [q, k, v] = ["q", "k", "v"].map(|name| self.heads(layer, name, &normed));
            let o = at("self_attn.o_proj");
            for t in 0..tokens.len() {
                let mixed: Vec<f64> =
                    (0..m.n_heads).flat_map(|h| self.attend(h, &q[t], &k[..=t], &v[..=t])).collect();
                add(&mut x[t], &biased(matvec(&o, &mixed), bias("self_attn.o_proj")));
            }
            let (gate, up, down) = (at("mlp.gate_proj"), at("mlp.up_proj"), at("mlp.down_proj"));
            for r in &mut x {
                let h = rms_norm(r, &at("post_attention_layernorm"));
                let ups = biased(matvec(&up, &h), bias("mlp.up_proj"));
                let inner: Vec<f64> = biased(matvec(&gate, &h), bias("mlp.gate_proj"))
                    .iter()
                    .zip(ups)
                    .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                    .collect();
                add(r, &biased(matvec(&down, &inner), bias("mlp.down_proj")));
            }
        }
        let hidden: Rows = x.iter().map(|r| rms_norm(r, &self.tensor("model.norm.weight"))).collect();
        let head = if m.tied_head { embed } else { self.tensor("lm_head.weight") };
        let logits = hidden.iter().map(|h| matvec(&head, h)).collect();
        (hidden, logits)
    }

    /// The bias of a projection, if it has one.
    fn bias(&self, layer: usize, name: &str) -> Option<Vec<f64>> {
        let name = format!("model.layers.{layer}.{name}.bias");
        self.0.tensors.contains_key(&name).then(|| self.tensor(&name))
    }

    /// Projected, biased, normed and rotated heads of each token, or rotated and normed.
    fn heads(&self, layer: usize, name: &str, normed: &Rows) -> Rows {
        let m = self.0;
        let prefix = format!("model.layers.{layer}.self_attn.{name}");
        let weight = self.tensor(&format!("{prefix}_proj.weight"));
        let mut heads: Rows = normed.iter().map(|h| matvec(&weight, h)).collect();
        for (position, row) in heads.iter_mut().enumerate() {
            if let Some(bias) = self.bias(layer, &format!("self_attn.{name}_proj")) {
                add(row, &bias);
            }
            if name == "v" {
                continue;
            }
            for head in row.chunks_exact_mut(m.d_head) {
                if m.qk_norm() {
                    head.copy_from_slice(&rms_norm(head, &self.tensor(&format!("{prefix}_norm.weight"))));
                }
                rotate(head, position);
                if m.norms_rotated() {
                    let name = if name == "q" { "query" } else { "key" };
                    let norm = format!("model.layers.{layer}.self_attn.{name}_layernorm.weight");
                    head.copy_from_slice(&rms_norm(head, &self.tensor(&norm)));
                }
            }
        }
        heads
    }

    fn attend(&self, head: usize, q: &[f64], k: &[Vec<f64>], v: &[Vec<f64>]) -> Vec<f64> {
        let m = self.0;
        let d = m.d_head;
        let kv = head / (m.n_heads / m.n_kv_heads) * d;
        let q = &q[head * d..(head + 1) * d];
        let scores: Vec<f64> = k.iter().map(|k| dot(q, &k[kv..kv + d]) / (d as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        (0..d).map(|i| weights.iter().zip(v).map(|(w, v)| w / sum * v[kv + i]).sum()).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn matvec(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn biased(mut x: Vec<f64>, bias: Option<Vec<f64>>) -> Vec<f64> {
    bias.iter().for_each(|bias| add(&mut x, bias));
    x
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let scale = (dot(x, x) / x.len() as f64 + RMS_EPS).sqrt();
    x.iter().zip(weight).map(|(x, w)| x / scale * w).collect()
}

/// Pairs are (i, i + d / 2).
fn rotate(head: &mut [f64], position: usize) {
    let half = head.len() / 2;
    for i in 0..half {
        let angle = position as f64 * ROPE_THETA.powf(-(i as f64) / half as f64);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + half] = b * angle.cos() + a * angle.sin();
    }
}

/// Largest difference over the largest reference value.
fn relative_error(got: &[u32], want: &Rows) -> f64 {
    let want: Vec<f64> = want.iter().flatten().copied().collect();
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    let worst =
        got.iter().zip(&want).fold(0.0, |m: f64, (&g, w)| m.max((f64::from(f32::from_bits(g)) - w).abs()));
    worst / largest
}

/// Runs a model in one mode. Returns the errors of hidden states and logits.
fn errors(model: &Tiny, mode: ComputeMode, kv_dtype: Option<KvDType>) -> (f64, f64) {
    let tokens = model.tokens(5, 40);
    let (hidden, logits) = Plain(model).forward(&tokens);
    let mut loaded = load(model, llaisys_core::context::ContextConfig { mode, kv_dtype, ..settings() });
    let seq = loaded.context.seq_acquire(0).unwrap();
    let got = feed(&mut loaded.context, seq, &tokens, 13);
    (relative_error(&got.hidden, &hidden), relative_error(&got.logits, &logits))
}

/// Biases and norms: none, of q, k and v, of heads before and after the rotation; then biases in every projection.
fn models(tied_head: bool) -> Vec<Tiny> {
    let families = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "HunYuanDenseV1ForCausalLM"];
    let mut models: Vec<Tiny> =
        families.into_iter().map(|architecture| Tiny::odd(architecture, tied_head)).collect();
    models.push(Tiny::odd("LlamaForCausalLM", tied_head).with_biases());
    models
}

#[test]
fn float32_agrees_with_the_plain_forward_for_every_architecture() {
    for tied in [false, true] {
        for model in models(tied) {
            let (hidden, logits) = errors(&model, ComputeMode::Float32, None);
            let name = model.architecture;
            // f32 sums of at most 56 terms over two layers: 1e-5 leaves a factor of ten.
            assert!(hidden < 1e-5 && logits < 1e-5, "{name} tied {tied}: {hidden:e}, {logits:e}");
        }
    }
}

#[test]
fn bfloat16_is_close_to_the_plain_forward() {
    for model in models(false) {
        let (hidden, logits) = errors(&model, ComputeMode::Bfloat16, None);
        // Weights, activations, keys and values are rounded to 8 bits of mantissa: 2^-8 each, over two layers.
        assert!(hidden < 0.05 && logits < 0.05, "{}: {hidden:e}, {logits:e}", model.architecture);
    }
}

#[test]
fn error_of_a_narrow_cache_is_small() {
    // Roundings of 2^-11, 2^-8 and 1/254 of a head's largest number. The bounds hold for the worst of 40 rows over two
    // layers.
    for (kv_dtype, bound) in [(KvDType::Float16, 0.005), (KvDType::Bfloat16, 0.02), (KvDType::Int8, 0.05)] {
        let model = Tiny::odd("LlamaForCausalLM", true);
        let (hidden, logits) = errors(&model, ComputeMode::Float32, Some(kv_dtype));
        assert!(hidden < bound && logits < bound, "{kv_dtype:?}: {hidden:e}, {logits:e}");
    }
}
