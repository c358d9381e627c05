//! A checkpoint's tensors in device memory, or a rank's part of them: matrices in the device's 16-bit type, dequantised on
//! the way, those that share an input one below the other; norms in f32.

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

/// Bytes that are converted before they are copied.
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
    /// `[n_head_rows, d_model]`: of the embedding, if the head is tied.
    pub head: DevicePtr,
    /// `[d_model]` f32
    pub output_norm: DevicePtr,
    /// In order of depth.
    pub layers: Vec<DeviceLayer>,
    /// Of all together.
    pub n_bytes: usize,
}

/// The type that a checkpoint's weights have on a device: f16 of f16, else bf16.
pub fn element_of(checkpoint: &Checkpoint) -> Element {
    match checkpoint.tensor(WeightId::Embed).map(|tensor| tensor.dtype) {
        Some(DType::F16) => Element::F16,
        _ => Element::Bf16,
    }
}

/// Rows of the head that a rank has. Of several, each has as many, and they begin where the library wants a matrix to
/// begin; those behind the vocabulary are zeros.
pub fn n_head_rows(vocab_size: usize, world: usize) -> usize {
    if world == 1 { vocab_size } else { vocab_size.div_ceil(world).next_multiple_of(16) }
}

/// Bytes of [`load`]'s arena.
pub fn n_bytes(checkpoint: &Checkpoint, shard: Shard) -> Result<usize> {
    let mut counter = Loader { checkpoint, shard, target: None, arena: Arena::counting() };
    counter.weights()?;
    Ok(counter.arena.n_bytes())
}

/// Copies every tensor, or the part of it that the device's rank has, to one arena on `device`. Errors: the device's; a file
/// that was truncated, the system's; no memory.
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

/// The part of a model that a device has.
pub fn shard_of(device: &dyn Device) -> Shard {
    Shard { rank: device.rank(), world: device.world() }
}

#[derive(Clone, Copy)]
struct Target<'a> {
    device: &'a dyn Device,
    element: Element,
    pool: &'a Pool,
}

/// Walks through a model's tensors: counts them, or copies them as well.
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

    /// This rank's rows and columns of a tensor; a vector's elements are rows of one. Rows may reach beyond the last.
    fn part(&self, slot: WeightId) -> (Range<usize>, Range<usize>) {
        let (config, Shard { rank, world }) = (self.checkpoint.config(), self.shard);
        let shape = config.shape(slot);
        let n_head_rows = n_head_rows(config.vocab_size, world);
        let rows = match slot {
            // The head's rows are among them.
            WeightId::Embed if config.tied_head => 0..world * n_head_rows,
            WeightId::Embed => 0..config.vocab_size,
            WeightId::LmHead => rank * n_head_rows..(rank + 1) * n_head_rows,
            WeightId::OutputNorm | WeightId::Layer(..) => self.shard.rows(slot, shape[0]),
        };
        (rows, shape.get(1).map_or(0..1, |&n_columns| self.shard.plain_columns(slot, n_columns)))
    }

    fn part_bytes(&self, slot: WeightId) -> usize {
        let (rows, columns) = self.part(slot);
        rows.len() * columns.len() * 2
    }

    /// Tensors one below the other, in the device's type.
    fn matrix(&mut self, slots: &[WeightId]) -> Result<DevicePtr> {
        let n_bytes = slots.iter().map(|&slot| self.part_bytes(slot)).sum();
        let at = self.arena.take(n_bytes);
        if let Some(target) = self.target {
            let mut to = at;
            for &slot in slots {
                self.copy(target, slot, to)?;
                to = to.at(self.part_bytes(slot));
            }
        }
        Ok(at)
    }

    /// Copies this rank's part of a tensor, row by row in the order that the forward pass wants.
    fn copy(&self, target: Target<'_>, slot: WeightId, to: DevicePtr) -> Result<()> {
        let config = self.checkpoint.config();
        let (stored, first) = config.stored_weight(slot);
        let shape = config.shape(slot);
        let n_columns = shape.get(1).copied().unwrap_or(1);
        let (rows, columns) = self.part(slot);
        // Of this rank's, those that there are.
        let n_rows = rows.end.min(shape[0]).saturating_sub(rows.start);
        // A vector's elements are rows of one, as its order is that of a matrix's rows.
        let is_vector = shape.len() < 2;
        let begin = first + rows.start.min(shape[0]);
        let read = if is_vector { 0..1 } else { begin..begin + n_rows };
        let mut buffer = Vec::new();
        let tensor = self.checkpoint.read(stored, read.clone(), &mut buffer, target.pool)?;
        let view = tensor.view();
        let row = |n: usize| {
            let n = first + self.checkpoint.stored_row(slot, n);
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

    /// A norm's weights in f32.
    fn vector(&mut self, slot: WeightId) -> Result<DevicePtr> {
        let n = self.checkpoint.config().shape(slot)[0];
        let at = self.arena.take(n * size_of::<f32>());
        if let Some(Target { device, pool, .. }) = self.target {
            let mut buffer = Vec::new();
            let tensor = self.checkpoint.read(slot, 0..1, &mut buffer, pool)?;
            let mut values = vec![0.0; n];
            dequantize_row(tensor.view().row(0), &mut values);
            let offset = self.checkpoint.offset(slot);
            device.upload_words(at, values.iter().map(|value| (value + offset).to_bits()))?;
        }
        Ok(at)
    }
}

/// Element `n` of a row that is stored in numbers.
fn element(row: RowView<'_>, n: usize) -> RowView<'_> {
    let size = if row.dtype == DType::F32 { 4 } else { 2 };
    RowView { dtype: row.dtype, bytes: &row.bytes[n * size..(n + 1) * size] }
}

/// The `columns` of rows of `n_columns` in the target's type, to the nearest; the threads share them.
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

/// A number in a 16-bit type, to the nearest.
pub(super) fn bytes_of(element: Element, value: f32) -> [u8; 2] {
    match element {
        Element::F16 => f16::from_f32(value).to_le_bytes(),
        _ => bf16::from_f32(value).to_le_bytes(),
    }
}
