//! The tensors of a checkpoint, packed once for this machine. After packing the checkpoint can be dropped.

use crate::dtype::{ComputeMode, DType};
use crate::error::{DeviceError, Result, Unsupported};
use crate::model::checkpoint::Checkpoint;
use crate::model::family::{LayerSlot, Slot};
use crate::ops::packed::{PackedFormat, PackedMatrix};
use crate::ops::{LinearPart, gate_up_row, gate_up_rows};
use crate::quant::dequantize_row;
use crate::tensor::{LoadedTensor, RowView};
use crate::threads::Pool;

/// A product with an optional bias.
#[derive(Debug)]
pub struct Projection {
    /// `[n_out, n_in]`.
    pub matrix: PackedMatrix,
    /// `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    /// As a part of a [`linear`](crate::ops::linear) call.
    pub fn part(&self) -> LinearPart<'_> {
        LinearPart { weight: &self.matrix, bias: self.bias.as_deref() }
    }
}

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// Norm before attention, `[d_model]`.
    pub attn_norm: Vec<f32>,
    /// `[n_heads * d_head, d_model]`.
    pub q: Projection,
    /// `[n_kv_heads * d_head, d_model]`.
    pub k: Projection,
    /// `[n_kv_heads * d_head, d_model]`.
    pub v: Projection,
    /// Norm of each query head, `[d_head]`.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head, `[d_head]`.
    pub k_norm: Option<Vec<f32>>,
    /// `[d_model, n_heads * d_head]`.
    pub o: PackedMatrix,
    /// Norm before the feed-forward part, `[d_model]`.
    pub ffn_norm: Vec<f32>,
    /// Gate and up, interleaved 16 by 16 as [`gate_up_row`] says, `[gate_up_rows(d_ff), d_model]`.
    pub gate_up: PackedMatrix,
    /// `[d_model, d_ff]`.
    pub down: PackedMatrix,
}

/// All tensors of a model.
#[derive(Debug)]
pub struct Weights {
    /// `[vocab_size, d_model]`; also the head of a model with a tied head.
    pub embed: PackedMatrix,
    /// `[vocab_size, d_model]` of a model with its own head.
    lm_head: Option<PackedMatrix>,
    /// Norm after the last layer, `[d_model]`.
    pub output_norm: Vec<f32>,
    /// In order of depth.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Packs every tensor of `checkpoint` in the format that `mode` asks for. Errors: no memory.
    pub fn pack(checkpoint: &Checkpoint, mode: ComputeMode, pool: &Pool) -> Result<Self> {
        let packer = Packer { checkpoint, mode, pool };
        let config = checkpoint.config();
        let lm_head = if config.tied_head { None } else { Some(packer.matrix(Slot::LmHead)?) };
        Ok(Self {
            embed: packer.matrix(Slot::Embed)?,
            lm_head,
            output_norm: packer.vector(Slot::OutputNorm),
            layers: (0..config.n_layers).map(|index| packer.layer(index)).collect::<Result<_>>()?,
        })
    }

    /// The matrix that turns final hidden states into logits.
    pub fn head(&self) -> &PackedMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embed)
    }

    /// Bytes held by matrices and vectors.
    pub fn n_bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(LayerWeights::n_bytes).sum();
        let head = self.lm_head.as_ref().map_or(0, PackedMatrix::n_bytes);
        self.embed.n_bytes() + head + self.output_norm.len() * size_of::<f32>() + layers
    }

    /// Replaces one tensor. `values` is row-major in the checkpoint's shape; `stored_row(n)` is the row of it
    /// that holds logical row `n`. `n_columns` is the length of a row (1 for a vector). The caller has checked
    /// the number of values. Errors: the slot is held in blocks; nothing has changed then.
    pub fn replace(&mut self, slot: Slot, values: &Replacement<'_>) -> Result<()> {
        match self.place(slot) {
            Place::Vector(vector) => {
                for (n, value) in vector.iter_mut().enumerate() {
                    *value = values.row(n)[0];
                }
            }
            Place::Matrix(matrix) => {
                values.check_format(matrix)?;
                let rows: Vec<usize> = (0..matrix.n_rows()).collect();
                let gathered: Vec<f32> = rows.iter().flat_map(|&n| values.row(n)).copied().collect();
                matrix.repack_rows(&rows, &gathered);
            }
            Place::GateOrUp { matrix, is_up } => {
                values.check_format(matrix)?;
                let n_inner = values.n_rows();
                let ours = |&n: &usize| {
                    gate_up_row(n_inner, n).filter(|&(up, _)| up == is_up).map(|(_, row)| (n, row))
                };
                let pairs: Vec<(usize, usize)> =
                    (0..matrix.n_rows()).collect::<Vec<_>>().iter().filter_map(ours).collect();
                let rows: Vec<usize> = pairs.iter().map(|&(n, _)| n).collect();
                let gathered: Vec<f32> =
                    pairs.iter().flat_map(|&(_, row)| values.row(row)).copied().collect();
                matrix.repack_rows(&rows, &gathered);
            }
        }
        Ok(())
    }

    /// Where a slot's values are held. Panics on a slot that the model does not have: names were checked.
    fn place(&mut self, slot: Slot) -> Place<'_> {
        const ABSENT: &str = "the slot was found by its name in this model's checkpoint";
        let (index, part) = match slot {
            Slot::Embed => return Place::Matrix(&mut self.embed),
            Slot::LmHead => return Place::Matrix(self.lm_head.as_mut().expect(ABSENT)),
            Slot::OutputNorm => return Place::Vector(&mut self.output_norm),
            Slot::Layer(index, part) => (index, part),
        };
        let layer = &mut self.layers[index];
        match part {
            LayerSlot::AttnNorm => Place::Vector(&mut layer.attn_norm),
            LayerSlot::Q => Place::Matrix(&mut layer.q.matrix),
            LayerSlot::K => Place::Matrix(&mut layer.k.matrix),
            LayerSlot::V => Place::Matrix(&mut layer.v.matrix),
            LayerSlot::QBias => Place::Vector(layer.q.bias.as_mut().expect(ABSENT)),
            LayerSlot::KBias => Place::Vector(layer.k.bias.as_mut().expect(ABSENT)),
            LayerSlot::VBias => Place::Vector(layer.v.bias.as_mut().expect(ABSENT)),
            LayerSlot::O => Place::Matrix(&mut layer.o),
            LayerSlot::QNorm => Place::Vector(layer.q_norm.as_mut().expect(ABSENT)),
            LayerSlot::KNorm => Place::Vector(layer.k_norm.as_mut().expect(ABSENT)),
            LayerSlot::FfnNorm => Place::Vector(&mut layer.ffn_norm),
            LayerSlot::Gate => Place::GateOrUp { matrix: &mut layer.gate_up, is_up: false },
            LayerSlot::Up => Place::GateOrUp { matrix: &mut layer.gate_up, is_up: true },
            LayerSlot::Down => Place::Matrix(&mut layer.down),
        }
    }
}

enum Place<'a> {
    Vector(&'a mut Vec<f32>),
    Matrix(&'a mut PackedMatrix),
    GateOrUp { matrix: &'a mut PackedMatrix, is_up: bool },
}

/// New values of one tensor, in the checkpoint's own row order.
pub struct Replacement<'a> {
    /// Its name in the checkpoint.
    pub name: &'a str,
    /// `[n_rows, n_columns]` row-major.
    pub values: &'a [f32],
    /// Length of a row; 1 for a vector.
    pub n_columns: usize,
    /// The row that holds a logical row.
    pub stored_row: &'a dyn Fn(usize) -> usize,
}

impl Replacement<'_> {
    fn n_rows(&self) -> usize {
        self.values.len() / self.n_columns
    }

    fn row(&self, logical: usize) -> &[f32] {
        let start = (self.stored_row)(logical) * self.n_columns;
        &self.values[start..start + self.n_columns]
    }

    fn check_format(&self, matrix: &PackedMatrix) -> Result<()> {
        let stored = match matrix.format() {
            PackedFormat::F32 | PackedFormat::BF16 => return Ok(()),
            format => format.dtype().name(),
        };
        Err(Unsupported::ReplaceWeight { name: self.name.to_owned(), stored, given: "float32 values" }.into())
    }
}

impl LayerWeights {
    fn n_bytes(&self) -> usize {
        let matrices = [&self.q.matrix, &self.k.matrix, &self.v.matrix, &self.o, &self.gate_up, &self.down];
        let vectors = [&self.q.bias, &self.k.bias, &self.v.bias, &self.q_norm, &self.k_norm];
        let n_values = self.attn_norm.len()
            + self.ffn_norm.len()
            + vectors.into_iter().flatten().map(Vec::len).sum::<usize>();
        matrices.into_iter().map(PackedMatrix::n_bytes).sum::<usize>() + n_values * size_of::<f32>()
    }
}

/// The format in which `mode` holds a matrix stored as `dtype` with rows of `n_columns`.
pub fn packed_format(mode: ComputeMode, dtype: DType, n_columns: usize) -> PackedFormat {
    let wanted = match mode {
        ComputeMode::Float32 => PackedFormat::F32,
        ComputeMode::Bfloat16 => PackedFormat::BF16,
        ComputeMode::Auto => PackedFormat::of(dtype),
    };
    if PackedMatrix::can_pack(wanted, n_columns) { wanted } else { PackedFormat::F32 }
}

struct Packer<'a> {
    checkpoint: &'a Checkpoint,
    mode: ComputeMode,
    pool: &'a Pool,
}

impl Packer<'_> {
    fn layer(&self, index: usize) -> Result<LayerWeights> {
        let at = |part| Slot::Layer(index, part);
        let config = self.checkpoint.config();
        let (bias, norm) = (config.qkv_bias, config.qk_norm);
        Ok(LayerWeights {
            attn_norm: self.vector(at(LayerSlot::AttnNorm)),
            q: self.projection(at(LayerSlot::Q), bias.then(|| at(LayerSlot::QBias)))?,
            k: self.projection(at(LayerSlot::K), bias.then(|| at(LayerSlot::KBias)))?,
            v: self.projection(at(LayerSlot::V), bias.then(|| at(LayerSlot::VBias)))?,
            q_norm: norm.then(|| self.vector(at(LayerSlot::QNorm))),
            k_norm: norm.then(|| self.vector(at(LayerSlot::KNorm))),
            o: self.matrix(at(LayerSlot::O))?,
            ffn_norm: self.vector(at(LayerSlot::FfnNorm)),
            gate_up: self.gate_up(index)?,
            down: self.matrix(at(LayerSlot::Down))?,
        })
    }

    fn projection(&self, matrix: Slot, bias: Option<Slot>) -> Result<Projection> {
        Ok(Projection { matrix: self.matrix(matrix)?, bias: bias.map(|slot| self.vector(slot)) })
    }

    fn matrix(&self, slot: Slot) -> Result<PackedMatrix, DeviceError> {
        let loaded = self.load(slot)?;
        let tensor = loaded.view();
        let format = packed_format(self.mode, tensor.dtype, tensor.n_columns());
        let source = |n: usize| tensor.row(self.checkpoint.stored_row(slot, n));
        PackedMatrix::pack(self.pool, format, tensor.n_rows(), tensor.n_columns(), &source)
    }

    /// Both matrices in one, so that one region reads the input once. Different formats meet in f32.
    fn gate_up(&self, index: usize) -> Result<PackedMatrix, DeviceError> {
        let gate = self.load(Slot::Layer(index, LayerSlot::Gate))?;
        let up = self.load(Slot::Layer(index, LayerSlot::Up))?;
        let (gate, up) = (gate.view(), up.view());
        let (n_inner, n_columns) = (gate.n_rows(), gate.n_columns());
        let formats = [gate.dtype, up.dtype].map(|dtype| packed_format(self.mode, dtype, n_columns));
        let format = if formats[0] == formats[1] { formats[0] } else { PackedFormat::F32 };
        // Zero bytes are zeros in every type (a block's scale is zero too): the rows that fill the last panel.
        let zeros = vec![0_u8; gate.bytes.len() / n_inner];
        let padding = RowView { dtype: gate.dtype, bytes: &zeros };
        let source = |n: usize| match gate_up_row(n_inner, n) {
            Some((false, row)) => gate.row(row),
            Some((true, row)) => up.row(row),
            None => padding,
        };
        PackedMatrix::pack(self.pool, format, gate_up_rows(n_inner), n_columns, &source)
    }

    /// A norm's or a bias's values in logical order.
    fn vector(&self, slot: Slot) -> Vec<f32> {
        const STORED: &str = "opening the checkpoint checked that every slot is there, vectors as they are";
        let tensor = self.checkpoint.tensor(slot).expect(STORED);
        let mut stored = vec![0.0; tensor.n_columns()];
        dequantize_row(tensor.row(0), &mut stored);
        (0..stored.len()).map(|n| stored[self.checkpoint.stored_row(slot, n)]).collect()
    }

    /// The tensor of `slot`. The pages of those before it, which are packed by now, are let go.
    fn load(&self, slot: Slot) -> Result<LoadedTensor<'_>, DeviceError> {
        self.checkpoint.release_pages();
        self.checkpoint.load(slot, self.pool)
    }
}
