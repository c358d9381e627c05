//! The head and its screen.

use super::Weights;
use crate::error::DeviceError;
use crate::model::family::Slot;
use crate::ops::packed::PackedMatrix;
use crate::ops::screen::Screen;
use crate::threads::Pool;

impl Weights {
    /// The matrix that turns final hidden states into logits.
    pub fn head(&self) -> &PackedMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embed)
    }

    /// Gives the head a screen, if it can have one, and again when it is replaced. Errors: no memory.
    pub fn screen_head(&mut self, pool: &Pool) -> Result<(), DeviceError> {
        self.is_screened = true;
        self.screen = Screen::new(pool, self.head())?;
        Ok(())
    }

    /// The head's screen.
    pub fn screen(&self) -> Option<&Screen> {
        self.screen.as_ref()
    }

    /// Before `slot` is replaced: a screen of other numbers than the head's would give wrong ids.
    pub(super) fn drop_screen(&mut self, slot: Slot) {
        if slot == if self.lm_head.is_some() { Slot::LmHead } else { Slot::Embed } {
            self.screen = None;
        }
    }

    /// Makes a screen that was dropped anew. Without memory for it the head is read as a whole: slower, not wrong.
    pub(super) fn screen_again(&mut self, pool: &Pool) {
        if self.is_screened && self.screen.is_none() {
            self.screen = Screen::new(pool, self.head()).unwrap_or_default();
        }
    }
}
