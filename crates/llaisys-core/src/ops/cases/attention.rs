//! Cases of attention: sequences in arbitrary cells, between cells that must not be read.

use super::{ROUNDING, Size, SplitMix64};
use crate::dtype::KvDType;
use crate::error::DeviceError;
use crate::ops::reference::attention::Cells;
use crate::ops::reference::kv_store::{bf16, encode, stored};
use crate::ops::{AttentionRow, AttentionRows, Queries, Scoring, window_span};
use crate::tensor::{AlignedBuf, KvLayer};

/// One sequence: its length, and how many of its last positions are rows of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Cells, those of the new rows included.
    pub len: usize,
    /// Rows, `1..=len`. Row i sees the cells up to its own, or the last `window` of them.
    pub n_rows: usize,
}

/// A batch.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionCase {
    /// Number of query heads, and number of heads of K and V.
    pub heads: (usize, usize),
    /// Elements of a head.
    pub d_head: usize,
    /// Element type of K and V.
    pub dtype: KvDType,
    /// The sequences of the batch.
    pub sequences: Vec<Sequence>,
    /// Size of queries and keys. With huge ones the softmax selects single cells.
    pub size: Size,
    /// The sliding window: the largest number of cells that a row sees.
    pub window: Option<usize>,
    /// Soft cap of the scores.
    pub soft_cap: Option<f32>,
    /// Factor of random sinks. With a large one, some heads see almost only their sink.
    pub sinks: Option<f32>,
}

/// The placement of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// One sequence after the other, in position order.
    InOrder,
    /// In random order; the number is the seed.
    Shuffled(u64),
}

impl AttentionCase {
    /// Every head size and grouping, list lengths around the borders of vectors, blocks and spans, single rows and
    /// prompts, every type.
    pub fn all() -> Vec<Self> {
        let one = |len, n_rows| vec![Sequence { len, n_rows }];
        let mixed = vec![(1, 1), (40, 3), (129, 1), (300, 17), (16, 16)];
        let mixed: Vec<Sequence> = mixed.into_iter().map(|(len, n_rows)| Sequence { len, n_rows }).collect();
        let mut cases = Vec::new();
        let mut add = |heads, d_head, sequences: &Vec<Sequence>| {
            // f16 differs from f32 only in how words are loaded, so it runs with every head size.
            let f16 = sequences.len() > 1 && heads == (6, 2);
            for dtype in KvDType::ALL.into_iter().filter(|&dtype| dtype != KvDType::Float16 || f16) {
                let sequences = sequences.clone();
                cases.push(Self { heads, d_head, dtype, sequences, ..Self::plain() });
            }
        };
        for d_head in [2, 16, 24, 32, 64, 80, 96, 128, 256, 512] {
            add((6, 2), d_head, &mixed);
        }
        for heads in [(1, 1), (4, 4), (9, 3), (14, 2), (7, 1), (40, 1)] {
            add(heads, 32, &mixed);
        }
        for len in [1, 2, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257, 2048, 2049, 2300] {
            add((3, 1), 16, &one(len, 1));
        }
        // Enough sequences that one thread computes all heads of a row in one item.
        let lens = [1, 15, 16, 33, 64, 65, 100, 127, 128, 129, 200, 257, 300];
        let rows = lens.iter().map(|&len| Sequence { len, n_rows: 1 });
        let crowd: Vec<Sequence> = rows.chain([Sequence { len: 40, n_rows: 7 }]).collect();
        for (heads, d_head) in [((9, 3), 64), ((14, 2), 64), ((8, 1), 80), ((40, 1), 16), ((4, 2), 24)] {
            add(heads, d_head, &crowd);
        }
        add((9, 3), 64, &one(200, 200));
        add((3, 1), 16, &one(2100, 70));
        add((4, 2), 16, &vec![]);
        for size in [Size::Zero, Size::Tiny, Size::Outliers] {
            // f16 overflows above 65504 and is zero where the others are tiny.
            let wide = KvDType::ALL.into_iter().filter(|&dtype| dtype != KvDType::Float16);
            for dtype in wide {
                cases.push(Self { heads: (6, 2), dtype, sequences: mixed.clone(), size, ..Self::plain() });
            }
        }
        cases.extend(Self::with_windows(&mixed));
        cases.extend(Self::with_sinks(&mixed, &crowd));
        let window = Some(70);
        for dtype in [KvDType::Bfloat16, KvDType::Int8] {
            cases.push(Self { dtype, sequences: crowd.clone(), window, ..Self::plain() });
        }
        cases
    }

    /// Windows of one position, around blocks and spans, and longer than every sequence; soft caps far below the scores
    /// and above them.
    fn with_windows(mixed: &[Sequence]) -> Vec<Self> {
        let one = |len, n_rows| vec![Sequence { len, n_rows }];
        let mut cases = Vec::new();
        for window in [1, 2, 5, 16, 64, 127, 128, 129, 300, 1025, 5000] {
            for sequences in [mixed.to_vec(), one(2300, 1), one(2300, 150)] {
                let window = Some(window);
                let heads = (4, 2);
                let dtype = KvDType::ALL[cases.len() % 4];
                cases.push(Self { heads, d_head: 16, dtype, sequences, window, ..Self::plain() });
            }
        }
        for soft_cap in [0.5, 50.0] {
            let (sequences, soft_cap) = (mixed.to_vec(), Some(soft_cap));
            cases.push(Self { sequences: sequences.clone(), soft_cap, window: Some(20), ..Self::plain() });
            cases.push(Self { sequences: sequences.clone(), soft_cap, ..Self::plain() });
            cases.push(Self { dtype: KvDType::Int8, sequences, soft_cap, ..Self::plain() });
        }
        cases
    }

    /// Small and large sinks, of rows of one span, of many and of separately computed ones, with windows and a cap.
    fn with_sinks(mixed: &[Sequence], crowd: &[Sequence]) -> Vec<Self> {
        let one = |len, n_rows| vec![Sequence { len, n_rows }];
        let mut cases = Vec::new();
        for sinks in [4.0, 60.0] {
            let plain = || Self { heads: (4, 2), d_head: 16, sinks: Some(sinks), ..Self::plain() };
            for sequences in [mixed.to_vec(), crowd.to_vec(), one(2300, 1), one(2300, 70)] {
                for window in [None, Some(24)] {
                    let dtype = KvDType::ALL[cases.len() % 4];
                    cases.push(Self { dtype, sequences: sequences.clone(), window, ..plain() });
                }
            }
            cases.push(Self { sequences: mixed.to_vec(), soft_cap: Some(5.0), ..plain() });
        }
        cases
    }

    /// Two KV heads of three query heads each, f32, no window, no cap, no sinks.
    pub fn plain() -> Self {
        Self {
            heads: (6, 2),
            d_head: 64,
            dtype: KvDType::Float32,
            sequences: Vec::new(),
            size: Size::Unit,
            window: None,
            soft_cap: None,
            sinks: None,
        }
    }

    /// Number of rows in the batch.
    pub fn n_rows(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.n_rows).sum()
    }

    /// Builds the batch's tensors. Queries, keys and values depend only on the case. Every cell that belongs to no
    /// sequence is NaN.
    ///
    /// Errors: [`DeviceError::Allocation`].
    pub fn build(&self, placement: Placement) -> Result<AttentionInput, DeviceError> {
        let draw = &mut SplitMix64::new(17);
        let n_used: usize = self.sequences.iter().map(|sequence| sequence.len).sum();
        let n_cells = n_used + n_used / 3 + 2;
        let cells: Vec<u32> = match placement {
            Placement::InOrder => (0..n_used as u32).collect(),
            Placement::Shuffled(seed) => {
                SplitMix64::new(seed).order(n_cells)[..n_used].iter().map(|&cell| cell as u32).collect()
            }
        };
        let width = self.heads.1 * self.d_head;
        let q = draw.values(self.size, self.n_rows() * self.heads.0 * self.d_head);
        let q = q.into_iter().map(|q| q * 4.0).collect();
        let k = spread(&draw.values(self.size, n_used * width), &cells, n_cells * width);
        let v = spread(&draw.values(Size::Unit, n_used * width), &cells, n_cells * width);
        AttentionInput::new(self, q, k, v, cells)
    }

    /// The list of cells that the rows get, and the part of it that each row sees. With a window the list begins at the
    /// last multiple of the span before the window.
    fn lists(&self, cells: &[u32]) -> (Vec<u32>, Vec<AttentionRow>) {
        let (mut listed, mut rows) = (Vec::new(), Vec::new());
        let mut cells = cells;
        for sequence in &self.sequences {
            let (own, rest) = cells.split_at(sequence.len);
            cells = rest;
            let hidden = |n: usize| self.window.map_or(0, |window| n.saturating_sub(window));
            let first_n = sequence.len - sequence.n_rows + 1;
            let base = self.window.map_or(0, |window| {
                let span = window_span(window);
                hidden(first_n) / span * span
            });
            let start = listed.len() as u32;
            listed.extend_from_slice(&own[base..]);
            rows.extend((first_n..=sequence.len).map(|n| AttentionRow {
                start,
                n_hidden: (hidden(n) - base) as u32,
                n_visible: (n - base) as u32,
            }));
        }
        (listed, rows)
    }
}

/// Writes consecutive rows into cells; the other cells are NaN.
fn spread(rows: &[f32], cells: &[u32], len: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; len];
    let width = rows.len() / cells.len().max(1);
    for (i, &cell) in cells.iter().enumerate() {
        out[cell as usize * width..][..width].copy_from_slice(&rows[i * width..][..width]);
    }
    out
}

/// A built case.
#[derive(Debug)]
pub struct AttentionInput {
    /// `[n, n_heads, d_head]`
    pub q: Vec<f32>,
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
    window: Option<usize>,
    /// How scores are computed.
    pub scoring: Scoring,
    sinks: Option<Vec<f32>>,
    /// The keys and values as numbers.
    numbers: (Vec<f32>, Vec<f32>),
    tensors: (AlignedBuf, AlignedBuf),
    dtype: KvDType,
    n_kv_heads: usize,
    d_head: usize,
}

impl AttentionInput {
    fn new(
        case: &AttentionCase,
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        cells: Vec<u32>,
    ) -> Result<Self, DeviceError> {
        let (listed, rows) = case.lists(&cells);
        Ok(Self {
            q,
            cells: listed,
            rows,
            window: case.window,
            sinks: case.sinks.map(|factor| {
                let sinks = SplitMix64::new(23).values(Size::Unit, case.heads.0);
                sinks.into_iter().map(|sink| sink * factor).collect()
            }),
            scoring: Scoring { scale: 1.0 / (case.d_head as f32).sqrt(), soft_cap: case.soft_cap },
            tensors: (tensor(case.dtype, case.d_head, &k)?, tensor(case.dtype, case.d_head, &v)?),
            numbers: (stored(case.dtype, case.d_head, &k), stored(case.dtype, case.d_head, &v)),
            dtype: case.dtype,
            n_kv_heads: case.heads.1,
            d_head: case.d_head,
        })
    }

    /// The queries of rows with the numbers `q`.
    pub fn queries_of<'a>(&'a self, q: &'a [f32]) -> Queries<'a> {
        Queries { q, scoring: self.scoring, sinks: self.sinks.as_deref() }
    }

    /// Keys and values in the layout that the op reads.
    pub fn layer(&self) -> KvLayer<'_> {
        let (k, v) = (&self.tensors.0, &self.tensors.1);
        KvLayer { dtype: self.dtype, n_kv_heads: self.n_kv_heads, d_head: self.d_head, k, v }
    }

    /// Keys and values in the layout that the reference reads.
    pub fn numbers(&self) -> Cells<'_> {
        let (k, v) = (&self.numbers.0[..], &self.numbers.1[..]);
        Cells { n_kv_heads: self.n_kv_heads, d_head: self.d_head, k, v }
    }

    /// The cells that the batch's rows see.
    pub fn rows(&self) -> AttentionRows<'_> {
        AttentionRows { cells: &self.cells, rows: &self.rows, window: self.window, n_shared: &[] }
    }

    /// Queries as the op multiplies them: times the scale, then rounded to bf16 if keys are multiplied as bf16. Returns
    /// them with the part of the scoring that remains to be applied.
    pub fn queries(&self) -> (Vec<f32>, Scoring) {
        let factor = |q: f32| if self.in_pairs() { bf16(q) } else { q };
        let q = self.q.iter().map(|q| factor(q * self.scoring.scale)).collect();
        (q, Scoring { scale: 1.0, ..self.scoring })
    }

    /// True if keys and values are multiplied as pairs of bf16.
    fn in_pairs(&self) -> bool {
        matches!(self.dtype, KvDType::Bfloat16 | KvDType::Int8)
    }

    /// Overwrites every key and value of `cell` with `x`.
    pub fn corrupt(&mut self, cell: usize, x: f32) {
        let (dtype, d, n_heads) = (self.dtype, self.d_head, self.n_kv_heads);
        let numbers = vec![x; n_heads * d];
        let bytes: Vec<u8> = numbers.chunks(d).flat_map(|head| encode(dtype, head)).collect();
        let (k, v) = &mut self.tensors;
        for (tensor, kept) in [(k, &mut self.numbers.0), (v, &mut self.numbers.1)] {
            kept[cell * n_heads * d..][..n_heads * d].copy_from_slice(&stored(dtype, d, &numbers));
            tensor.as_mut_slice()[cell * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// The largest error of outputs against the reference of [`AttentionInput::queries`]: six standard deviations of
    /// roundings that are uniform and independent (3.5 roundings times the root of their number). A worst-case bound
    /// would be so wide that one missing cell in a thousand would pass.
    ///
    /// A score has `2 d + 2` roundings (of the products, the sums and the scaled q). They are roundings of partial sums
    /// that are below `4 sqrt(d) rms(q) rms(k)` (a random walk) plus the largest single product. The score's error and
    /// the maximum's enter each weight, and e^x adds 2e-7. Both count once in the weighted values and once in their
    /// sum. Weighted values are sums over blocks of 128 cells with two roundings each, and three for every block and
    /// span that is added. All errors are relative to the largest value, which bounds any weighted mean.
    ///
    /// With bf16 cells each weight except the largest, which is 1, is rounded to bf16 too. That error is at most 2^-8
    /// of the weight, half of that in the mean, and zero if all scores are equal. With int8 cells the rounded number is
    /// the weight times its value's scale, so the largest is rounded as well. A key's number is then a rounded product:
    /// d roundings and the scale's are added.
    pub fn tolerance(&self) -> f64 {
        let (q, (k, v)) = (Spread::of(&self.q), (Spread::of(&self.numbers.0), Spread::of(&self.numbers.1)));
        let (d, n) = (self.d_head as f64, self.rows.iter().map(|row| row.n_visible).max().unwrap_or(0));
        let partial_sum = 4.0 * d.sqrt() * q.rms * k.rms + q.largest * k.largest;
        let is_int8 = self.dtype == KvDType::Int8;
        let n_roundings = 2.0 * d + 2.0 + if is_int8 { d + 1.0 } else { 0.0 };
        let score = 3.5 * n_roundings.sqrt() * ROUNDING * partial_sum / d.sqrt();
        // The cap's own error is relative to the capped score.
        let capped = self.scoring.soft_cap.map_or(0.0, |cap| f64::from(cap).min(partial_sum / d.sqrt()));
        let score = score + 6e-7 * capped;
        let sums = 3.5 * (2.0 * 128.0 + 3.0 * f64::from(n / 128 + 16)).sqrt() * ROUNDING;
        let weights = match self.dtype {
            KvDType::Int8 => 1.0 / 256.0,
            KvDType::Bfloat16 if q.largest > 0.0 => 1.0 / 512.0,
            _ => 0.0,
        };
        v.largest * (4.0 * score + 4e-7 + 2.0 * sums + weights)
    }
}

/// Sizes of numbers; NaN (cells that belong to no sequence) is skipped.
struct Spread {
    largest: f64,
    rms: f64,
}

impl Spread {
    fn of(x: &[f32]) -> Self {
        let sizes = || x.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x.abs()));
        let squares: f64 = sizes().map(|x| x * x).sum();
        Self { largest: sizes().fold(0.0, f64::max), rms: (squares / sizes().count().max(1) as f64).sqrt() }
    }
}

/// Rows of heads in the layout that the op reads.
fn tensor(dtype: KvDType, d_head: usize, numbers: &[f32]) -> Result<AlignedBuf, DeviceError> {
    let bytes: Vec<u8> = numbers.chunks(d_head).flat_map(|head| encode(dtype, head)).collect();
    let mut tensor = AlignedBuf::zeroed("keys and values", bytes.len())?;
    tensor.as_mut_slice().copy_from_slice(&bytes);
    Ok(tensor)
}
