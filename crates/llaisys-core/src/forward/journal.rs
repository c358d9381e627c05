//! The inputs of recurrent layers at rows whose sequences may be cut, from which their states can be computed again.

use super::decoder::{Decoder, KvLayers};
use super::delta_net::Recurrent;
use super::weights::Mixer;
use super::workspace::Workspace;
use crate::ops::{self, OpContext, RecurrentRows, SequenceRows};

/// The inputs of each recurrent layer at some rows of one decode, in the order of the passes. A draft is verified after
/// the state behind it was written. If it is rejected, the state is computed again from the rows that are kept.
#[derive(Debug, Default)]
pub struct Journal {
    /// Rows of the next pass to record.
    rows: Vec<u32>,
    /// For each layer its inputs, each `[n, width]`.
    layers: Vec<Vec<Vec<f32>>>,
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
    pub(super) fn record(&mut self, layer: usize, n_rows: usize, inputs: &[&[f32]]) {
        let buffers = &mut self.layers[layer];
        buffers.resize_with(inputs.len(), Vec::new);
        for (buffer, values) in buffers.iter_mut().zip(inputs) {
            let width = values.len() / n_rows;
            for &row in &self.rows {
                buffer.extend_from_slice(&values[row as usize * width..][..width]);
            }
        }
    }

    /// Writes the recorded inputs of a layer at `rows` of the journal to the first rows of `inputs`.
    fn load<'v>(&self, layer: usize, rows: &[u32], inputs: impl IntoIterator<Item = &'v mut [f32]>) {
        for (buffer, values) in self.layers[layer].iter().zip(inputs) {
            let width = values.len() / rows.len();
            for (value, &row) in values.chunks_exact_mut(width).zip(rows) {
                value.copy_from_slice(&buffer[row as usize * width..][..width]);
            }
        }
    }
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

impl Decoder {
    /// Computes the states of sequences again, from recorded inputs and with the same bits as a pass over these rows.
    pub fn replay(
        &self,
        cx: &mut OpContext,
        replays: &[Replay],
        journal: &Journal,
        memory: ReplayMemory<'_>,
    ) {
        let ReplayMemory { kv, work, n_rows } = memory;
        for group in Group::all(replays, n_rows) {
            let rows = RecurrentRows { sequences: &group.sequences, order: &group.order };
            let mut work = work.rows(group.rows.len());
            let mut index = 0;
            for layer in &self.weights.layers {
                match &layer.mixer {
                    Mixer::DeltaNet(weights) => {
                        let config = &self.config().delta_net().expect("its weights were packed");
                        let w = &mut work.delta;
                        journal.load(index, &group.rows, w.inputs());
                        Recurrent { config, weights, rows }.run(cx, kv.states_mut(index), w);
                    }
                    Mixer::ShortConv(weights) => {
                        let w = &mut work.short_conv;
                        journal.load(index, &group.rows, [&mut *w.input]);
                        let convolution = self.short_convolution(weights, rows, kv.states_mut(index));
                        ops::causal_conv(cx, w.input, convolution, w.input_gate);
                    }
                    Mixer::Attention(_) => continue,
                }
                index += 1;
            }
        }
    }
}

/// Sequences that are replayed together.
#[derive(Debug, Default)]
struct Group {
    sequences: Vec<SequenceRows>,
    order: Vec<u32>,
    /// Rows of the journal, `[n]`.
    rows: Vec<u32>,
}

impl Group {
    /// Divides the sequences into groups of up to `n_max` rows. A sequence with more rows is in several groups, in order.
    fn all(replays: &[Replay], n_max: usize) -> Vec<Self> {
        let mut groups = vec![Self::default()];
        for replay in replays {
            let mut before = replay.before;
            for rows in replay.rows.chunks(n_max) {
                if groups.last().is_none_or(|group| group.rows.len() + rows.len() > n_max) {
                    groups.push(Self::default());
                }
                let group = groups.last_mut().expect("pushed above");
                let start = group.rows.len();
                group.rows.extend_from_slice(rows);
                group.order.extend(start as u32..group.rows.len() as u32);
                group.sequences.push(SequenceRows { before, after: replay.after, start, n_rows: rows.len() });
                before = Some(replay.after);
            }
        }
        groups.retain(|group| !group.rows.is_empty());
        groups
    }
}
