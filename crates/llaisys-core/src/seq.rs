//! Sequence ids: leases from a pool, each with a generation.

/// A lent sequence id: a slot below the pool's size, and the generation in which it was lent. Two holders of
/// the same slot at different times have different ids, so a late message about an old one is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId {
    slot: u16,
    generation: u32,
}

impl SeqId {
    /// The id as one number, `generation << 16 | slot`: the first lease of slot `n` reads `n`.
    pub fn to_raw(self) -> i64 {
        (i64::from(self.generation) << 16) | i64::from(self.slot)
    }

    /// The inverse of [`SeqId::to_raw`] for any number; whether it is lent is the pool's to say.
    pub fn from_raw(raw: i64) -> Self {
        Self { slot: (raw & 0xffff) as u16, generation: ((raw >> 16) & 0xffff_ffff) as u32 }
    }

    /// Index into per-sequence tables, below the pool's size for a lent id.
    pub fn slot(self) -> u32 {
        u32::from(self.slot)
    }

    /// How many times the slot had been returned when this id was lent.
    pub fn generation(self) -> u32 {
        self.generation
    }
}
