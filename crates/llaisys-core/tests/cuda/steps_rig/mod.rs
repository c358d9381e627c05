//! A model on the emulator with a KV cache, sequences and decode steps, used as a context uses them.

#[allow(unsafe_code, reason = "passes launches on")]
mod watched;

pub(crate) use crate::emulator::Emulator;
use llaisys_core::batch::{Batch, BatchArrays, BatchLimits, output};
use llaisys_core::cuda::forward::steps::{SequenceSlot, StateLimits, StepRow, StepSettings, Steps, Target};
use llaisys_core::cuda::forward::{CellCount, DeviceDecoder, DeviceLimits};
use llaisys_core::error::Result;
use llaisys_core::forward::decoder::ForwardRows;
use llaisys_core::kv::{KvCache, KvRow, KvShape};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{AttentionRow, AttentionRows};
use llaisys_core::sample::{Outcome, Sampler, SamplerSpec, Scratch, sample};
use llaisys_core::seq::SeqId;
use llaisys_core::threads::Pool;
use std::path::Path;
pub(crate) use watched::{Call, Refuses, Watched};

pub(crate) const N_ROWS: usize = 16;
pub(crate) const MAX_LEN: usize = 96;
const N_CELLS: usize = 400;

pub(crate) struct Rig {
    pub(crate) device: Watched,
    pub(crate) decoder: DeviceDecoder,
    pub(crate) steps: Steps,
    pub(crate) kv: KvCache,
    /// Compare each step with an eager pass in the same bucket that the host samples.
    pub(crate) checked: bool,
}

/// A running sequence. All its tokens except the last have cells.
#[derive(Debug, Clone)]
pub(crate) struct Seq {
    pub(crate) id: SeqId,
    pub(crate) tokens: Vec<i32>,
    pub(crate) n_prompt: usize,
    pub(crate) spec: SamplerSpec,
    /// The mask of its next token.
    pub(crate) mask: Option<Vec<u32>>,
}

impl Seq {
    fn slot(&self) -> usize {
        self.id.slot() as usize
    }

    pub(crate) fn completion(&self) -> &[i32] {
        &self.tokens[self.n_prompt..]
    }
}

/// Returns the slot of a sequence.
pub(crate) fn slot_of(id: SeqId) -> SequenceSlot {
    SequenceSlot { sequence: id.to_raw(), index: id.slot() as usize }
}

impl Rig {
    pub(crate) fn new(folder: &Path, settings: StepSettings) -> Self {
        let device = Watched::new();
        let checkpoint = Checkpoint::open(folder).expect("the folder has a model");
        let state = StateLimits { n_slots: N_ROWS, n_rows: N_ROWS, max_len: MAX_LEN };
        let steps =
            Steps::new(&device, checkpoint.config(), state, settings).expect("the emulator has memory");
        let limits = DeviceLimits {
            n_rows: MAX_LEN,
            n_outputs: N_ROWS,
            max_len: MAX_LEN,
            n_listed: N_ROWS * MAX_LEN,
            cells: CellCount::Exactly(N_CELLS + N_ROWS),
        };
        let pool = Pool::new(1).expect("a thread");
        let decoder =
            DeviceDecoder::new(&device, &checkpoint, limits, &pool).expect("the kernels support the model");
        let shape = KvShape { n_cells: N_CELLS, n_seq_max: N_ROWS, n_streams: 1, lifo: true };
        let kv = KvCache::new(shape).expect("sizes in their bounds");
        device.take_calls();
        Self { device, decoder, steps, kv, checked: !settings.overlap }
    }

    /// Acquires an id and computes all tokens except the last. With `shared`, the first tokens are those of another
    /// sequence and share its cells. The first `n_prompt` tokens are the prompt.
    pub(crate) fn add(
        &mut self,
        tokens: &[i32],
        n_prompt: usize,
        spec: &SamplerSpec,
        shared: Option<(SeqId, usize)>,
    ) -> Seq {
        let id = self.kv.seq_acquire(0).expect("an id is free");
        let (prompt, completion) = tokens.split_at(n_prompt);
        self.steps.attach(slot_of(id), spec, prompt, completion);
        let mut start = 0;
        if let Some((from, n)) = shared {
            let copies = self.kv.seq_cp(from, id, 0, n as i32).expect("both ids are acquired");
            assert!(copies.from.is_empty(), "both are in one stream");
            start = n;
        }
        let seq = Seq { id, tokens: tokens.to_vec(), n_prompt, spec: spec.clone(), mask: None };
        if start + 1 < tokens.len() {
            self.extend(&seq, start..tokens.len() - 1);
        }
        seq
    }

    /// Computes these tokens of a sequence by a pass.
    pub(crate) fn extend(&mut self, seq: &Seq, range: std::ops::Range<usize>) {
        self.steps.invalidate_sequence(slot_of(seq.id));
        let batch = batch(&range.clone().map(|i| (seq.id, i as i32, seq.tokens[i])).collect::<Vec<_>>());
        let reservation = self.kv.prepare(&batch).expect("enough cells are free");
        let lists = [list(reservation.kv(), seq.id, range.end - 1)];
        let placed = reservation.row_cells().to_vec();
        let taken = |cell| placed.contains(&cell);
        self.steps.invalidate_cells(&taken);
        let row = |position: usize| (0, position + 1);
        let rows: Vec<(usize, usize)> = range.map(row).collect();
        forward(
            Target { device: &self.device, decoder: &self.decoder },
            &batch,
            (reservation.row_cells(), &lists, &rows),
            &[],
        );
        reservation.commit();
    }

    /// Releases the sequence. Its cells are free at once.
    pub(crate) fn remove(&mut self, seq: &Seq) {
        self.steps.detach(slot_of(seq.id));
        self.kv.seq_release(seq.id).expect("the id is acquired");
    }

    /// Decodes one token of each sequence and appends it.
    pub(crate) fn step(&mut self, seqs: &mut [&mut Seq]) -> Vec<Outcome> {
        self.try_step(seqs).expect("no call of the device fails")
    }

    /// As [`Rig::step`]. After an error nothing has changed.
    pub(crate) fn try_step(&mut self, seqs: &mut [&mut Seq]) -> Result<Vec<Outcome>> {
        let rows: Vec<_> = seqs
            .iter()
            .map(|seq| (seq.id, seq.tokens.len() as i32 - 1, seq.tokens[seq.tokens.len() - 1]))
            .collect();
        let batch = batch(&rows);
        let mut reservation = self.kv.prepare(&batch).expect("enough cells are free");
        let target = Target { device: &self.device, decoder: &self.decoder };
        let placed = reservation.row_cells().to_vec();
        let rows: Vec<StepRow<'_>> = seqs
            .iter()
            .zip(&placed)
            .map(|(seq, &cell)| {
                let position = seq.tokens.len() as u32 - 1;
                assert!(self.steps.can_sample_after(seq.slot(), position));
                let (token, mask) = (seq.tokens[position as usize] as u32, seq.mask.as_deref());
                StepRow { slot: slot_of(seq.id), position, token, cell, mask }
            })
            .collect();
        let want = self.checked.then(|| on_host(target, &batch, &reservation, seqs));
        let cells = reservation.kv();
        let before = |row: &StepRow<'_>| {
            let mut list = list(cells, SeqId::from_raw(row.slot.sequence), row.position as usize);
            assert_eq!(list.pop(), Some(row.cell));
            list
        };
        self.steps.launch(target, &rows, &before)?;
        let next: Vec<KvRow<'_>> = seqs
            .iter()
            .zip(&rows)
            .map(|(seq, row)| KvRow {
                position: row.position as i32 + 1,
                seqs: std::slice::from_ref(&seq.id),
            })
            .collect();
        if let Some(next) = reservation.peek_next(&next) {
            self.steps.launch_next(target, &next)?;
        }
        let outcomes = self.steps.collect(&self.device)?;
        if let Some((logits, want)) = want {
            // With overlap the logits would be those of the next step.
            let got = logits_of(target, rows.len());
            assert!(got == logits, "the step's logits are those of the eager pass, bit for bit");
            assert_eq!(outcomes, want);
        }
        let at_fault =
            |(row, outcome): (usize, &Outcome)| matches!(outcome, Outcome::Fault(_)).then_some(row);
        let faulty: Vec<usize> = outcomes.iter().enumerate().filter_map(at_fault).collect();
        reservation.commit_without(&faulty, &[]);
        for (seq, outcome) in seqs.iter_mut().zip(&outcomes) {
            if let Outcome::Token { id, .. } = outcome {
                seq.tokens.push(*id as i32);
                self.steps.append_token(seq.slot(), *id);
            }
        }
        self.kv.check();
        Ok(outcomes)
    }
}

/// Returns the bits of the first rows' logits of the last pass.
fn logits_of(Target { device, decoder }: Target<'_>, n_rows: usize) -> Vec<u32> {
    let mut bytes = vec![0; 4 * n_rows * decoder.config().vocab_size];
    device.download(decoder.logits(), &mut bytes).expect("the memory is the decoder's");
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Returns the rows of the bucket of a step of `n` rows.
fn padded(n: usize) -> usize {
    [1, 2, 4, 8, 16].into_iter().find(|&bucket| bucket >= n).expect("at most N_ROWS")
}

/// Returns the logits of the batch by an eager pass with as many rows as the step's bucket, and the outcomes of the
/// host's sampler. It writes the same keys and values to the same cells as the step.
fn on_host(
    target: Target<'_>,
    batch: &Batch,
    reservation: &llaisys_core::kv::Reservation<'_>,
    seqs: &[&mut Seq],
) -> (Vec<u32>, Vec<Outcome>) {
    let lists: Vec<_> = seqs.iter().map(|s| list(reservation.kv(), s.id, s.tokens.len() - 1)).collect();
    let rows: Vec<_> = seqs.iter().enumerate().map(|(i, seq)| (i, seq.tokens.len())).collect();
    let outputs: Vec<usize> = (0..padded(seqs.len())).collect();
    forward(target, batch, (reservation.row_cells(), &lists, &rows), &outputs);
    let vocab_size = target.decoder.config().vocab_size;
    let bits = logits_of(target, seqs.len());
    let logits: Vec<f32> = bits.iter().copied().map(f32::from_bits).collect();
    let outcomes = seqs.iter().zip(logits.chunks_exact(vocab_size)).map(|(seq, logits)| {
        let (prompt, completion) = seq.tokens.split_at(seq.n_prompt);
        let sampler = Sampler::new(seq.spec.clone(), vocab_size, prompt, completion).expect("a checked spec");
        let n_before = seq.tokens.len() as u32;
        let mask = seq.mask.as_deref();
        sample(&mut Scratch::default(), &mut logits.to_vec(), Some(&sampler), n_before, mask)
    });
    let outcomes = outcomes.collect();
    (bits, outcomes)
}

/// Each row's cell; lists of cells in position order; rows as (index of the list, number of visible cells).
type Planned<'a> = (&'a [u32], &'a [Vec<u32>], &'a [(usize, usize)]);

/// Runs an eager pass of a batch. It is padded with rows that see nothing up to the number of outputs.
fn forward(Target { device, decoder }: Target<'_>, batch: &Batch, planned: Planned<'_>, outputs: &[usize]) {
    let (placed, lists, rows) = planned;
    let n_padding = outputs.len().saturating_sub(rows.len());
    let padding = |value| std::iter::repeat_n(value, n_padding);
    let start = |i: usize| lists[..i].iter().map(Vec::len).sum::<usize>() as u32;
    // Adjacent padding rows have different starts, because adjacent rows with the same start are one sequence.
    let unseen = |i: usize| AttentionRow { start: i as u32 % 2 + 1, n_hidden: 0, n_visible: 0 };
    let seen = |window: usize| -> Vec<AttentionRow> {
        let row = |&(i, n): &(usize, usize)| AttentionRow {
            start: start(i),
            n_hidden: n.saturating_sub(window) as u32,
            n_visible: n as u32,
        };
        rows.iter().map(row).chain((0..n_padding).map(unseen)).collect()
    };
    let (full, windowed) = (seen(usize::MAX), seen(decoder.config().window.unwrap_or(1)));
    let cells = lists.concat();
    let of = |rows| AttentionRows { cells: &cells, rows, window: None, n_shared: &[] };
    let tokens: Vec<i32> = batch.tokens.iter().copied().chain(padding(0)).collect();
    let positions: Vec<i32> = batch.positions.iter().copied().chain(padding(0)).collect();
    // Each padding row writes its own cell, behind those of the KV cache.
    let spare = (0..n_padding).map(|i| (N_CELLS + i) as u32);
    let placed: Vec<u32> = placed.iter().copied().chain(spare).collect();
    let rows = ForwardRows {
        tokens: &tokens,
        positions: &positions,
        cells: &placed,
        attention: of(&full),
        windowed: decoder.config().window.map(|_| of(&windowed)),
        recurrent: None,
        lora: None,
    };
    decoder.forward(device, &rows, outputs).expect("no call of the device fails");
}

fn batch(rows: &[(SeqId, i32, i32)]) -> Batch {
    let limits = BatchLimits { vocab_size: 1 << 20, max_positions: MAX_LEN, n_seq_max: N_ROWS, n_streams: 1 };
    let arrays = BatchArrays {
        tokens: &rows.iter().map(|row| row.2).collect::<Vec<_>>(),
        positions: &rows.iter().map(|row| row.1).collect::<Vec<_>>(),
        n_seq_id: &vec![1; rows.len()],
        seq_ids: &rows.iter().map(|row| row.0.to_raw()).collect::<Vec<_>>(),
        stream: &[],
        wants_output: &vec![output::LOGITS; rows.len()],
    };
    Batch::new(arrays, limits).expect("the rows are valid")
}

fn list(kv: &KvCache, id: SeqId, up_to: usize) -> Vec<u32> {
    let mut list = Vec::new();
    kv.visible_cells(id, up_to as i32, &mut list);
    list
}
