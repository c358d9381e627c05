//! Packs the tensors of an encoder's checkpoint, which can be dropped afterwards.

use super::{Encoder, Head, Layer, Norm, Up};
use crate::arch::encoder::{EncoderTask, HeadRule, PositionRule};
use crate::arch::rope::RopeConfig;
use crate::dtype::ComputeMode;
use crate::error::Result;
use crate::forward::weights::{PIECE_BYTES, Projection, rows_at_once};
use crate::load::encoder::EncoderCheckpoint;
use crate::ops::packed::{PANEL, PackedFormat, PackedMatrix};
use crate::ops::{gate_up_row, gate_up_rows};
use crate::progress::Progress;
use crate::tensor::RowView;
use crate::threads::Pool;
use std::ops::Range;

const F32: Option<PackedFormat> = Some(PackedFormat::F32);

impl Encoder {
    /// Packs every tensor of `checkpoint`. The caller has rejected modes that quantize.
    ///
    /// Errors: a file that was truncated, errors of the system, no memory.
    pub fn pack(
        checkpoint: &EncoderCheckpoint,
        mode: ComputeMode,
        pool: &Pool,
        progress: &Progress,
    ) -> Result<Self> {
        let mut packer = Packer { checkpoint, mode, pool, progress, buffer: Vec::new() };
        let config = checkpoint.config().clone();
        let names = checkpoint.names();
        let own = |name: &str| checkpoint.name(name);
        let learned = config.spec.positions != PositionRule::Rotated;
        let ropes = config.theta.map(|theta| RopeConfig::plain(theta).table(config.d_head()));
        Ok(Self {
            words: packer.matrix(&own(names.words), None)?,
            positions: learned.then(|| packer.matrix(&own(names.positions), F32)).transpose()?,
            types: config.spec.has_types.then(|| packer.matrix(&own(names.types), F32)).transpose()?,
            embed_norm: packer.norm(&own(names.embed_norm))?,
            layers: (0..config.n_layers).map(|index| packer.layer(index)).collect::<Result<_>>()?,
            final_norm: config.spec.pre_norms.then(|| packer.norm(&own(names.final_norm))).transpose()?,
            head: (config.task == EncoderTask::Score).then(|| packer.head()).transpose()?,
            ropes: (!learned).then_some(ropes),
            config,
        })
    }
}

struct Packer<'a> {
    checkpoint: &'a EncoderCheckpoint,
    mode: ComputeMode,
    pool: &'a Pool,
    progress: &'a Progress,
    /// The tensor that is being packed.
    buffer: Vec<u8>,
}

impl Packer<'_> {
    fn layer(&mut self, index: usize) -> Result<Layer> {
        let checkpoint = self.checkpoint;
        let (config, names) = (checkpoint.config(), checkpoint.names());
        let at = |name: &str| checkpoint.name(&name.replace("{}", &index.to_string()));
        let (spec, d) = (config.spec, config.d_model);
        let qkv = match names.qkv {
            [q, k, v] => [self.projection(&at(q))?, self.projection(&at(k))?, self.projection(&at(v))?],
            fused => {
                let name = at(fused[0]);
                let mut part = |i: usize| -> Result<Projection> {
                    let matrix = self.rows(&name, None, i * d..(i + 1) * d)?;
                    Ok(Projection { matrix, bias: None })
                };
                [part(0)?, part(1)?, part(2)?]
            }
        };
        let has_attn_norm = checkpoint.has_attn_norm(index);
        Ok(Layer {
            qkv,
            o: self.projection(&at(names.o))?,
            attn_norm: has_attn_norm.then(|| self.norm(&at(names.attn_norm))).transpose()?,
            up: if spec.is_gated {
                Up::Gated(self.gate_up(&at(names.up))?)
            } else {
                Up::Plain(self.projection(&at(names.up))?)
            },
            down: self.projection(&at(names.down))?,
            ffn_norm: self.norm(&at(names.ffn_norm))?,
        })
    }

    fn head(&mut self) -> Result<Head> {
        let spec = self.checkpoint.config().spec;
        let normed = spec.head == HeadRule::Normed;
        let names = self.checkpoint.names();
        let out = names.head_out;
        Ok(Head {
            dense: self.projection(&self.checkpoint.head_dense())?,
            norm: normed.then(|| self.norm(names.head_norm)).transpose()?,
            out: Projection { matrix: self.matrix(out, None)?, bias: Some(self.bias(out)?) },
        })
    }

    fn projection(&mut self, name: &str) -> Result<Projection> {
        let has_bias = self.checkpoint.config().spec.has_biases;
        Ok(Projection {
            matrix: self.matrix(name, None)?,
            bias: has_bias.then(|| self.bias(name)).transpose()?,
        })
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let has_bias = self.checkpoint.config().spec.has_biases;
        Ok(Norm {
            weight: self.checkpoint.vector(&format!("{name}.weight"), self.pool)?,
            bias: has_bias.then(|| self.bias(name)).transpose()?,
        })
    }

    fn bias(&self, name: &str) -> Result<Vec<f32>> {
        self.checkpoint.vector(&format!("{name}.bias"), self.pool)
    }

    /// Packs a matrix in `format`, or in the format of the mode.
    fn matrix(&mut self, name: &str, format: Option<PackedFormat>) -> Result<PackedMatrix> {
        self.rows(name, format, 0..usize::MAX)
    }

    /// As [`Packer::matrix`], some of its rows.
    fn rows(&mut self, name: &str, format: Option<PackedFormat>, rows: Range<usize>) -> Result<PackedMatrix> {
        let name = format!("{name}.weight");
        let format = format.unwrap_or_else(|| self.checkpoint.format(&name, self.mode));
        let (dtype, [n_rows, n_columns]) = self.checkpoint.shape(&name);
        let rows = rows.start..rows.end.min(n_rows);
        let row_bytes = dtype.bytes_of(n_columns).expect("rows are whole blocks");
        let at_once = rows_at_once(self.pool, PIECE_BYTES, row_bytes, PANEL);
        let mut matrix = PackedMatrix::zeroed(format, rows.len(), n_columns)?;
        for start in (0..rows.len()).step_by(at_once) {
            let piece = start..rows.len().min(start + at_once);
            let stored = rows.start + piece.start..rows.start + piece.end;
            let tensor = self.checkpoint.read(&name, stored, &mut self.buffer, self.pool)?;
            let view = tensor.view();
            matrix.fill(self.pool, piece, &|n| view.row(n - start));
        }
        self.progress.bytes_packed(matrix.n_bytes());
        Ok(matrix)
    }

    /// Packs gate over up in one interleaved matrix.
    fn gate_up(&mut self, name: &str) -> Result<PackedMatrix> {
        let name = format!("{name}.weight");
        let format = self.checkpoint.format(&name, self.mode);
        let (_, [n_rows, n_columns]) = self.checkpoint.shape(&name);
        let tensor = self.checkpoint.read(&name, 0..n_rows, &mut self.buffer, self.pool)?;
        let (view, n_inner) = (tensor.view(), n_rows / 2);
        let mut matrix = PackedMatrix::zeroed(format, gate_up_rows(n_inner), n_columns)?;
        matrix.fill(self.pool, 0..gate_up_rows(n_inner), &|n| match gate_up_row(n_inner, n) {
            Some((is_up, row)) => view.row(if is_up { n_inner + row } else { row }),
            // Rows of padding in the last panel.
            None => RowView { dtype: view.dtype, bytes: &[] },
        });
        self.progress.bytes_packed(matrix.n_bytes());
        Ok(matrix)
    }
}
