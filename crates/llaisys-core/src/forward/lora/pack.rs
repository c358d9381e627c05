//! Packs the matrices of an adapter. The adapter's files can be closed afterwards.

use super::LoraAdapter;
use crate::arch::config::ModelConfig;
use crate::arch::spec::{LayerWeight, WeightId};
use crate::dtype::ComputeMode;
use crate::error::Result;
use crate::load::lora::{LoraCheckpoint, LoraModule};
use crate::ops::lora::{LoraA, LoraB, LoraPart, LoraProduct, RANK_BLOCK};
use crate::ops::{gate_up_row, gate_up_rows};
use crate::threads::Pool;
use std::ops::Range;

/// The projections of each input, in the order of [`LoraAt`](super::LoraAt).
const PROJECTIONS: [&[LayerWeight]; 4] = [
    &[LayerWeight::Q, LayerWeight::K, LayerWeight::V, LayerWeight::AttnGate],
    &[LayerWeight::O],
    &[LayerWeight::Gate, LayerWeight::Up],
    &[LayerWeight::Down],
];

/// The number of the gate of attention among the projections of its input.
pub(in crate::forward) const ATTN_GATE: usize = 3;

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

/// A module of one input.
struct Module {
    /// The stored weight that it changes.
    stored: LayerWeight,
    matrices: LoraModule,
    /// Its first rank among those of the input.
    first_rank: usize,
    /// B as stored.
    b: Vec<f32>,
}

impl Module {
    fn ranks(&self) -> Range<usize> {
        self.first_rank..self.first_rank + self.matrices.rank
    }
}

impl Packer<'_> {
    fn layer(&self, layer: usize) -> Result<[Option<LoraProduct>; 4]> {
        let mut made = [const { None }; 4];
        for (product, projections) in made.iter_mut().zip(PROJECTIONS) {
            *product = self.product(layer, projections)?;
        }
        Ok(made)
    }

    /// Stacks the modules of one input. Projections that are stored fused have one module.
    fn product(&self, layer: usize, projections: &[LayerWeight]) -> Result<Option<LoraProduct>> {
        let mut modules: Vec<Module> = Vec::new();
        let mut n_ranks = 0;
        for (_, part) in self.projections(projections) {
            let (stored, _) = self.model.stored_in(part);
            let is_new = modules.iter().all(|module| module.stored != stored);
            if let Some(matrices) = self.adapter.module(layer, stored).filter(|_| is_new) {
                let b = self.adapter.b(matrices, self.pool)?;
                modules.push(Module { stored, matrices, first_rank: n_ranks, b });
                n_ranks += matrices.rank;
            }
        }
        let Some(first) = modules.first() else { return Ok(None) };
        let is_bf16 = self.mode != ComputeMode::Float32
            && modules.iter().all(|module| self.adapter.is_bf16(module.matrices));
        let n_in = self.model.shape(WeightId::Layer(layer, first.stored))[1];
        let mut a = LoraA::zeroed(n_ranks, n_in, is_bf16)?;
        let mut scales = vec![0.0; n_ranks.next_multiple_of(RANK_BLOCK)];
        for module in &modules {
            let of_a = self.adapter.a(module.matrices, self.pool)?;
            for (rank, values) in module.ranks().zip(of_a.chunks_exact(n_in)) {
                a.set_rank(rank, values);
            }
            scales[module.ranks()].fill(module.matrices.scale);
        }
        let of = |part| {
            let (stored, _) = self.model.stored_in(part);
            modules.iter().find(|module| module.stored == stored)
        };
        let mut parts = Vec::new();
        if let [LayerWeight::Gate, LayerWeight::Up] = projections {
            let b = self.gate_up(layer, [of(LayerWeight::Gate), of(LayerWeight::Up)], is_bf16)?;
            parts.push(LoraPart { target: 0, b });
        } else {
            for (target, part) in self.projections(projections) {
                let Some(module) = of(part) else { continue };
                let n_rows = self.model.shape(WeightId::Layer(layer, part))[0];
                let mut b = LoraB::zeroed(n_rows, [module.ranks(), module.ranks()], is_bf16)?;
                self.for_rows(layer, part, module, &mut |n, values| b.set_row(n, values));
                parts.push(LoraPart { target, b });
            }
        }
        Ok(Some(LoraProduct { a, scales, parts }))
    }

    /// Packs B of gate and up, whose rows alternate as those of the weights.
    fn gate_up(&self, layer: usize, modules: [Option<&Module>; 2], is_bf16: bool) -> Result<LoraB> {
        let d_ff = self.model.shape(WeightId::Layer(layer, LayerWeight::Gate))[0];
        let ranks = modules.map(|module| module.map_or(0..0, Module::ranks));
        let mut b = LoraB::zeroed(gate_up_rows(d_ff), ranks, is_bf16)?;
        for (part, is_up) in [(LayerWeight::Gate, false), (LayerWeight::Up, true)] {
            let Some(module) = modules[usize::from(is_up)] else { continue };
            let mut ours =
                (0..gate_up_rows(d_ff)).filter(|&n| gate_up_row(d_ff, n).is_some_and(|(up, _)| up == is_up));
            // In both orders the rows of a half ascend.
            self.for_rows(layer, part, module, &mut |_, values| {
                b.set_row(ours.next().expect("a packed row for each row"), values);
            });
        }
        Ok(b)
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

    /// Calls `set` with each row of B that belongs to a projection, in the order of its outputs.
    fn for_rows(&self, layer: usize, part: LayerWeight, module: &Module, set: &mut dyn FnMut(usize, &[f32])) {
        let (rank, (_, map)) = (module.matrices.rank, self.model.stored_in(part));
        let is_rotated = matches!(part, LayerWeight::Q | LayerWeight::K);
        for n in 0..self.model.shape(WeightId::Layer(layer, part))[0] {
            let rows = self.adapter.rope_rows();
            let row = if is_rotated { rows.stored_row(n, self.model.head_widths(layer)) } else { n };
            set(n, &module.b[map.row(row) * rank..][..rank]);
        }
    }
}
