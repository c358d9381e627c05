//! Async scheduling on a device model with random delays. Each sequence gets the same tokens as alone, while sequences
//! stop, pause, are preempted or join. No cell is lost or used twice.

use llaisys_core::cuda::forward::overlap::{InFlightRow, NextRow, OverlapState, Row};
use llaisys_core::ops::cases::SplitMix64;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const N_SLOTS: usize = 4;
const STOP: u32 = 0;

/// The language model: returns the next token of a history, which is STOP every few tokens.
fn next_token(history: &[(u32, u32)]) -> u32 {
    let mut hash = SplitMix64::new(history.len() as u64);
    for &(position, token) in history {
        hash = SplitMix64::new(hash.bits() ^ u64::from(position) << 32 ^ u64::from(token));
    }
    hash.below(9) as u32
}

/// Work of the device, in order.
#[derive(Debug)]
enum Work {
    /// Sets a slot's cells and its newest token, which has no cell yet.
    Slot { slot: usize, cells: Vec<u32>, token: u32 },
    /// Computes the keys and values of a prompt's tokens from position 0 on.
    Prompt { cells: Vec<u32>, tokens: Vec<u32> },
    /// Computes one token of each slot in a new cell.
    Step { rows: Vec<(usize, u32)>, event: u64 },
}

/// A device that runs its work at random times between the launch and the wait.
#[derive(Debug, Default)]
struct Device {
    queue: VecDeque<Work>,
    cells: BTreeMap<u32, (u32, u32)>,
    table: [Vec<u32>; N_SLOTS],
    newest: [u32; N_SLOTS],
    results: BTreeMap<u64, Vec<u32>>,
    last_event: u64,
}

impl Device {
    fn submit(&mut self, work: Work, draw: &mut SplitMix64) {
        self.queue.push_back(work);
        for _ in 0..draw.below(4) {
            self.run_one();
        }
    }

    fn step(&mut self, rows: Vec<(usize, u32)>, draw: &mut SplitMix64) -> u64 {
        self.last_event += 1;
        self.submit(Work::Step { rows, event: self.last_event }, draw);
        self.last_event
    }

    fn run_one(&mut self) {
        match self.queue.pop_front() {
            None => {}
            Some(Work::Slot { slot, cells, token }) => {
                self.table[slot] = cells;
                self.newest[slot] = token;
            }
            Some(Work::Prompt { cells, tokens }) => {
                self.cells.extend((0..).zip(tokens).zip(cells).map(|(entry, cell)| (cell, entry)));
            }
            Some(Work::Step { rows, event }) => {
                for &(slot, cell) in &rows {
                    self.cells.insert(cell, (self.table[slot].len() as u32, self.newest[slot]));
                    self.table[slot].push(cell);
                }
                let seen =
                    |slot: usize| self.table[slot].iter().map(|cell| self.cells[cell]).collect::<Vec<_>>();
                let tokens: Vec<u32> = rows.iter().map(|&(slot, _)| next_token(&seen(slot))).collect();
                for (&(slot, _), &token) in rows.iter().zip(&tokens) {
                    self.newest[slot] = token;
                }
                self.results.insert(event, tokens);
            }
        }
    }

    /// Waits for an event and returns its results, which are removed.
    fn collect(&mut self, event: u64) -> Vec<u32> {
        while !self.results.contains_key(&event) {
            assert!(!self.queue.is_empty(), "event {event} was not launched");
            self.run_one();
        }
        self.results.remove(&event).expect("the loop waited for it")
    }
}

#[derive(Debug, Clone)]
struct Sequence {
    /// Never reused, unlike the slot.
    id: i64,
    slot: usize,
    n_prompt: usize,
    n_max: usize,
    tokens: Vec<u32>,
    cells: Vec<u32>,
}

impl Sequence {
    fn alone(prompt: &[u32], n_max: usize) -> Vec<u32> {
        let mut tokens = prompt.to_vec();
        while tokens.len() < n_max {
            let history: Vec<(u32, u32)> = (0..).zip(tokens.iter().copied()).collect();
            tokens.push(next_token(&history));
            if tokens.last() == Some(&STOP) {
                break;
            }
        }
        tokens
    }

    fn is_over(&self) -> bool {
        self.tokens.len() > self.n_prompt
            && (self.tokens.len() == self.n_max || self.tokens.last() == Some(&STOP))
    }
}

/// A minimal scheduler, KV cache and decode.
struct Host {
    device: Device,
    overlap: OverlapState,
    draw: SplitMix64,
    /// The rows of the last early step that were neither matched nor dropped.
    in_flight_rows: Vec<NextRow>,
    free: BTreeSet<u32>,
    n_cells: usize,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    done: Vec<Sequence>,
    n_ids: i64,
    n_matched: usize,
    n_launched: usize,
}

impl Host {
    fn new(seed: u64, is_on: bool, n_cells: usize) -> Self {
        let mut draw = SplitMix64::new(seed);
        let waiting = (0..12)
            .map(|_| {
                let n_prompt = 1 + draw.below(5);
                let tokens = (0..n_prompt).map(|_| 1 + draw.below(8) as u32).collect();
                let n_max = n_prompt + 1 + draw.below(14);
                Sequence { id: 0, slot: 0, n_prompt, n_max, tokens, cells: Vec::new() }
            })
            .collect();
        Self {
            device: Device::default(),
            overlap: OverlapState::new(is_on),
            draw,
            in_flight_rows: Vec::new(),
            free: (0..n_cells as u32).collect(),
            n_cells,
            running: Vec::new(),
            waiting,
            done: Vec::new(),
            n_ids: 0,
            n_matched: 0,
            n_launched: 0,
        }
    }

    /// Returns the number of free cells that the scheduler sees, which includes those of rows in flight.
    fn n_free(&self) -> usize {
        self.free.len() + self.in_flight_rows.len()
    }

    fn allocate_cell(&mut self) -> u32 {
        // Any free cell; one that was just freed is as likely as others.
        let at = self.draw.below(self.free.len());
        let cell = *self.free.iter().nth(at).expect("the scheduler counted");
        self.free.remove(&cell);
        cell
    }

    /// Drops the sequence's row in flight.
    fn invalidate(&mut self, sequence: i64) {
        self.overlap.invalidate_sequence(sequence);
        self.free
            .extend(self.in_flight_rows.extract_if(.., |row| row.sequence == sequence).map(|row| row.cell));
    }

    /// Releases the sequence's slot. Its cells are free at once, even if the device still uses them.
    fn release(&mut self, sequence: &mut Sequence) {
        self.invalidate(sequence.id);
        self.free.extend(sequence.cells.drain(..));
    }

    fn admit(&mut self) {
        while self.running.len() < N_SLOTS {
            let n_needed = self.waiting.front().map_or(usize::MAX, |sequence| sequence.tokens.len() - 1);
            // A cell for the next token of every sequence must be left, including the new one.
            if n_needed.saturating_add(self.running.len() + 1) > self.n_free() {
                return;
            }
            let mut sequence = self.waiting.pop_front().expect("it is the first");
            while self.free.len() < n_needed {
                // Rows in flight lose their cells before a sequence has to wait.
                self.invalidate(
                    self.in_flight_rows.first().expect("the cells are free or in flight").sequence,
                );
            }
            sequence.id = self.n_ids;
            self.n_ids += 1;
            let is_used = |slot: usize| self.running.iter().any(|running| running.slot == slot);
            sequence.slot = (0..N_SLOTS).find(|&slot| !is_used(slot)).expect("a slot is free");
            sequence.cells = (0..n_needed).map(|_| self.allocate_cell()).collect();
            let (cells, tokens) = (sequence.cells.clone(), sequence.tokens[..n_needed].to_vec());
            self.device.submit(Work::Prompt { cells, tokens }, &mut self.draw);
            self.running.push(sequence);
        }
    }

    /// Preempts sequences until every running one has a cell, and sometimes one more. Returns the batch, which may skip
    /// some.
    fn plan(&mut self) -> Vec<usize> {
        while self.running.len() > self.n_free() || (self.running.len() > 1 && self.draw.below(12) == 0) {
            let victim = self.draw.below(self.running.len());
            let mut victim = self.running.swap_remove(victim);
            self.release(&mut victim);
            self.waiting.push_front(victim);
        }
        self.admit();
        let mut order = self.draw.order(self.running.len());
        if self.draw.below(2) == 0 {
            order.sort_unstable();
        }
        let n = order.len();
        order.truncate(if self.draw.below(4) == 0 { n.div_ceil(2) } else { n });
        order
    }

    /// The four parts of a decode. Returns each row's token.
    fn decode(&mut self, batch: &[usize]) -> Vec<u32> {
        let row = |i: &usize| {
            let Sequence { id, tokens, .. } = &self.running[*i];
            Row { sequence: *id, position: tokens.len() as u32 - 1, token: tokens[tokens.len() - 1] }
        };
        let rows: Vec<Row> = batch.iter().map(row).collect();
        let in_flight = self.overlap.match_batch(&rows);
        let is_kept = |row: &NextRow| in_flight.rows.iter().flatten().any(|found| found.cell == row.cell);
        let dropped = std::mem::take(&mut self.in_flight_rows).into_iter().filter(|row| !is_kept(row));
        self.free.extend(dropped.map(|row| row.cell));
        let mut fresh = Vec::new();
        for (&i, found) in batch.iter().zip(&in_flight.rows) {
            let cell = match found {
                Some(found) => found.cell,
                None => {
                    let cell = self.allocate_cell();
                    let Sequence { slot, cells, tokens, .. } = &self.running[i];
                    let (slot, cells, token) = (*slot, cells.clone(), tokens[tokens.len() - 1]);
                    self.device.submit(Work::Slot { slot, cells, token }, &mut self.draw);
                    fresh.push((slot, cell));
                    cell
                }
            };
            self.running[i].cells.push(cell);
        }
        let fresh_event = (!fresh.is_empty()).then(|| self.device.step(fresh, &mut self.draw));
        // One row in eight needs the host before its next token.
        let next: Vec<usize> = batch.iter().copied().filter(|_| self.draw.below(8) > 0).collect();
        if self.overlap.may_launch(next.len()) && next.len() <= self.free.len() {
            let early: Vec<NextRow> = next
                .iter()
                .map(|&i| {
                    let (sequence, position) = (self.running[i].id, self.running[i].tokens.len() as u32);
                    NextRow { sequence, position, cell: self.allocate_cell() }
                })
                .collect();
            let steps = next.iter().zip(&early).map(|(&i, row)| (self.running[i].slot, row.cell)).collect();
            let event = self.device.step(steps, &mut self.draw);
            self.n_launched += early.len();
            self.in_flight_rows.clone_from(&early);
            self.overlap.launched(event, early);
        }
        let results = in_flight.event.map(|event| self.device.collect(event)).unwrap_or_default();
        let mut fresh = fresh_event.map(|event| self.device.collect(event)).unwrap_or_default().into_iter();
        self.n_matched += in_flight.rows.iter().flatten().count();
        let tokens = in_flight.rows.iter().map(|row| match row {
            Some(found) => results[found.index],
            None => fresh.next().expect("a token for each fresh row"),
        });
        let tokens: Vec<u32> = tokens.collect();
        for (row, &token) in rows.iter().zip(&tokens) {
            self.overlap.set_token(row.sequence, token);
        }
        tokens
    }

    fn step(&mut self) {
        let batch = self.plan();
        assert!(!batch.is_empty(), "{} wait and none runs", self.waiting.len());
        let tokens = self.decode(&batch);
        for (&i, token) in batch.iter().zip(tokens) {
            self.running[i].tokens.push(token);
        }
        let (over, running) = std::mem::take(&mut self.running).into_iter().partition(Sequence::is_over);
        self.running = running;
        for mut sequence in Vec::from_iter(over) {
            assert_as_alone(&sequence);
            self.release(&mut sequence);
            self.done.push(sequence);
        }
        self.check();
    }

    /// Asserts that each cell is free, in flight or used by one sequence.
    fn check(&self) {
        let used = self.running.iter().flat_map(|sequence| sequence.cells.iter().copied());
        let in_flight_rows = self.in_flight_rows.iter().map(|row| row.cell);
        let all: Vec<u32> = self.free.iter().copied().chain(in_flight_rows).chain(used).collect();
        let different: BTreeSet<u32> = all.iter().copied().collect();
        assert_eq!((all.len(), different.len()), (self.n_cells, self.n_cells));
    }

    fn run(mut self) -> Self {
        while !(self.running.is_empty() && self.waiting.is_empty()) {
            self.step();
        }
        assert_eq!(self.free.len(), self.n_cells, "no row is in flight at the end");
        self
    }
}

fn assert_as_alone(sequence: &Sequence) {
    let alone = Sequence::alone(&sequence.tokens[..sequence.n_prompt], sequence.n_max);
    assert_eq!(sequence.tokens, alone, "sequence {} in slot {}", sequence.id, sequence.slot);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn sequences_get_the_same_tokens_as_alone(seed in any::<u64>(), n_cells in 20_usize..60) {
        let host = Host::new(seed, true, n_cells).run();
        prop_assert_eq!(host.done.len(), 12);
    }

    #[test]
    fn without_overlap_nothing_is_launched_early(seed in any::<u64>(), n_cells in 20_usize..60) {
        let host = Host::new(seed, false, n_cells).run();
        prop_assert_eq!((host.done.len(), host.n_launched, host.n_matched), (12, 0, 0));
    }
}

/// Without this test, the simulation could pass with code that never launches early.
#[test]
fn most_rows_are_launched_early_and_matched() {
    let (mut launched, mut matched, mut tokens) = (0, 0, 0);
    for seed in 0..20 {
        let host = Host::new(seed, true, 60).run();
        launched += host.n_launched;
        matched += host.n_matched;
        tokens += host.done.iter().map(|s| s.tokens.len() - s.n_prompt).sum::<usize>();
    }
    assert!(
        matched < launched && matched * 2 > tokens,
        "{launched} launched, {matched} matched, {tokens} tokens"
    );
}

#[test]
fn a_row_with_another_token_or_of_a_changed_sequence_is_not_matched() {
    let row = |sequence, token| Row { sequence, position: 5, token };
    let mut state = OverlapState::new(true);
    let of = |sequence, cell| NextRow { sequence, position: 5, cell };
    state.launched(7, vec![of(1, 10), of(2, 20), of(3, 30), of(4, 40)]);
    for sequence in 1..4 {
        state.set_token(sequence, 100);
    }
    state.invalidate_sequence(3);
    // 2 is decoded with another token than it got, 3 was changed, and 4 got no token because of a fault.
    let in_flight = state.match_batch(&[row(4, 0), row(3, 100), row(2, 99), row(1, 100)]);
    assert_eq!(in_flight.rows, [None, None, None, Some(InFlightRow { index: 0, cell: 10 })]);
    assert_eq!(in_flight.event, Some(7));
    assert_eq!(state.match_batch(&[row(1, 100)]).event, None);
}
