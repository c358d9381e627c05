//! Packs the tensors of a checkpoint. The checkpoint can be dropped afterwards.
//!
//! A tensor is read in pieces, and each is packed as soon as it was read: loading needs memory for the packed weights and
//! one or two pieces for each thread.

mod gemma4;
mod pieces;

pub(crate) use pieces::{PIECE_BYTES, rows_at_once};

use super::{
    Attention, DeltaNetWeights, FeedForward, LayerWeights, Mixer, Mlp, Projection, SharedExpert,
    ShortConvWeights, Weights,
};
use crate::arch::delta_net::DeltaNet;
use crate::arch::recurrent::RecurrentLayer;
use crate::arch::row_map::RowMap;
use crate::arch::short_conv::ShortConv;
use crate::arch::spec::{DeltaWeight, ExpertPart, Gemma4Weight, LayerWeight, ShortConvWeight, WeightId};
use crate::dtype::{ComputeMode, DType};
use crate::error::Result;
use crate::forward::shard::Shard;
use crate::load::checkpoint::Checkpoint;
use crate::load::weight_format::packed_format;
use crate::ops::packed::{PANEL, PackedFormat, PackedMatrix};
use crate::ops::{gate_up_row, gate_up_rows};
use crate::progress::Progress;
use crate::quant::{BLOCK_LEN, dequantize_row};
use crate::tensor::RowView;
use crate::threads::Pool;
use pieces::{Pieces, Worker};
use std::ops::Range;
use std::sync::Mutex;

/// Settings of packing.
#[derive(Debug, Clone, Copy)]
pub struct PackSettings {
    /// Number formats. The caller has checked that the checkpoint supports them.
    pub mode: ComputeMode,
    /// The rank's part. The caller has checked that the checkpoint can be split like this.
    pub shard: Shard,
    /// Bytes of a tensor that a thread reads at a time, rounded to whole groups of rows. Does not affect the packed bytes.
    pub piece_bytes: usize,
}

impl PackSettings {
    /// With pieces of 512 KiB for each thread.
    pub fn new(mode: ComputeMode, shard: Shard) -> Self {
        Self { mode, shard, piece_bytes: PIECE_BYTES }
    }
}

impl Weights {
    /// Packs a rank's part of every tensor of `checkpoint` in the format of the mode. `progress` counts each matrix.
    ///
    /// Errors: a file that was truncated, errors of the system; values that are not finite and cannot be quantized; no
    /// memory; rows that cannot be split at the boundaries of the ranks' parts.
    pub fn pack(
        checkpoint: &Checkpoint,
        settings: PackSettings,
        pool: &Pool,
        progress: &Progress,
    ) -> Result<Self> {
        let PackSettings { mode, shard, piece_bytes } = settings;
        let packer =
            Packer { checkpoint, mode, shard, pool, progress, piece_bytes, workers: Mutex::default() };
        checkpoint.read_ahead(|| packer.weights())
    }
}

struct Packer<'a> {
    checkpoint: &'a Checkpoint,
    mode: ComputeMode,
    shard: Shard,
    pool: &'a Pool,
    progress: &'a Progress,
    piece_bytes: usize,
    /// Those that pack no piece now.
    workers: Mutex<Vec<Worker>>,
}

/// The rows of a stored tensor that make up a matrix.
struct Source {
    stored: WeightId,
    dtype: DType,
    map: RowMap,
    n_rows: usize,
    n_columns: usize,
}

impl Source {
    /// A range of stored rows that contains `rows`.
    fn span(&self, rows: &Range<usize>) -> Range<usize> {
        if rows.is_empty() { self.map.first()..self.map.first() } else { self.map.span(rows) }
    }
}

impl Packer<'_> {
    /// Packs every weight, in the order of the ids: they are read ahead in that order.
    fn weights(&self) -> Result<Weights> {
        let config = self.checkpoint.config();
        Ok(Weights {
            embed: self.matrix(WeightId::Embed)?,
            layer_inputs: self.layer_inputs()?,
            layers: (0..config.n_layers).map(|index| self.layer(index)).collect::<Result<_>>()?,
            output_norm: self.vector(WeightId::OutputNorm)?,
            lm_head: (!config.tied_head).then(|| self.matrix(WeightId::LmHead)).transpose()?,
            argmax_bounds: None,
            prunes_argmax: false,
        })
    }

    fn layer(&self, index: usize) -> Result<LayerWeights> {
        let at = |part| WeightId::Layer(index, part);
        let config = self.checkpoint.config();
        let (pre, post) = (config.arch.pre_norms, config.arch.post_norms);
        let some = |wanted: bool, part| wanted.then(|| self.vector(at(part))).transpose();
        let mixer = match config.recurrent_layer.filter(|_| config.is_recurrent(index)) {
            Some(RecurrentLayer::DeltaNet(sizes)) => Mixer::DeltaNet(self.delta_net(index, &sizes)?),
            Some(RecurrentLayer::ShortConv(sizes)) => Mixer::ShortConv(self.short_conv(index, &sizes)?),
            None => Mixer::Attention(self.attention(index)?),
        };
        Ok(LayerWeights {
            attn_norm: some(pre, LayerWeight::AttnNorm)?,
            attn_post_norm: some(post, LayerWeight::AttnPostNorm)?,
            mixer,
            ffn_norm: some(pre, LayerWeight::FfnNorm)?,
            ffn_post_norm: some(post, LayerWeight::FfnPostNorm)?,
            feed_forward: self.feed_forward(index)?,
            input: self.input_branch(index)?,
            scalar: some(config.gemma4.is_some(), LayerWeight::Gemma4(Gemma4Weight::Scalar))?,
        })
    }

    fn attention(&self, index: usize) -> Result<Attention> {
        let at = |part| WeightId::Layer(index, part);
        let config = self.checkpoint.config();
        let norm = config.qk_norm;
        let some = |wanted: bool, part| wanted.then(|| self.vector(at(part))).transpose();
        let projection = |matrix, bias, has_bias| -> Result<Projection> {
            Ok(Projection { matrix: self.matrix(at(matrix))?, bias: some(has_bias, bias)? })
        };
        let gate = config.has_attn_gate().then(|| self.matrix(at(LayerWeight::AttnGate)));
        let has_k = config.kv_source(index) == index;
        let projection_if =
            |has: bool, matrix, bias| has.then(|| projection(matrix, bias, config.qkv_bias)).transpose();
        Ok(Attention {
            q: projection(LayerWeight::Q, LayerWeight::QBias, config.qkv_bias)?,
            k: projection_if(has_k, LayerWeight::K, LayerWeight::KBias)?,
            v: projection_if(config.has_v(index), LayerWeight::V, LayerWeight::VBias)?,
            gate: gate.transpose()?,
            q_norm: some(norm, LayerWeight::QNorm)?,
            k_norm: some(norm && has_k, LayerWeight::KNorm)?,
            v_norm: config.gemma4.map(|_| vec![1.0; config.kv_heads(index).d_head]),
            sinks: some(config.arch.attn_sinks, LayerWeight::Sinks)?,
            o: projection(LayerWeight::O, LayerWeight::OBias, config.o_bias)?,
        })
    }

    fn delta_net(&self, index: usize, config: &DeltaNet) -> Result<DeltaNetWeights> {
        let at = |part| WeightId::Layer(index, LayerWeight::Delta(part));
        let f32_matrix = |part| self.matrix_as(at(part), Some(PackedFormat::F32));
        let names = self.checkpoint.config().names;
        let rate = if names.parts().any(|part| part == LayerWeight::Delta(DeltaWeight::MinusRate)) {
            self.vector(at(DeltaWeight::MinusRate))?.into_iter().map(|minus| -minus).collect()
        } else {
            self.vector(at(DeltaWeight::ALog))?.into_iter().map(f32::exp).collect()
        };
        let (d_key, keys) = (config.heads.d_key, config.heads.key_width());
        let unit = 1.0 / (d_key as f64).sqrt();
        Ok(DeltaNetWeights {
            q: self.matrix(at(DeltaWeight::Q))?,
            k: self.matrix(at(DeltaWeight::K))?,
            v: self.matrix(at(DeltaWeight::V))?,
            z: self.matrix(at(DeltaWeight::Z))?,
            b: f32_matrix(DeltaWeight::B)?,
            a: f32_matrix(DeltaWeight::A)?,
            taps: self.taps(
                at(DeltaWeight::Conv),
                config.n_taps,
                [0..keys, keys..2 * keys, 2 * keys..config.channels()],
            )?,
            rate,
            dt_bias: self.vector(at(DeltaWeight::DtBias))?,
            unit: [unit * unit, unit].map(|weight| vec![weight as f32; d_key]),
            norm: self.vector(at(DeltaWeight::Norm))?,
            out: Projection { matrix: self.matrix(at(DeltaWeight::Out))?, bias: None },
        })
    }

    fn short_conv(&self, index: usize, config: &ShortConv) -> Result<ShortConvWeights> {
        let at = |part| WeightId::Layer(index, LayerWeight::ShortConv(part));
        let channels = 0..config.channels;
        let [taps] = self.taps(at(ShortConvWeight::Conv), config.n_taps, [channels])?;
        Ok(ShortConvWeights {
            input_gate: self.matrix(at(ShortConvWeight::InputGate))?,
            output_gate: self.matrix(at(ShortConvWeight::OutputGate))?,
            input: self.matrix(at(ShortConvWeight::Input))?,
            taps,
            out: Projection { matrix: self.matrix(at(ShortConvWeight::Out))?, bias: None },
        })
    }

    /// Returns the taps `[n_taps, channels]` of consecutive parts of a convolution, stored as `[channels, 1, n_taps]`.
    fn taps<const N: usize>(
        &self,
        id: WeightId,
        n_taps: usize,
        parts: [Range<usize>; N],
    ) -> Result<[Vec<f32>; N]> {
        let mut buffer = Vec::new();
        let n_channels = parts.last().map_or(0, |part| part.end);
        let tensor = self.checkpoint.read(id, 0..n_channels, &mut buffer, self.pool)?;
        let mut of_channel = vec![0.0; n_taps];
        let taps = |channels: Range<usize>| {
            let mut taps = vec![0.0; n_taps * channels.len()];
            for (c, channel) in channels.clone().enumerate() {
                dequantize_row(tensor.view().row(channel), &mut of_channel);
                of_channel.iter().enumerate().for_each(|(j, &tap)| taps[j * channels.len() + c] = tap);
            }
            taps
        };
        Ok(parts.map(taps))
    }

    fn feed_forward(&self, index: usize) -> Result<FeedForward> {
        let config = self.checkpoint.config();
        let some = |wanted: bool, part| wanted.then(|| self.vector(WeightId::Layer(index, part))).transpose();
        let bias = |part, of_dense| match part {
            LayerWeight::Expert(expert, part) => self.expert_bias(index, expert, part),
            _ => some(config.mlp_bias, of_dense),
        };
        let at = |part| WeightId::Layer(index, part);
        let empty = |[gate, up, down]: [LayerWeight; 3]| -> Result<[PackedMatrix; 2]> {
            Ok([self.empty_gate_up(at(gate), at(up))?, self.empty(at(down), None)?])
        };
        let filled = |parts: [LayerWeight; 3], [mut gate_up, mut down]: [PackedMatrix; 2]| -> Result<Mlp> {
            let [gate, up, of_down] = parts;
            self.fill_gate_up(at(gate), at(up), &mut gate_up)?;
            self.fill(at(of_down), &mut down)?;
            Ok(Mlp {
                gate_up,
                gate_bias: bias(gate, LayerWeight::GateBias)?,
                up_bias: bias(up, LayerWeight::UpBias)?,
                down: Projection { matrix: down, bias: bias(of_down, LayerWeight::DownBias)? },
            })
        };
        let mlp = |parts| filled(parts, empty(parts)?);
        let dense = || mlp([LayerWeight::Gate, LayerWeight::Up, LayerWeight::Down]);
        let Some(experts) = config.experts_of(index) else {
            return dense().map(FeedForward::Dense);
        };
        let parts = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];
        let expert = |e| parts.map(|part| LayerWeight::Expert(e, part));
        // All are allocated before the first is written: an expert's matrices are often smaller than a huge page, which
        // the system gives only to memory that is mapped as a whole.
        let empty = (0..experts.n).map(|e| empty(expert(e))).collect::<Result<Vec<_>>>()?;
        let packed = empty.into_iter().enumerate().map(|(e, matrices)| filled(expert(e), matrices));
        let f32_matrix = |part| self.matrix_as(WeightId::Layer(index, part), Some(PackedFormat::F32));
        let shared = |_| -> Result<SharedExpert> {
            let mlp = mlp(parts.map(LayerWeight::Shared))?;
            Ok(SharedExpert { mlp, scale: f32_matrix(LayerWeight::SharedScale)? })
        };
        Ok(FeedForward::Experts {
            router: Projection {
                matrix: f32_matrix(LayerWeight::Router)?,
                bias: some(experts.projection_biases, LayerWeight::RouterProjectionBias)?,
            },
            bias: some(experts.has_bias, LayerWeight::RouterBias)?,
            experts: packed.collect::<Result<_>>()?,
            shared: config.d_shared.map(shared).transpose()?,
            dense: if config.gemma4.is_some() {
                Some(Box::new(self.dense_branch(index, dense()?)?))
            } else {
                None
            },
        })
    }

    /// Returns the bias of an expert's matrix, if experts have biases.
    fn expert_bias(&self, index: usize, expert: usize, part: ExpertPart) -> Result<Option<Vec<f32>>> {
        let config = self.checkpoint.config();
        if !config.experts.is_some_and(|experts| experts.projection_biases) {
            return Ok(None);
        }
        let (stored, elements) = config.stored_expert_bias(part);
        let mut buffer = Vec::new();
        let rows = expert..expert + 1;
        let tensor = self.checkpoint.read(WeightId::Layer(index, stored), rows, &mut buffer, self.pool)?;
        let mut values = vec![0.0; tensor.shape[1]];
        dequantize_row(tensor.view().row(0), &mut values);
        Ok(Some((0..config.expert_shape(part)[0]).map(|n| values[elements.row(n)]).collect()))
    }

    fn matrix(&self, id: WeightId) -> Result<PackedMatrix> {
        self.matrix_as(id, None)
    }

    /// Packs a matrix in `format`, or in the format of the mode.
    fn matrix_as(&self, id: WeightId, format: Option<PackedFormat>) -> Result<PackedMatrix> {
        let mut matrix = self.empty(id, format)?;
        self.fill(id, &mut matrix)?;
        Ok(matrix)
    }

    /// Allocates a matrix in `format`, or in the format of the mode.
    fn empty(&self, id: WeightId, format: Option<PackedFormat>) -> Result<PackedMatrix> {
        let source = self.source(id);
        let of_mode = || packed_format(self.mode, id, source.dtype, source.n_columns);
        let format = format.unwrap_or_else(of_mode);
        let rows = self.shard.rows(id, source.n_rows);
        let columns = self.columns(id, &source, format)?;
        Ok(PackedMatrix::zeroed(format, rows.len(), columns.len())?)
    }

    /// Returns the rank's columns of a matrix.
    fn columns(&self, id: WeightId, source: &Source, format: PackedFormat) -> Result<Range<usize>> {
        let block = source.dtype.block_len().max(if format.is_grouped() { BLOCK_LEN } else { 1 });
        Ok(self.shard.columns(id, source.n_columns, block, &|| self.name(source.stored))?)
    }

    /// Packs a matrix that [`Self::empty`] has allocated.
    fn fill(&self, id: WeightId, matrix: &mut PackedMatrix) -> Result<()> {
        let (checkpoint, source) = (self.checkpoint, self.source(id));
        let dtype = source.dtype;
        let rows = self.shard.rows(id, source.n_rows);
        let columns = self.columns(id, &source, matrix.format())?;
        let pieces = self.pieces(&source, rows.len());
        self.fill_pieces(matrix, pieces, &|panels, reader, [buffer, _]| {
            let at = |n: usize| (rows.start + n).min(source.n_rows);
            let stored = source.span(&(at(panels.rows().start)..at(panels.rows().end)));
            let tensor = self.read(&source, stored.clone(), buffer, &reader)?;
            let pool = reader.into_pool();
            self.check(&source, &tensor, stored.start, pool)?;
            let view = tensor.view();
            panels.fill(pool, &|n| match rows.start + n {
                n if n < source.n_rows => {
                    let row = source.map.row(checkpoint.stored_row(id, n));
                    view.row(row - stored.start).columns(columns.clone())
                }
                _ => RowView { dtype, bytes: &[] },
            });
            Ok(())
        })
    }

    fn name(&self, stored: WeightId) -> String {
        self.checkpoint.config().name(stored).expect("stored weights have names")
    }

    /// Allocates one matrix for gate and up, so that the input is read once. If their formats differ, both are packed in
    /// f32.
    fn empty_gate_up(&self, gate: WeightId, up: WeightId) -> Result<PackedMatrix> {
        let id = gate;
        let (gate, up) = (self.source(gate), self.source(up));
        let (rows, n_columns) = (self.shard.rows(id, gate.n_rows), gate.n_columns);
        let formats = [&gate, &up].map(|source| packed_format(self.mode, id, source.dtype, n_columns));
        let format = if formats[0] == formats[1] { formats[0] } else { PackedFormat::F32 };
        Ok(PackedMatrix::zeroed(format, gate_up_rows(rows.len()), n_columns)?)
    }

    /// Packs gate and up in a matrix that [`Self::empty_gate_up`] has allocated.
    fn fill_gate_up(&self, gate: WeightId, up: WeightId, matrix: &mut PackedMatrix) -> Result<()> {
        let id = gate;
        let (gate, up) = (self.source(gate), self.source(up));
        let rows = self.shard.rows(id, gate.n_rows);
        let n_inner = rows.len();
        let pieces = if gate.stored == up.stored {
            // Halves of one tensor are read one after the other, in order.
            Pieces { n_rows: n_inner.next_multiple_of(PANEL), are_shared: true }
        } else {
            let [gate, up] = [&gate, &up].map(|source| self.pieces(source, n_inner));
            Pieces { n_rows: gate.n_rows.max(up.n_rows), are_shared: gate.are_shared || up.are_shared }
        };
        let of_matrix = Pieces { n_rows: gate_up_rows(pieces.n_rows), ..pieces };
        self.fill_pieces(matrix, of_matrix, &|panels, reader, [for_gate, for_up]| {
            let inner = |n: usize| rows.start + n_inner.min(n / 2);
            let stored = inner(panels.rows().start)..inner(panels.rows().end);
            let spans = [&gate, &up].map(|source| source.span(&stored));
            let of_gate = self.read(&gate, spans[0].clone(), for_gate, &reader)?;
            let of_up = self.read(&up, spans[1].clone(), for_up, &reader)?;
            let pool = reader.into_pool();
            self.check(&gate, &of_gate, spans[0].start, pool)?;
            self.check(&up, &of_up, spans[1].start, pool)?;
            let (of_gate, of_up) = (of_gate.view(), of_up.view());
            panels.fill(pool, &|n| match gate_up_row(n_inner, n) {
                Some((false, row)) => of_gate.row(gate.map.row(rows.start + row) - spans[0].start),
                Some((true, row)) => of_up.row(up.map.row(rows.start + row) - spans[1].start),
                // Rows of padding in the last panel.
                None => RowView { dtype: gate.dtype, bytes: &[] },
            });
            Ok(())
        })
    }

    /// Returns the values of a norm or a bias in logical order.
    fn vector(&self, id: WeightId) -> Result<Vec<f32>> {
        let mut buffer = Vec::new();
        let tensor = self.checkpoint.read(id, 0..1, &mut buffer, self.pool)?;
        let mut stored = vec![0.0; tensor.shape[1]];
        dequantize_row(tensor.view().row(0), &mut stored);
        let offset = self.checkpoint.offset(id);
        let rows = self.shard.rows(id, stored.len());
        Ok(rows.map(|n| stored[self.checkpoint.stored_row(id, n)] + offset).collect())
    }

    /// Returns where a matrix is stored: by itself, or within another one.
    fn source(&self, id: WeightId) -> Source {
        let config = self.checkpoint.config();
        let (stored, map) = config.stored_weight(id);
        let shape = config.shape(id);
        Source { stored, dtype: self.checkpoint.dtype(stored), map, n_rows: shape[0], n_columns: shape[1] }
    }
}
