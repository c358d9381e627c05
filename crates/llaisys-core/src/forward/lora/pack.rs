//! Packs the matrices of an adapter. The adapter's files can be closed afterwards.

use super::{LayerLora, LoraAdapter, LoraAt};
use crate::arch::config::ModelConfig;
use crate::arch::spec::{LayerWeight, WeightId};
use crate::dtype::ComputeMode;
use crate::error::Result;
use crate::load::lora::{LoraCheckpoint, LoraModule};
use crate::ops::lora::{LoraPanels, LoraPart, LoraProduct, OUT_BLOCK, PanelSizes, RANK_BLOCK};
use crate::threads::Pool;

/// The projections of each input, in the order of [`LoraAt`].
const PROJECTIONS: [(LoraAt, &[LayerWeight]); 4] = [
    (LoraAt::Attention, &[LayerWeight::Q, LayerWeight::K, LayerWeight::V, LayerWeight::AttnGate]),
    (LoraAt::Attended, &[LayerWeight::O]),
    (LoraAt::FeedForward, &[LayerWeight::Gate, LayerWeight::Up]),
    (LoraAt::Inner, &[LayerWeight::Down]),
];

/// The most modules of one input.
pub(in crate::forward) const MODULES_MAX: usize = 4;

impl LoraAdapter {
    /// Reads and packs an adapter. In mode float32 its matrices are in f32; in the others, those that are stored in bf16
    /// stay in bf16. Errors: as [`LoraCheckpoint::a`].
    pub fn pack(adapter: &LoraCheckpoint, mode: ComputeMode, pool: &Pool) -> Result<Self> {
        let packer = Packer { adapter, model: adapter.model(), mode, pool };
        let layers = (0..packer.model.n_layers).map(|layer| packer.layer(layer)).collect::<Result<_>>()?;
        Ok(Self { layers, rank: adapter.rank(), hash: adapter.hash()? })
    }
}

struct Packer<'a> {
    adapter: &'a LoraCheckpoint,
    model: &'a ModelConfig,
    mode: ComputeMode,
    pool: &'a Pool,
}

impl Packer<'_> {
    fn layer(&self, layer: usize) -> Result<LayerLora> {
        let mut made = LayerLora::default();
        for (at, projections) in PROJECTIONS {
            made.products[at as usize] = self.product(layer, projections)?;
        }
        Ok(made)
    }

    /// Stacks the modules of one input. Projections that the folder fuses have one module.
    fn product(&self, layer: usize, projections: &[LayerWeight]) -> Result<Option<LoraProduct>> {
        let mut modules: Vec<(LayerWeight, LoraModule, usize)> = Vec::new();
        let mut n_ranks = 0;
        for (stored, _) in self.projections(projections).map(|(_, part)| self.model.stored_in(part)) {
            let is_new = modules.iter().all(|(known, ..)| *known != stored);
            if let Some(module) = self.adapter.module(layer, stored).filter(|_| is_new) {
                modules.push((stored, module, n_ranks));
                n_ranks += module.rank;
            }
        }
        let Some(&(first, ..)) = modules.first() else { return Ok(None) };
        let is_bf16 = self.mode != ComputeMode::Float32
            && modules.iter().all(|(_, module, _)| self.adapter.is_bf16(*module));
        let n_inner = self.model.shape(WeightId::Layer(layer, first))[1];
        let sizes = PanelSizes { width: RANK_BLOCK, n_inner, n_columns: n_ranks };
        let mut a = LoraPanels::zeroed(sizes, is_bf16)?;
        let mut scales = vec![0.0; n_ranks.next_multiple_of(RANK_BLOCK)];
        let mut parts = Vec::new();
        for &(stored, module, first_rank) in &modules {
            for (j, row) in self.adapter.a(module, self.pool)?.chunks_exact(n_inner).enumerate() {
                a.set_column(first_rank + j, row);
            }
            scales[first_rank..first_rank + module.rank].fill(module.scale);
            let b = self.adapter.b(module, self.pool)?;
            for (target, part) in self.projections(projections) {
                if self.model.stored_in(part).0 == stored {
                    let b = self.rows_of_b(layer, part, &b, is_bf16)?;
                    parts.push(LoraPart { target, first_rank, b });
                }
            }
        }
        Ok(Some(LoraProduct { a, scales, parts }))
    }

    /// The projections that the model has, each with its number.
    fn projections<'p>(
        &self,
        projections: &'p [LayerWeight],
    ) -> impl Iterator<Item = (usize, LayerWeight)> + use<'p> {
        let has_gate = self.model.has_attn_gate();
        let parts = projections.iter().copied().enumerate();
        parts.filter(move |(_, part)| has_gate || *part != LayerWeight::AttnGate)
    }

    /// Packs the rows of B that belong to a projection, in the order of its outputs: from `b`, which has those of the
    /// folder.
    fn rows_of_b(&self, layer: usize, part: LayerWeight, b: &[f32], is_bf16: bool) -> Result<LoraPanels> {
        let n_columns = self.model.shape(WeightId::Layer(layer, part))[0];
        let (stored, map) = self.model.stored_in(part);
        let rank = b.len() / self.model.shape(WeightId::Layer(layer, stored))[0];
        let mut panels =
            LoraPanels::zeroed(PanelSizes { width: OUT_BLOCK, n_inner: rank, n_columns }, is_bf16)?;
        let is_rotated = matches!(part, LayerWeight::Q | LayerWeight::K);
        for n in 0..n_columns {
            let rows = self.model.arch.folder_rope_rows;
            let row = if is_rotated { rows.stored_row(n, self.model.head_widths(layer)) } else { n };
            panels.set_column(n, &b[map.row(row) * rank..][..rank]);
        }
        Ok(panels)
    }
}
