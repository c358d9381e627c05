//! Packs the weights that only Gemma 4 has.

use super::Packer;
use crate::arch::spec::{Gemma4Weight, LayerInputWeight, LayerWeight, WeightId};
use crate::error::Result;
use crate::forward::weights::{DenseBranch, InputBranch, LayerInputs, Mlp, Projection};

impl Packer<'_> {
    pub(super) fn layer_inputs(&self) -> Result<Option<LayerInputs>> {
        if self.checkpoint.config().d_inputs() == 0 {
            return Ok(None);
        }
        let at = WeightId::LayerInputs;
        Ok(Some(LayerInputs {
            embed: self.matrix(at(LayerInputWeight::Embed))?,
            projection: self.matrix(at(LayerInputWeight::Projection))?,
            norm: self.vector(at(LayerInputWeight::Norm))?,
        }))
    }

    pub(super) fn input_branch(&self, index: usize) -> Result<Option<InputBranch>> {
        if self.checkpoint.config().d_inputs() == 0 {
            return Ok(None);
        }
        let at = |part| WeightId::Layer(index, LayerWeight::Gemma4(part));
        let matrix = self.matrix(at(Gemma4Weight::InputProjection))?;
        Ok(Some(InputBranch {
            gate: self.matrix(at(Gemma4Weight::InputGate))?,
            projection: Projection { matrix, bias: None },
            norm: self.vector(at(Gemma4Weight::InputNorm))?,
        }))
    }

    pub(super) fn dense_branch(&self, index: usize, mlp: Mlp) -> Result<DenseBranch> {
        let vector = |part| self.vector(WeightId::Layer(index, LayerWeight::Gemma4(part)));
        let root = (self.checkpoint.config().d_model as f64).sqrt();
        let router_norm = vector(Gemma4Weight::RouterScale)?.into_iter();
        Ok(DenseBranch {
            mlp,
            post_norm: vector(Gemma4Weight::DensePostNorm)?,
            experts_norm: vector(Gemma4Weight::ExpertsNorm)?,
            experts_post_norm: vector(Gemma4Weight::ExpertsPostNorm)?,
            router_norm: router_norm.map(|scale| (f64::from(scale) / root) as f32).collect(),
            expert_scale: vector(Gemma4Weight::ExpertScale)?,
        })
    }
}
