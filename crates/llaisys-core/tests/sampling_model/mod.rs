//! Rows to sample, and a model of the sampler's rules that sorts everything in f64. It separates the candidates that
//! are certainly kept from those that rounding may keep or drop.

use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::sample::philox::uniform;
use llaisys_core::sample::{Outcome, Sampler, SamplerSpec, Scratch, sample};
use std::collections::HashSet;

/// A row to sample.
#[derive(Debug, Clone, Default)]
pub(crate) struct Row {
    pub(crate) logits: Vec<f32>,
    pub(crate) spec: SamplerSpec,
    pub(crate) prompt: Vec<i32>,
    pub(crate) output: Vec<i32>,
    /// Tokens before the sampled one, if not all of prompt and output: a row inside the prompt.
    pub(crate) inside: Option<u32>,
    pub(crate) mask: Option<Vec<u32>>,
}

/// Relative difference of sums of f32 weights in units of 2^-44 and sums in f64. The error of each is at most three
/// roundings of 6e-8 on a distance of up to 58, times the weight itself, and errors mostly cancel.
const SUMS: f64 = 2e-6;
/// Difference of distances (up to 58 log2 = 40 nats) in f32: three roundings.
const DISTANCES: f64 = 1.5e-5;

impl Row {
    pub(crate) fn n_before(&self) -> u32 {
        self.inside.unwrap_or((self.prompt.len() + self.output.len()) as u32)
    }

    /// Samples the row on the CPU.
    pub(crate) fn on_cpu(&self) -> Outcome {
        let spec = self.spec.clone();
        let sampler =
            Sampler::new(spec, self.logits.len(), &self.prompt, &self.output).expect("a checked spec");
        let (mut logits, mask) = (self.logits.clone(), self.mask.as_deref());
        sample(&mut Scratch::default(), &mut logits, Some(&sampler), self.n_before(), mask)
    }

    /// The logits after masks, bad words, biases, min_tokens and penalties.
    fn edited(&self) -> Vec<f32> {
        let mut logits = self.logits.clone();
        let spec = &self.spec;
        let allowed: HashSet<u32> = spec.allowed_ids.iter().copied().collect();
        for (id, logit) in logits.iter_mut().enumerate() {
            let masked = self.mask.as_ref().is_some_and(|mask| mask[id / 32] >> (id % 32) & 1 == 0);
            if masked || (!allowed.is_empty() && !allowed.contains(&(id as u32))) {
                *logit = f32::NEG_INFINITY;
            }
        }
        for word in &spec.bad_words {
            let (last, before) = word.split_last().expect("words have tokens");
            let before: Vec<i32> = before.iter().map(|&id| id as i32).collect();
            if self.output.ends_with(&before) {
                logits[*last as usize] = f32::NEG_INFINITY;
            }
        }
        for &(id, bias) in &spec.logit_bias {
            logits[id as usize] += bias;
        }
        if self.output.len() < spec.min_tokens as usize {
            for &id in &spec.stop_ids {
                logits[id as usize] = f32::NEG_INFINITY;
            }
        }
        for (id, logit) in logits.iter_mut().enumerate() {
            let count = self.output.iter().filter(|&&t| t == id as i32).count();
            if count > 0 || self.prompt.contains(&(id as i32)) {
                let by = spec.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / by } else { *logit * by };
            }
            if count > 0 {
                *logit = *logit - spec.presence_penalty - spec.frequency_penalty * count as f32;
            }
        }
        logits
    }

    /// Panics unless `id` follows from the rules and the uniform number of this row, up to rounding.
    pub(crate) fn check_draw(&self, id: u32) {
        let logits = self.edited();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if self.spec.is_greedy() {
            assert_eq!(
                id as usize,
                logits.iter().position(|&l| l == best).expect("a best"),
                "{:?}",
                self.spec
            );
            return;
        }
        let kept = Kept::of(&logits, best, &self.spec);
        let u = uniform(self.spec.seed, self.spec.choice, self.n_before());
        let weight = |of: &[Candidate], below: u32| -> f64 {
            of.iter().filter(|c| c.id < below).map(|c| c.weight).sum()
        };
        let sure: Vec<Candidate> = kept.any.iter().filter(|c| kept.is_sure(c)).copied().collect();
        let own = kept.any.iter().find(|c| c.id == id);
        let own = own.unwrap_or_else(|| panic!("drew {id}, which the rules exclude: {:?}", self.spec));
        let from = weight(&sure, id) / weight(&kept.any, u32::MAX) - SUMS;
        // Without a certain candidate (all are within rounding), any of `any` may be drawn.
        let total = weight(&sure, u32::MAX).max(f64::MIN_POSITIVE);
        let to = (weight(&kept.any, id) + own.weight) / total + SUMS;
        assert!(from <= u && u <= to, "drew {id}: {u} is not in {from}..{to}; {:?}", self.spec);
    }
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    /// In nats below the best.
    distance: f64,
    weight: f64,
}

#[derive(Debug, Default)]
struct Kept {
    any: Vec<Candidate>,
    unsure: HashSet<u32>,
}

impl Kept {
    fn of(logits: &[f32], best: f32, spec: &SamplerSpec) -> Self {
        let scale = 1.0 / f64::from(spec.temperature);
        let distance = |l: f32| (f64::from(best) - f64::from(l)) * scale;
        let mut all: Vec<(f32, Candidate)> = logits
            .iter()
            .enumerate()
            .map(|(id, &l)| {
                (l, Candidate { id: id as u32, distance: distance(l), weight: (-distance(l)).exp() })
            })
            .filter(|(_, c)| c.distance < 40.0 && c.weight >= f64::from(spec.min_p))
            .collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.id.cmp(&b.1.id)));
        if spec.top_k > 0 {
            all.truncate(spec.top_k as usize);
        }
        let all: Vec<Candidate> = all.into_iter().map(|(_, c)| c).collect();
        let (few, many) = (until(&all, spec.top_p, -SUMS), until(&all, spec.top_p, SUMS));
        let mut kept = Self { any: all[..many].to_vec(), unsure: ids(&all[few..many]) };
        if spec.typical_p < 1.0 {
            let (few, many) = (Self::typical(&all[..few], spec), Self::typical(&all[..many], spec));
            let (in_few, in_many) = (ids(&few.any), ids(&many.any));
            let mut unsure: HashSet<u32> = &in_few ^ &in_many;
            unsure.extend(few.unsure.iter().chain(&many.unsure));
            let extra = few.any.iter().filter(|c| !in_many.contains(&c.id));
            kept = Self { any: many.any.iter().chain(extra).copied().collect(), unsure };
        }
        kept
    }

    fn typical(from: &[Candidate], spec: &SamplerSpec) -> Self {
        let total: f64 = from.iter().map(|c| c.weight).sum();
        let mean = from.iter().map(|c| c.weight * c.distance).sum::<f64>() / total;
        let away = |c: &Candidate| (c.distance - mean).abs();
        let mut sorted = from.to_vec();
        sorted.sort_by(|a, b| away(a).total_cmp(&away(b)).then(a.id.cmp(&b.id)));
        let (few, many) = (until(&sorted, spec.typical_p, -SUMS), until(&sorted, spec.typical_p, SUMS));
        let (nearest, farthest) = (away(&sorted[few - 1]) - DISTANCES, away(&sorted[many - 1]) + DISTANCES);
        let any: Vec<Candidate> = sorted.into_iter().filter(|c| away(c) <= farthest).collect();
        let unsure = any.iter().filter(|c| away(c) >= nearest).map(|c| c.id).collect();
        Self { any, unsure }
    }

    fn is_sure(&self, candidate: &Candidate) -> bool {
        !self.unsure.contains(&candidate.id)
    }
}

fn ids(of: &[Candidate]) -> HashSet<u32> {
    of.iter().map(|c| c.id).collect()
}

/// The number of `sorted` candidates that reach the share, with an error of `slack` in the sums.
fn until(sorted: &[Candidate], share: f32, slack: f64) -> usize {
    if share >= 1.0 {
        return sorted.len();
    }
    let wanted = sorted.iter().map(|c| c.weight).sum::<f64>() * f64::from(share) * (1.0 + slack);
    let mut reached = 0.0;
    let end = sorted.iter().position(|c| {
        reached += c.weight;
        reached >= wanted
    });
    end.map_or(sorted.len(), |i| i + 1)
}

/// Rows with normal logits as of models, peaked, flat, and with many ties.
pub(crate) fn logits(draw: &mut SplitMix64, vocab: usize) -> Vec<f32> {
    let (width, grid) = [(2.5, 0.0), (8.0, 0.0), (0.05, 0.0), (2.5, 0.25)][draw.below(4)];
    (0..vocab)
        .map(|_| {
            let x = (0..6).map(|_| between(draw, -1.0, 1.0)).sum::<f32>() * width + 3.0;
            if grid > 0.0 { (x / grid).round() * grid } else { x }
        })
        .collect()
}

pub(crate) fn between(draw: &mut SplitMix64, low: f32, high: f32) -> f32 {
    low + (high - low) * draw.below(1 << 24) as f32 / (1 << 24) as f32
}

fn some_ids(draw: &mut SplitMix64, vocab: usize, n: usize) -> Vec<u32> {
    (0..n).map(|_| draw.below(vocab) as u32).collect()
}

fn tokens(draw: &mut SplitMix64, below: usize) -> Vec<i32> {
    let n = 1 + draw.below(20);
    some_ids(draw, below, n).iter().map(|&id| id as i32).collect()
}

/// A row with the parameters that the bits of `which` select.
pub(crate) fn row(draw: &mut SplitMix64, vocab: usize, which: usize) -> Row {
    let has = |bit: usize| which >> bit & 1 == 1;
    let mut spec = SamplerSpec {
        temperature: if draw.below(12) == 0 { 0.0 } else { between(draw, 0.2, 2.0) },
        seed: draw.bits(),
        choice: draw.below(4) as u32,
        ..SamplerSpec::default()
    };
    if has(0) {
        spec.top_k = [1, 2, 20, 50, vocab as u32 / 2, vocab as u32][draw.below(6)];
    }
    if has(1) {
        spec.top_p = [0.01, 0.5, 0.9, 0.95, 0.999][draw.below(5)];
    }
    if has(2) {
        spec.min_p = [0.02, 0.1, 0.5, 1.0][draw.below(4)];
    }
    if has(3) {
        spec.typical_p = between(draw, 0.1, 0.99);
    }
    let mut row = Row {
        logits: logits(draw, vocab),
        prompt: tokens(draw, vocab),
        output: tokens(draw, 40),
        ..Row::default()
    };
    if has(4) {
        spec.repetition_penalty = between(draw, 0.5, 2.0);
        spec.presence_penalty = between(draw, -2.0, 2.0);
        spec.frequency_penalty = between(draw, -2.0, 2.0);
    }
    if has(5) {
        spec.logit_bias = some_ids(draw, 60, 30).iter().map(|&id| (id, between(draw, -3.0, 6.0))).collect();
        spec.min_tokens = 10;
        spec.stop_ids = some_ids(draw, 60, 5);
        let tail: Vec<u32> = row.output.iter().rev().take(3).rev().map(|&id| id as u32).collect();
        let best = (0..vocab).max_by(|&a, &b| row.logits[a].total_cmp(&row.logits[b])).unwrap_or(0) as u32;
        spec.bad_words = vec![vec![7], [tail, vec![best]].concat(), vec![1, 2, 3, 9], vec![41, 8]];
    }
    if has(6) {
        spec.allowed_ids = some_ids(draw, vocab, vocab / 2);
        row.mask = Some((0..vocab.div_ceil(32)).map(|_| draw.bits() as u32).collect());
    }
    spec.top_logprobs = [None, Some(0), Some(5), Some(20)][draw.below(4)];
    row.spec = spec;
    row
}
