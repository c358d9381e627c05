//! The inputs of recurrent layers at rows whose sequences may be cut, from which their states can be computed again.

use super::decoder::KvLayers;
use super::workspace::{DeltaRows, Workspace};

/// The inputs of each recurrent layer at some rows of one decode, in the order of the passes. A draft is verified after
/// the state behind it was written. If it is rejected, the state is computed again from the rows that are kept.
#[derive(Debug, Default)]
pub struct Journal {
    /// Rows of the next pass to record.
    rows: Vec<u32>,
    layers: Vec<[Vec<f32>; 5]>,
}

impl Journal {
    /// A journal of `n_layers` recurrent layers.
    pub fn new(n_layers: usize) -> Self {
        Self { rows: Vec::new(), layers: (0..n_layers).map(|_| Default::default()).collect() }
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.layers.iter_mut().flatten().for_each(Vec::clear);
    }

    /// Chooses the rows of the next pass to record.
    pub fn choose(&mut self, rows: &[u32]) {
        self.rows.clear();
        self.rows.extend_from_slice(rows);
    }

    /// Records the inputs of a layer at the chosen rows. `n_rows`: those of the pass.
    pub(super) fn record(&mut self, layer: usize, n_rows: usize, inputs: &DeltaRows<'_>) {
        for (buffer, values) in self.layers[layer].iter_mut().zip(parts(inputs)) {
            let width = values.len() / n_rows;
            for &row in &self.rows {
                buffer.extend_from_slice(&values[row as usize * width..][..width]);
            }
        }
    }

    /// Writes the recorded inputs of a layer at `rows` of the journal to the first rows of `inputs`.
    pub(super) fn load(&self, layer: usize, rows: &[u32], inputs: &mut DeltaRows<'_>) {
        let DeltaRows { q_in, k_in, v_in, b, a, .. } = inputs;
        let parts = [&mut **q_in, &mut **k_in, &mut **v_in, &mut **b, &mut **a];
        for (buffer, values) in self.layers[layer].iter().zip(parts) {
            let width = values.len() / rows.len();
            for (value, &row) in values.chunks_exact_mut(width).zip(rows) {
                value.copy_from_slice(&buffer[row as usize * width..][..width]);
            }
        }
    }
}

fn parts<'a>(inputs: &'a DeltaRows<'_>) -> [&'a [f32]; 5] {
    [&*inputs.q_in, &*inputs.k_in, &*inputs.v_in, &*inputs.b, &*inputs.a]
}

/// A sequence whose state is to be computed again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    /// The state before its rows; None: zeros.
    pub before: Option<u32>,
    /// The state to write.
    pub after: u32,
    /// Its rows in the journal, in the order of their positions.
    pub rows: Vec<u32>,
}

/// What a replay computes with.
pub struct ReplayMemory<'a> {
    /// The states.
    pub kv: &'a mut dyn KvLayers,
    pub work: &'a mut Workspace,
    /// Rows that `work` has memory for.
    pub n_rows: usize,
}
