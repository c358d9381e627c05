//! The rows of a pass by sequence, and the states that recurrent ops read and write.

/// The heads of a Gated DeltaNet layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Query and key heads.
    pub n_keys: usize,
    /// Value heads, a multiple of `n_keys`.
    pub n_values: usize,
    /// Elements of a query or key head.
    pub d_key: usize,
    /// Elements of a value head.
    pub d_value: usize,
    /// Which value heads a key head serves.
    pub order: ValueOrder,
}

/// The order of value heads, of which each key head serves several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueOrder {
    /// Those of the first key head, then those of the second one, and so on: folders.
    Grouped,
    /// The first one of each key head, then the second one of each, and so on: GGUF files of Qwen3.5.
    Alternating,
}

impl DeltaHeads {
    /// Elements of all query heads, or of all key heads.
    pub fn key_width(&self) -> usize {
        self.n_keys * self.d_key
    }

    /// Elements of all value heads.
    pub fn value_width(&self) -> usize {
        self.n_values * self.d_value
    }

    /// Elements of the matrices `[d_key, d_value]` of all value heads.
    pub fn matrices_len(&self) -> usize {
        self.n_values * self.d_key * self.d_value
    }

    /// The key head of a value head.
    pub fn key_of(&self, value: usize) -> usize {
        match self.order {
            ValueOrder::Grouped => value / (self.n_values / self.n_keys),
            ValueOrder::Alternating => value % self.n_keys,
        }
    }
}

/// One sequence's part of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceRows {
    /// The state before its first row; None: zeros.
    pub before: Option<u32>,
    /// The state that is written. It may be `before`, and no other sequence of the pass reads or writes it.
    pub after: u32,
    /// Its first row in [`RecurrentRows::order`].
    pub start: usize,
    /// Its rows there.
    pub n_rows: usize,
}

/// The rows of a pass, grouped by sequence.
#[derive(Debug, Clone, Copy)]
pub struct RecurrentRows<'a> {
    /// The sequences.
    pub sequences: &'a [SequenceRows],
    /// All rows of the pass, each once: those of a sequence in the order of their positions, `[n]`.
    pub order: &'a [u32],
}

impl<'a> RecurrentRows<'a> {
    /// The rows of a sequence, in the order of their positions.
    pub fn of(&self, sequence: &SequenceRows) -> &'a [u32] {
        &self.order[sequence.start..sequence.start + sequence.n_rows]
    }
}

/// A part of every state of one layer: `len` numbers from `offset` on of each `stride` numbers.
#[derive(Debug)]
pub struct StatesMut<'a> {
    /// `[n_states, stride]`
    pub data: &'a mut [f32],
    /// Numbers of a state.
    pub stride: usize,
    /// The part's first number.
    pub offset: usize,
    /// Numbers of the part.
    pub len: usize,
}

/// What a sequence reads and writes of a part of the states.
pub(super) struct StateJob<'a> {
    pub(super) sequence: SequenceRows,
    /// The state before the first row; None: it is in `after`.
    pub(super) before: Option<&'a [f32]>,
    pub(super) after: &'a mut [f32],
}

impl<'a> StatesMut<'a> {
    /// The part of one state.
    pub fn state(&self, state: u32) -> &[f32] {
        &self.data[state as usize * self.stride + self.offset..][..self.len]
    }

    /// Returns the states of each sequence, those to write zeroed where a sequence has none. Panics if a state is
    /// written for two sequences, or written for one and read for another.
    pub(super) fn jobs(self, rows: &RecurrentRows<'_>) -> Vec<StateJob<'a>> {
        let sequences = rows.sequences.iter();
        let mut used: Vec<u32> = sequences
            .clone()
            .flat_map(|sequence| [Some(sequence.after), sequence.before])
            .flatten()
            .collect();
        used.sort_unstable();
        used.dedup();
        let number = |state: u32| used.binary_search(&state).expect("it is listed");
        let mut states = self.parts(&used);
        let mut take = |state: u32| states[number(state)].take().expect("each state is written once");
        let written: Vec<&'a mut [f32]> = sequences.map(|sequence| take(sequence.after)).collect();
        let read: Vec<Option<&'a [f32]>> =
            states.into_iter().map(|state| state.map(|state| &*state)).collect();
        let job = |(sequence, after): (&SequenceRows, &'a mut [f32])| {
            let before = match sequence.before {
                None => {
                    after.fill(0.0);
                    None
                }
                Some(before) if before == sequence.after => None,
                Some(before) => Some(read[number(before)].expect("no state is read and written")),
            };
            StateJob { sequence: *sequence, before, after }
        };
        rows.sequences.iter().zip(written).map(job).collect()
    }

    /// The parts of the states `numbers`, which ascend. Most states belong to cached prefixes, so only these are visited.
    fn parts(self, numbers: &[u32]) -> Vec<Option<&'a mut [f32]>> {
        let (mut rest, mut n_before) = (self.data, 0);
        let part = |&number: &u32| {
            let at = (number as usize - n_before) * self.stride;
            n_before = number as usize + 1;
            let (state, after) = std::mem::take(&mut rest)[at..].split_at_mut(self.stride);
            rest = after;
            Some(&mut state[self.offset..][..self.len])
        };
        numbers.iter().map(part).collect()
    }
}
