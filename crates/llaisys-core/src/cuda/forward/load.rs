//! Loads a checkpoint's tensors, or a rank's part of them, into device memory. Matrices are dequantized and converted
//! to the device's 16-bit type; matrices that share an input are stacked. Norms are f32.

use super::arena::Arena;
use crate::arch::weight_id::{LayerWeight, WeightId};
use crate::cuda::device::{Device, DevicePtr, Element};
use crate::dtype::DType;
use crate::error::Result;
use crate::forward::shard::Shard;
use crate::load::checkpoint::Checkpoint;
use crate::quant::dequantize_row;
use crate::tensor::RowView;
use crate::threads::Pool;
use half::{bf16, f16};
use std::ops::Range;

/// Bytes that are converted at once before they are uploaded.
const PIECE_BYTES: usize = 16 << 20;

/// One decoder layer; biases and norms that the model lacks are NULL.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLayer {
    /// `[d_model]` f32
    pub attn_norm: DevicePtr,
    /// `[(n_heads + 2 n_kv_heads) d_head, d_model]`
    pub qkv: DevicePtr,
    /// `[(n_heads + 2 n_kv_heads) d_head]`
    pub qkv_bias: DevicePtr,
    /// `[d_head]` f32
    pub q_norm: DevicePtr,
    /// `[d_head]` f32
    pub k_norm: DevicePtr,
    /// `[d_model, n_heads d_head]`
    pub o: DevicePtr,
    /// `[d_model]` f32
    pub ffn_norm: DevicePtr,
    /// `[2 d_ff, d_model]`: gate, then up.
    pub gate_up: DevicePtr,
    /// `[d_model, d_ff]`
    pub down: DevicePtr,
}

/// All tensors of a model.
#[derive(Debug)]
pub struct DeviceWeights {
    /// `[vocab_size, d_model]`, whole on every rank.
    pub embed: DevicePtr,
    /// `[n_head_rows, d_model]`; a part of `embed` if the head is tied.
    pub head: DevicePtr,
    /// `[d_model]` f32
    pub output_norm: DevicePtr,
    /// In order of depth.
    pub layers: Vec<DeviceLayer>,
    /// Bytes of all tensors.
    pub n_bytes: usize,
}

/// Returns the type of a checkpoint's weights on a device: f16 for f16, else bf16.
pub fn element_of(checkpoint: &Checkpoint) -> Element {
    match checkpoint.tensor(WeightId::Embed).map(|tensor| tensor.dtype) {
        Some(DType::F16) => Element::F16,
        _ => Element::Bf16,
    }
}

/// Returns the rows of the head that each rank has. With several ranks the number is a multiple of 16, so that each
/// part has the alignment that cublasLt wants. Rows behind the vocabulary are zeros.
pub fn n_head_rows(vocab_size: usize, world: usize) -> usize {
    if world == 1 { vocab_size } else { vocab_size.div_ceil(world).next_multiple_of(16) }
}

/// Returns the bytes of [`load`]'s arena.
pub fn n_bytes(checkpoint: &Checkpoint, shard: Shard) -> Result<usize> {
    let mut counter = Loader { checkpoint, shard, target: None, arena: Arena::counting() };
    counter.weights()?;
    Ok(counter.arena.n_bytes())
}

/// Copies every tensor, or the part of it that the device's rank has, to one arena on `device`. Errors: the device's; a
/// truncated file; the system's; too little memory.
pub fn load(
    device: &dyn Device,
    checkpoint: &Checkpoint,
    element: Element,
    pool: &Pool,
) -> Result<DeviceWeights> {
    let shard = shard_of(device);
    let base = device.alloc("the weights", n_bytes(checkpoint, shard)?)?;
    let target = Target { device, element, pool };
    let mut loader = Loader { checkpoint, shard, target: Some(target), arena: Arena::placing(base) };
    let weights = loader.weights()?;
    device.synchronize()?;
    Ok(weights)
}

/// Returns the part of a model that a device has.
pub fn shard_of(device: &dyn Device) -> Shard {
    Shard { rank: device.rank(), world: device.world() }
}

#[derive(Clone, Copy)]
struct Target<'a> {
    device: &'a dyn Device,
    element: Element,
    pool: &'a Pool,
}

/// Visits a model's tensors in order: counts their bytes, and copies them if there is a target.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    shard: Shard,
    target: Option<Target<'a>>,
    arena: Arena,
}

impl Loader<'_> {
    fn weights(&mut self) -> Result<DeviceWeights> {
        let config = self.checkpoint.config();
        let embed = self.matrix(&[WeightId::Embed])?;
        let head = if config.tied_head {
            let n_rows = self.shard.rank * n_head_rows(config.vocab_size, self.shard.world);
            if self.arena.is_placing() { embed.at(n_rows * config.d_model * 2) } else { DevicePtr::NULL }
        } else {
            self.matrix(&[WeightId::LmHead])?
        };
        let output_norm = self.vector(WeightId::OutputNorm)?;
        let layers = (0..config.n_layers).map(|index| self.layer(index)).collect::<Result<_>>()?;
        Ok(DeviceWeights { embed, head, output_norm, layers, n_bytes: self.arena.n_bytes() })
    }

    fn layer(&mut self, index: usize) -> Result<DeviceLayer> {
        use LayerWeight::{AttnNorm, Down, FfnNorm, Gate, K, KBias, KNorm, O, Q, QBias, QNorm, Up, V, VBias};
        let at = |part| WeightId::Layer(index, part);
        let config = self.checkpoint.config();
        let (has_bias, has_norm) = (config.qkv_bias, config.qk_norm);
        let none = || Ok(DevicePtr::NULL);
        Ok(DeviceLayer {
            attn_norm: self.vector(at(AttnNorm))?,
            qkv: self.matrix(&[Q, K, V].map(at))?,
            qkv_bias: if has_bias { self.matrix(&[QBias, KBias, VBias].map(at)) } else { none() }?,
            q_norm: if has_norm { self.vector(at(QNorm)) } else { none() }?,
            k_norm: if has_norm { self.vector(at(KNorm)) } else { none() }?,
            o: self.matrix(&[at(O)])?,
            ffn_norm: self.vector(at(FfnNorm))?,
            gate_up: self.matrix(&[Gate, Up].map(at))?,
            down: self.matrix(&[at(Down)])?,
        })
    }

    /// Returns this rank's rows and columns of a tensor. A vector's elements are rows of one column. Rows may extend
    /// beyond the last.
    fn part(&self, id: WeightId) -> (Range<usize>, Range<usize>) {
        let (config, Shard { rank, world }) = (self.checkpoint.config(), self.shard);
        let shape = config.shape(id);
        let n_head_rows = n_head_rows(config.vocab_size, world);
        let rows = match id {
            // Includes the head's rows of all ranks.
            WeightId::Embed if config.tied_head => 0..world * n_head_rows,
            WeightId::Embed => 0..config.vocab_size,
            WeightId::LmHead => rank * n_head_rows..(rank + 1) * n_head_rows,
            WeightId::OutputNorm | WeightId::LayerInputs(_) | WeightId::Layer(..) => {
                self.shard.rows(id, shape[0])
            }
        };
        (rows, shape.get(1).map_or(0..1, |&n_columns| self.shard.plain_columns(id, n_columns)))
    }

    fn part_bytes(&self, id: WeightId) -> usize {
        let (rows, columns) = self.part(id);
        rows.len() * columns.len() * 2
    }

    /// Stacks tensors, in the device's type.
    fn matrix(&mut self, ids: &[WeightId]) -> Result<DevicePtr> {
        let n_bytes = ids.iter().map(|&id| self.part_bytes(id)).sum();
        let at = self.arena.take(n_bytes);
        if let Some(target) = self.target {
            let mut to = at;
            for &id in ids {
                self.copy(target, id, to)?;
                to = to.at(self.part_bytes(id));
            }
        }
        Ok(at)
    }

    /// Copies this rank's part of a tensor, row by row in the order that the forward pass uses.
    fn copy(&self, target: Target<'_>, id: WeightId, to: DevicePtr) -> Result<()> {
        let config = self.checkpoint.config();
        let (stored, map) = config.stored_weight(id);
        let first = map.first();
        let shape = config.shape(id);
        let n_columns = shape.get(1).copied().unwrap_or(1);
        let (rows, columns) = self.part(id);
        // This rank's rows that exist.
        let n_rows = rows.end.min(shape[0]).saturating_sub(rows.start);
        // A vector's elements are rows of one column, because they have the order of a matrix's rows.
        let is_vector = shape.len() < 2;
        let begin = first + rows.start.min(shape[0]);
        let read = if is_vector { 0..1 } else { begin..begin + n_rows };
        let mut buffer = Vec::new();
        let tensor = self.checkpoint.read(stored, read.clone(), &mut buffer, target.pool)?;
        let view = tensor.view();
        let row = |n: usize| {
            let n = first + self.checkpoint.stored_row(id, n);
            if is_vector { element(view.row(0), n) } else { view.row(n - read.start) }
        };
        let row_bytes = columns.len() * 2;
        let at_once = (PIECE_BYTES / row_bytes).max(1);
        let mut bytes = vec![0_u8; at_once.min(n_rows) * row_bytes];
        for begin in (0..n_rows).step_by(at_once) {
            let n = at_once.min(n_rows - begin);
            let piece = &mut bytes[..n * row_bytes];
            convert(target, &|i| row(rows.start + begin + i), n_columns, &columns, piece);
            target.device.upload(to.at(begin * row_bytes), piece)?;
        }
        match rows.len() - n_rows {
            0 => Ok(()),
            n_behind => Ok(target.device.fill(to.at(n_rows * row_bytes), 0, n_behind * row_bytes)?),
        }
    }

    /// Copies a norm's weights as f32.
    fn vector(&mut self, id: WeightId) -> Result<DevicePtr> {
        let n = self.checkpoint.config().shape(id)[0];
        let at = self.arena.take(n * size_of::<f32>());
        if let Some(Target { device, pool, .. }) = self.target {
            let mut buffer = Vec::new();
            let tensor = self.checkpoint.read(id, 0..1, &mut buffer, pool)?;
            let mut values = vec![0.0; n];
            dequantize_row(tensor.view().row(0), &mut values);
            let offset = self.checkpoint.offset(id);
            device.upload_words(at, values.iter().map(|value| (value + offset).to_bits()))?;
        }
        Ok(at)
    }
}

/// Returns element `n` of a row that is not quantized.
fn element(row: RowView<'_>, n: usize) -> RowView<'_> {
    let size = if row.dtype == DType::F32 { 4 } else { 2 };
    RowView { dtype: row.dtype, bytes: &row.bytes[n * size..(n + 1) * size] }
}

/// Writes the `columns` of rows of `n_columns` elements to `out`, rounded to the target's type. The threads share the
/// rows.
fn convert<'r>(
    target: Target<'_>,
    row: &(dyn Fn(usize) -> RowView<'r> + Sync),
    n_columns: usize,
    columns: &Range<usize>,
    out: &mut [u8],
) {
    let own = if target.element == Element::F16 { DType::F16 } else { DType::BF16 };
    target.pool.run_chunks(out, columns.len() * 2, &|n, out| {
        let row = row(n);
        if row.dtype == own {
            out.copy_from_slice(&row.bytes[columns.start * 2..columns.end * 2]);
            return;
        }
        let mut values = vec![0.0_f32; n_columns];
        dequantize_row(row, &mut values);
        for (out, &value) in out.chunks_exact_mut(2).zip(&values[columns.clone()]) {
            out.copy_from_slice(&bytes_of(target.element, value));
        }
    });
}

/// Returns `value` rounded to a 16-bit type.
pub(super) fn bytes_of(element: Element, value: f32) -> [u8; 2] {
    match element {
        Element::F16 => f16::from_f32(value).to_le_bytes(),
        _ => bf16::from_f32(value).to_le_bytes(),
    }
}
