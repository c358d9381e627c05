//! States of sequences whose last rows were rejected: computed again from the journal.

use super::decoder::{Decoder, KvLayers};
use super::delta_net::Recurrent;
use super::journal::Journal;
use super::weights::Mixer;
use super::workspace::Workspace;
use crate::ops::{self, OpContext, RecurrentRows, SequenceRows};

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
    /// The memory for the steps' values.
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
