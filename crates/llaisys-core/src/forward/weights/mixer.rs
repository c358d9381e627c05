//! What mixes the positions of a sequence in a layer: attention, or the recurrent part.

use super::{ABSENT, Projection, Target, vector};
use crate::arch::spec::LayerWeight;
use crate::ops::packed::PackedMatrix;

/// The weights of attention, or of the recurrent part.
#[derive(Debug)]
pub enum Mixer {
    /// Attention.
    Attention(Attention),
    /// Gated DeltaNet.
    DeltaNet(DeltaNetWeights),
    /// A gated short convolution.
    ShortConv(ShortConvWeights),
}

/// The weights of attention.
#[derive(Debug)]
pub struct Attention {
    /// `[n_heads * d_head, d_model]`.
    pub q: Projection,
    /// `[n_kv_heads * d_head, d_model]`; None in a layer that reads the keys and values of another one.
    pub k: Option<Projection>,
    /// `[n_kv_heads * d_head, d_model]`; None also where values are made of the key projection.
    pub v: Option<Projection>,
    /// Gate of the attended values, `[n_heads * d_head, d_model]`.
    pub gate: Option<PackedMatrix>,
    /// Norm of each query head, `[d_head]`, or of all together, `[n_heads * d_head]`.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head, `[d_head]`, or of all together, `[n_kv_heads * d_head]`.
    pub k_norm: Option<Vec<f32>>,
    /// Ones, `[d_head]`: the norm of each value head, which has no weights.
    pub v_norm: Option<Vec<f32>>,
    /// Sink of each head, `[n_heads]`.
    pub sinks: Option<Vec<f32>>,
    /// `[d_model, n_heads * d_head]`.
    pub o: Projection,
}

/// The weights of a Gated DeltaNet layer.
#[derive(Debug)]
pub struct DeltaNetWeights {
    /// `[n_keys * d_key, d_model]`.
    pub q: PackedMatrix,
    /// `[n_keys * d_key, d_model]`.
    pub k: PackedMatrix,
    /// `[n_values * d_value, d_model]`.
    pub v: PackedMatrix,
    /// Gate of the output, `[n_values * d_value, d_model]`.
    pub z: PackedMatrix,
    /// Write strengths before the sigmoid, `[n_values, d_model]`, in f32: an error would add up over the positions.
    pub b: PackedMatrix,
    /// Decays before softplus and rate, as `b`.
    pub a: PackedMatrix,
    /// Taps of the short convolutions of queries, keys and values, `[n_taps, channels]`, the newest last.
    pub taps: [Vec<f32>; 3],
    /// Decay rates, `[n_values]`.
    pub rate: Vec<f32>,
    /// Added to `a`, `[n_values]`.
    pub dt_bias: Vec<f32>,
    /// Norms of queries and keys to length 1, as weights of `rms_norm`; that of queries contains the scale of scores.
    /// `[d_key]` each.
    pub unit: [Vec<f32>; 2],
    /// Norm of each head's output, `[d_value]`.
    pub norm: Vec<f32>,
    /// `[d_model, n_values * d_value]`.
    pub out: Projection,
}

/// The weights of a gated short convolution.
#[derive(Debug)]
pub struct ShortConvWeights {
    /// Gate of the convolution's input, `[d_model, d_model]`.
    pub input_gate: PackedMatrix,
    /// Gate of the convolution's output, `[d_model, d_model]`.
    pub output_gate: PackedMatrix,
    /// The convolution's input before its gate, `[d_model, d_model]`.
    pub input: PackedMatrix,
    /// Taps of the convolution, `[n_taps, d_model]`, the newest last.
    pub taps: Vec<f32>,
    /// `[d_model, d_model]`.
    pub out: Projection,
}

impl Mixer {
    /// As [`Weights::targets`](super::Weights::targets). Weights of models with recurrent layers are not replaced.
    pub(super) fn targets(&mut self, part: LayerWeight) -> Vec<(Target<'_>, usize)> {
        let Mixer::Attention(attention) = self else { panic!("{ABSENT}") };
        let target = match part {
            LayerWeight::Qkv => {
                let [k, v] = [&mut attention.k, &mut attention.v].map(|part| part.as_mut().expect(ABSENT));
                let (n_q, n_k) = (attention.q.matrix.n_rows(), k.matrix.n_rows());
                return vec![
                    (Target::Matrix(&mut attention.q.matrix), 0),
                    (Target::Matrix(&mut k.matrix), n_q),
                    (Target::Matrix(&mut v.matrix), n_q + n_k),
                ];
            }
            LayerWeight::Q => Target::Matrix(&mut attention.q.matrix),
            LayerWeight::K => Target::Matrix(&mut attention.k.as_mut().expect(ABSENT).matrix),
            LayerWeight::V => Target::Matrix(&mut attention.v.as_mut().expect(ABSENT).matrix),
            LayerWeight::QBias => vector(&mut attention.q.bias),
            LayerWeight::KBias => vector(&mut attention.k.as_mut().expect(ABSENT).bias),
            LayerWeight::VBias => vector(&mut attention.v.as_mut().expect(ABSENT).bias),
            LayerWeight::O => Target::Matrix(&mut attention.o.matrix),
            LayerWeight::OBias => vector(&mut attention.o.bias),
            LayerWeight::QNorm => vector(&mut attention.q_norm),
            LayerWeight::KNorm => vector(&mut attention.k_norm),
            _ => panic!("{ABSENT}"),
        };
        vec![(target, 0)]
    }

    pub(super) fn n_bytes(&self) -> usize {
        match self {
            Mixer::Attention(attention) => attention.n_bytes(),
            Mixer::DeltaNet(delta_net) => delta_net.n_bytes(),
            Mixer::ShortConv(short_conv) => short_conv.n_bytes(),
        }
    }
}

impl Attention {
    /// Without `v_norm`, which is no weight of the model.
    fn n_bytes(&self) -> usize {
        let Attention { q, k, v, gate, q_norm, k_norm, v_norm: _, sinks, o } = self;
        let projections = [Some(q), k.as_ref(), v.as_ref(), Some(o)].into_iter().flatten();
        let vectors = [q_norm, k_norm, sinks].into_iter().flatten();
        let n_values = vectors.map(Vec::len).sum::<usize>() * size_of::<f32>();
        n_values
            + gate
                .iter()
                .map(PackedMatrix::n_bytes)
                .chain(projections.map(Projection::n_bytes))
                .sum::<usize>()
    }
}

impl DeltaNetWeights {
    /// Without `unit`, which is no weight of the model.
    fn n_bytes(&self) -> usize {
        let DeltaNetWeights { q, k, v, z, b, a, taps, rate, dt_bias, unit: _, norm, out } = self;
        let matrices = [q, k, v, z, b, a, &out.matrix];
        let vectors = taps.iter().chain([rate, dt_bias, norm]);
        let n_values = vectors.map(Vec::len).sum::<usize>();
        matrices.into_iter().map(PackedMatrix::n_bytes).sum::<usize>() + n_values * size_of::<f32>()
    }
}

impl ShortConvWeights {
    fn n_bytes(&self) -> usize {
        let ShortConvWeights { input_gate, output_gate, input, taps, out } = self;
        let matrices = [input_gate, output_gate, input, &out.matrix];
        matrices.into_iter().map(PackedMatrix::n_bytes).sum::<usize>() + taps.len() * size_of::<f32>()
    }
}
