//! The attention kernels, on a device (the emulator, or a GPU), compared with the f64 reference.

use crate::emulator::arrays::Arrays;
use crate::emulator::pick::{case, gpu_only, test_device};
use llaisys_core::cuda::device::{Device, DevicePtr, Element};
use llaisys_core::cuda::ops::attention::{Attention, supports_head_width};
use llaisys_core::cuda::ops::attn_decode::AttnDecode;
use llaisys_core::cuda::ops::attn_prefill::{AttnPrefill, tiles};
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::reference::attention::{Cells, attention};
use llaisys_core::ops::{AttentionRow, AttentionRows, Queries, Scoring};

/// The order of the sequences' cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placement {
    Ascending,
    Shuffled,
    /// Shuffled, and each sequence shares the cells of the previous one, except for its last.
    Shared,
}

#[derive(Debug, Clone)]
struct Case {
    element: Element,
    /// Query heads, KV heads.
    heads: (usize, usize),
    d_head: usize,
    /// For each sequence its number of cells, and how many of its last positions are rows.
    sequences: Vec<(usize, usize)>,
    placement: Placement,
    window: Option<usize>,
}

impl Case {
    fn plain(element: Element, heads: (usize, usize), d_head: usize, sequences: &[(usize, usize)]) -> Self {
        let (sequences, placement) = (sequences.to_vec(), Placement::Shuffled);
        Self { element, heads, d_head, sequences, placement, window: None }
    }

    /// Returns the lists of cells, the range of them that each row sees, and the number of cells. A cell that the
    /// window hides from all rows has an invalid number in the list.
    fn lists(&self, draw: &mut SplitMix64) -> (Vec<u32>, Vec<AttentionRow>, usize) {
        let n_listed: usize = self.sequences.iter().map(|(len, _)| len).sum();
        let n_cells = n_listed + n_listed / 4 + 3;
        let mut free: Vec<usize> = match self.placement {
            Placement::Ascending => (0..n_cells).collect(),
            _ => draw.order(n_cells),
        };
        free.truncate(n_listed);
        let (mut cells, mut rows, mut before) = (Vec::new(), Vec::new(), Vec::new());
        for &(len, n_rows) in &self.sequences {
            let mut own: Vec<u32> = free.drain(..len).map(|cell| cell as u32).collect();
            if self.placement == Placement::Shared {
                let n = (len - 1).min(before.len());
                own[..n].copy_from_slice(&before[..n]);
            }
            let start = cells.len() as u32;
            let hidden = |n: usize| self.window.map_or(0, |window| n.saturating_sub(window));
            let seen = |n| AttentionRow { start, n_hidden: hidden(n) as u32, n_visible: n as u32 };
            rows.extend((len - n_rows + 1..=len).map(seen));
            cells.extend(std::iter::repeat_n(u32::MAX / 2, hidden(len - n_rows + 1)));
            cells.extend_from_slice(&own[hidden(len - n_rows + 1)..]);
            before = own;
        }
        (cells, rows, n_cells)
    }
}

/// A case in device memory, and its numbers as they are stored.
struct Built {
    case: Case,
    attention: Attention,
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn build(device: &dyn Device, case: &Case) -> Built {
    let draw = &mut SplitMix64::new(5);
    let (cells, rows, n_cells) = case.lists(draw);
    let Case { element, heads: (n_heads, n_kv_heads), d_head, .. } = *case;
    // Queries are a part of the rows of qkv. The other parts, and unused cells, are NaN.
    let (q_len, q_width) = (n_heads * d_head, (n_heads + 2 * n_kv_heads) * d_head);
    let mut qkv = vec![f32::NAN; rows.len() * q_width];
    for row in qkv.chunks_exact_mut(q_width) {
        row[..q_len].copy_from_slice(&draw.values(Size::Unit, q_len));
        row[..q_len].iter_mut().for_each(|x| *x *= 4.0);
    }
    let width = n_kv_heads * d_head;
    let mut values = || {
        let mut values = vec![f32::NAN; n_cells * width];
        for &cell in cells.iter().filter(|&&cell| (cell as usize) < n_cells) {
            values[cell as usize * width..][..width].copy_from_slice(&draw.values(Size::Unit, width));
        }
        values
    };
    let (k, v) = (values(), values());
    let array = |what, values: &[f32]| {
        let at = device.elements(what, element, values);
        (at, device.read(element, at, values.len()))
    };
    let ((q_at, qkv), (k_at, k), (v_at, v)) = (array("qkv", &qkv), array("k", &k), array("v", &v));
    let of_rows = |f: fn(&AttentionRow) -> u32| rows.iter().map(|row| f(row) as i32).collect::<Vec<_>>();
    let attention = Attention {
        element,
        n_heads,
        n_kv_heads,
        d_head,
        q: q_at,
        q_width,
        k: k_at,
        v: v_at,
        cells: device.u32s("cells", &cells),
        n_hidden: device.i32s("n_hidden", &of_rows(|row| row.n_hidden)),
        n_visible: device.i32s("n_visible", &of_rows(|row| row.n_visible)),
        score_scale: 1.0 / (d_head as f32).sqrt(),
        out: device.unwritten("out", element, rows.len() * q_len),
    };
    let q = qkv.chunks_exact(q_width).flat_map(|row| row[..q_len].to_vec()).collect();
    Built { case: case.clone(), attention, cells, rows, q, k, v }
}

impl Built {
    fn prefill(&self, device: &dyn Device) -> Vec<f32> {
        self.prefill_rows(device, &self.rows, self.attention)
    }

    /// Prints the case.
    fn name(&self, op: &str) {
        let Case { element, heads: (n_heads, n_kv_heads), d_head, placement, .. } = self.case;
        let most = self.rows.iter().map(|row| row.n_visible).max().unwrap_or(0);
        let rows = format!("{} rows of up to {most} cells, {placement:?}", self.rows.len());
        case(op, element, format!("{n_heads}/{n_kv_heads} heads of {d_head}, {rows}"));
    }

    fn prefill_rows(&self, device: &dyn Device, rows: &[AttentionRow], attention: Attention) -> Vec<f32> {
        self.name("attn_prefill");
        let tiles = tiles(rows, attention.group());
        let bytes: Vec<u8> = tiles.iter().flat_map(|tile| tile.to_bytes()).collect();
        let of = AttnPrefill { attention, tiles: device.bytes("tiles", &bytes), n_tiles: tiles.len() };
        // SAFETY: the tiles are those of the rows; visible cells are below the number of cells.
        unsafe { of.launch(device) }.expect("the kernel runs");
        self.read(device, rows.len())
    }

    fn decode(&self, device: &dyn Device, n_splits: usize) -> Vec<f32> {
        self.name("attn_decode");
        // SAFETY: visible cells are below the number of cells.
        unsafe { self.decoding(device, n_splits).launch(device) }.expect("the kernels run");
        self.read(device, self.rows.len())
    }

    fn decoding(&self, device: &dyn Device, n_splits: usize) -> AttnDecode {
        let (attention, n_rows) = (self.attention, self.rows.len());
        let start: Vec<u32> = self.rows.iter().map(|row| row.start).collect();
        let n_bytes = AttnDecode::scratch_bytes(&attention, n_rows, n_splits);
        let scratch = match n_bytes {
            0 => DevicePtr::NULL,
            n => device.alloc("scratch", n).expect("the device has memory"),
        };
        AttnDecode { attention, start: device.u32s("start", &start), n_rows, n_splits, scratch }
    }

    fn read(&self, device: &dyn Device, n_rows: usize) -> Vec<f32> {
        let Attention { element, n_heads, d_head, out, .. } = self.attention;
        device.read(element, out, n_rows * n_heads * d_head)
    }

    /// Compares every head of every row with the reference. The roundings of weights and results to T are independent,
    /// with a relative root mean square of 2^-9 / sqrt(3) each (2^-12 in f16). The bound is three times as large as
    /// both, for sums of few weights and for the truncation of the tensor cores.
    fn check(&self, got: &[f32]) {
        let rows =
            AttentionRows { cells: &self.cells, rows: &self.rows, window: self.case.window, n_shared: &[] };
        let (n_kv_heads, d_head) = (self.case.heads.1, self.case.d_head);
        let cells = Cells { n_kv_heads, d_head, k: &self.k, v: &self.v };
        let scoring = Scoring { scale: self.attention.score_scale, soft_cap: None };
        let want = attention(Queries { q: &self.q, scoring, sinks: None }, cells, rows);
        let bound = if self.case.element == Element::Bf16 { 5e-3 } else { 1e-3 };
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.chunks_exact(d_head).zip(want.chunks_exact(d_head)).enumerate() {
            let error: f64 = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).powi(2)).sum();
            let size: f64 = want.iter().map(|want| want * want).sum();
            let (error, n_heads) = ((error / size).sqrt(), self.case.heads.0);
            let (row, head) = (i / n_heads, i % n_heads);
            assert!(error <= bound, "{:?}: row {row}, head {head}: {error:e} > {bound:e}", self.case);
        }
    }
}

const HEADS: [(usize, usize); 5] = [(14, 2), (12, 2), (28, 4), (32, 8), (8, 8)];
const WIDTHS: [usize; 4] = [64, 80, 96, 128];
const STORED: [Element; 2] = [Element::Bf16, Element::F16];
const PLACED: [Placement; 3] = [Placement::Ascending, Placement::Shuffled, Placement::Shared];

fn stored_and_widths() -> impl Iterator<Item = (Element, usize)> {
    STORED.into_iter().flat_map(|element| WIDTHS.map(|d_head| (element, d_head)))
}

/// Returns cases for a GPU: every number of heads with every width and type, and two batches of more rows than a block
/// has.
fn all_heads_and_widths(op: &str, sequences: &[(usize, usize)], many: &[(usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, heads) in HEADS.into_iter().enumerate() {
        for (j, (element, d_head)) in stored_and_widths().enumerate() {
            let placement = PLACED[(i + j) % 3];
            cases.push(Case { placement, ..Case::plain(element, heads, d_head, sequences) });
        }
    }
    cases.extend(STORED.map(|element| Case::plain(element, HEADS[0], 64, many)));
    gpu_only(op, cases)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Covers every length, number of heads, width, type and placement; whole prompts, chunks, and single rows in a batch
/// with them.
#[test]
fn prefill_matches_the_reference_within_its_roundings() {
    let device = &*test_device();
    let batches: [&[(usize, usize)]; 8] = [
        &[(1, 1), (15, 15), (16, 3)],
        &[(63, 11), (64, 2)],
        &[(65, 9), (64, 1)],
        &[(511, 5)],
        &[(513, 3), (70, 2)],
        &[(40, 40)],
        &[(64, 10), (130, 6), (1, 1)],
        &[(129, 12)],
    ];
    for (i, sequences) in batches.into_iter().enumerate() {
        for (j, (element, d_head)) in stored_and_widths().enumerate() {
            let mut case = Case::plain(element, HEADS[(i + 2 * j) % 5], d_head, sequences);
            case.placement = PLACED[(i + j) % 3];
            let built = build(device, &case);
            built.check(&built.prefill(device));
        }
    }
    let chunks = [(1, 1), (15, 15), (16, 3), (63, 11), (64, 2), (65, 9), (511, 5), (513, 3), (4097, 4)];
    for case in all_heads_and_widths("attn_prefill", &chunks, &[(257, 257), (513, 64), (300, 17)]) {
        let built = build(device, &case);
        built.check(&built.prefill(device));
    }
}

/// Hidden cells have invalid numbers. Windows begin inside a step, at its border, or have one cell.
#[test]
fn prefill_reads_nothing_before_the_window() {
    let device = &*test_device();
    for (i, window) in [1, 20, 64, 100].into_iter().enumerate() {
        let sequences = [(200, 12), (64, 3), (10, 10)];
        let mut case = Case::plain(STORED[i % 2], (6, 2), WIDTHS[i], &sequences);
        case.window = Some(window);
        let built = build(device, &case);
        built.check(&built.prefill(device));
        let single: Vec<_> = sequences.iter().map(|&(len, _)| (len, 1)).collect();
        let built = build(device, &Case { sequences: single, ..case });
        for n_splits in [1, 2] {
            built.check(&built.decode(device, n_splits));
        }
    }
}

/// In Falcon 71 query heads read one KV head, in some other models 20.
#[test]
fn groups_larger_than_a_tile_are_split() {
    let device = &*test_device();
    let built = build(device, &Case::plain(Element::Bf16, (71, 1), 64, &[(70, 3)]));
    built.check(&built.prefill(device));
    for (i, heads) in [(71, 1), (40, 2)].into_iter().enumerate() {
        let built = build(device, &Case::plain(STORED[i], heads, 64, &[(70, 1), (3, 1)]));
        for n_splits in [1, 2] {
            built.check(&built.decode(device, n_splits));
        }
    }
}

/// Results do not depend on which rows share a tile, or on where tiles begin.
#[test]
fn a_prefilled_row_has_the_same_bits_alone_and_in_a_batch() {
    let device = &*test_device();
    for window in [None, Some(50)] {
        let mut case = Case::plain(Element::Bf16, (6, 2), 64, &[(90, 20), (140, 8)]);
        case.window = window;
        let built = build(device, &case);
        let together = built.prefill(device);
        let row_len = case.heads.0 * case.d_head;
        for row in [0, 11, 19, 20, 27] {
            let of = built.attention;
            let one = Attention {
                q: of.q.at(row * of.q_width * 2),
                n_hidden: of.n_hidden.at(row * 4),
                n_visible: of.n_visible.at(row * 4),
                ..of
            };
            let alone = built.prefill_rows(device, &built.rows[row..=row], one);
            assert_eq!(bits(&alone), bits(&together[row * row_len..][..row_len]), "{window:?}, row {row}");
        }
    }
}

/// Covers every length with one, few and the most splits, and lengths that leave splits empty.
#[test]
fn decode_matches_the_reference_within_its_roundings() {
    let device = &*test_device();
    let batches: [&[usize]; 6] =
        [&[1, 15, 16, 63], &[64, 65, 200], &[511, 1], &[513, 64], &[130, 129, 16], &[320]];
    for (i, lengths) in batches.into_iter().enumerate() {
        let sequences: Vec<_> = lengths.iter().map(|&len| (len, 1)).collect();
        for (j, (element, d_head)) in stored_and_widths().enumerate() {
            let mut case = Case::plain(element, HEADS[(i + j) % 5], d_head, &sequences);
            case.placement = PLACED[(i + j) % 3];
            let built = build(device, &case);
            built.check(&built.decode(device, [1, 3, 64][(i + j / 4) % 3]));
        }
    }
    let single = [1, 15, 16, 63, 64, 65, 511, 513, 4097].map(|len| (len, 1));
    let many: Vec<_> = (1..=257).map(|len| (len, 1)).collect();
    for (i, case) in all_heads_and_widths("attn_decode", &single, &many).into_iter().enumerate() {
        let built = build(device, &case);
        built.check(&built.decode(device, [1, 3, 64][i % 3]));
    }
}

/// The kernel reads what rows see from the device, so one captured launch serves contexts that begin, grow over the
/// borders of splits and end.
#[test]
fn a_replayed_decode_reads_the_visible_range_from_the_device() {
    let device = &*test_device();
    for n_splits in [1, 4] {
        let case = Case::plain(Element::F16, (14, 2), 64, &[(300, 1), (130, 1), (64, 1)]);
        let mut built = build(device, &case);
        let row_len = case.heads.0 * case.d_head;
        let decoding = built.decoding(device, n_splits);
        // SAFETY: as in `Built::decode`, for every list that is uploaded before a replay.
        let launch = || unsafe { decoding.launch(device) };
        launch().expect("the kernels are loaded, which a capture cannot do");
        device.begin_capture().expect("no capture is open");
        launch().expect("the launch is recorded");
        let graph = device.end_capture().expect("a capture is open");
        let mark = device.elements("mark", case.element, &vec![7.0; 3 * row_len]);
        let mark = device.read_bytes(mark, 3 * row_len * 2);
        for lengths in [[300, 130, 64], [64, 128, 1], [65, 129, 0], [257, 0, 0], [256, 1, 63]] {
            let bytes: Vec<u8> = lengths.iter().flat_map(|n: &i32| n.to_le_bytes()).collect();
            device.upload(built.attention.n_visible, &bytes).expect("the array is inside the allocation");
            device.upload(built.attention.out, &mark).expect("the array is inside the allocation");
            device.replay(graph).expect("the kernels run");
            let got = built.read(device, 3);
            let all = (built.rows.clone(), built.q.clone());
            let here: Vec<usize> = (0..3).filter(|&row| lengths[row] > 0).collect();
            let of_rows = |x: &[f32]| {
                here.iter().flat_map(|&r| x[r * row_len..][..row_len].to_vec()).collect::<Vec<_>>()
            };
            built.rows =
                here.iter().map(|&r| AttentionRow { n_visible: lengths[r] as u32, ..all.0[r] }).collect();
            built.q = of_rows(&all.1);
            built.check(&of_rows(&got));
            for row in (0..3).filter(|&row| lengths[row] == 0) {
                assert!(
                    got[row * row_len..][..row_len].iter().all(|&x| x == 7.0),
                    "padding row {row} was written"
                );
            }
            (built.rows, built.q) = all;
        }
    }
}

/// With such large scores one cell has the whole weight, so every step, warp and split must find the maximum.
#[test]
fn huge_scores_select_one_cell() {
    let device = &*test_device();
    let mut case = Case::plain(Element::Bf16, (12, 2), 64, &[(300, 1), (70, 1)]);
    case.placement = Placement::Ascending;
    let mut built = build(device, &case);
    built.attention.score_scale = 100.0;
    for n_splits in [1, 3] {
        built.check(&built.decode(device, n_splits));
    }
    built.check(&built.prefill(device));
}

#[test]
fn other_head_widths_are_not_supported() {
    assert!(WIDTHS.iter().all(|&d| supports_head_width(d)));
    assert!(![0, 32, 100, 256].into_iter().any(supports_head_width));
}
