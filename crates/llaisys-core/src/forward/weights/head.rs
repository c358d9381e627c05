//! The head and the bounds for its pruned argmax.

use super::Weights;
use crate::arch::spec::WeightId;
use crate::error::DeviceError;
use crate::ops::argmax_bounds::ArgmaxBounds;
use crate::ops::packed::PackedMatrix;
use crate::threads::Pool;

impl Weights {
    /// The matrix that turns final hidden states into logits.
    pub fn head(&self) -> &PackedMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embed)
    }

    /// Computes argmax bounds for the head if its format has them, now and whenever it is replaced. Errors: no memory.
    pub fn bound_argmax(&mut self, pool: &Pool) -> Result<(), DeviceError> {
        self.prunes_argmax = true;
        self.argmax_bounds = ArgmaxBounds::new(pool, self.head())?;
        Ok(())
    }

    /// The argmax bounds of the head.
    pub fn argmax_bounds(&self) -> Option<&ArgmaxBounds> {
        self.argmax_bounds.as_ref()
    }

    /// Drops the bounds before `id` is replaced, if it is the head. Bounds of old values would give wrong ids.
    pub(super) fn drop_argmax_bounds(&mut self, id: WeightId) {
        if id == if self.lm_head.is_some() { WeightId::LmHead } else { WeightId::Embed } {
            self.argmax_bounds = None;
        }
    }

    /// Computes dropped bounds again. Without memory for them, all logits are computed: slower, with the same result.
    pub(super) fn restore_argmax_bounds(&mut self, pool: &Pool) {
        if self.prunes_argmax && self.argmax_bounds.is_none() {
            self.argmax_bounds = ArgmaxBounds::new(pool, self.head()).unwrap_or_default();
        }
    }
}
