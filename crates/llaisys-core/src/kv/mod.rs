//! Unified KV cells: bookkeeping (`cells`), reservations (`reserve`), tensors (`storage`).

use thiserror::Error;

/// A refused cache operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KvError {}
