//! Sequence ids: a slot, and the generation of its use.

/// The largest `n_seq_max`, the number of sequences that may exist at a time.
pub const SEQ_LIMIT: usize = 256;

/// A sequence id: a slot below `n_seq_max`, and the generation in which it was acquired. Sequences that use the same
/// slot at different times have different ids, so a late message about an old one is recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId {
    slot: u16,
    generation: u32,
}

impl SeqId {
    pub(crate) fn new(slot: u16, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// The id as one number, `generation << 16 | slot`. The first id of slot `n` is `n`.
    pub fn to_raw(self) -> i64 {
        (i64::from(self.generation) << 16) | i64::from(self.slot)
    }

    /// The inverse of [`SeqId::to_raw`]; it does not check that the id is acquired. A number that `to_raw` cannot
    /// return (negative, or above 48 bits) becomes an id that is never acquired.
    pub fn from_raw(raw: i64) -> Self {
        let slot = u16::try_from(raw & 0xffff).expect("sixteen bits");
        match u32::try_from(raw >> 16) {
            Ok(generation) => Self { slot, generation },
            Err(_) => Self { slot: u16::MAX, generation: u32::MAX },
        }
    }

    /// Index into per-sequence tables, below `n_seq_max` for an acquired id.
    pub fn slot(self) -> u32 {
        u32::from(self.slot)
    }

    /// How often the slot had been released when this id was acquired.
    pub fn generation(self) -> u32 {
        self.generation
    }
}
