//! The time of each op of a step: every op of a forward pass, in the decoder's order, compared with the memory
//! bandwidth of the machine. Weights are random.
//!
//! `cargo bench -p llaisys-core --bench step -- --model qwen --format bf16 --rows 1,4,16,512` measures decode steps of
//! that many sequences at 96 positions each (`--context` changes this), or, from 64 rows on, one prompt.
//!
//! For each number of rows it prints the microseconds of a step by kind of op (sums over layers, medians over steps).
//! For products it also prints the bytes of their weights, compared with the bandwidth of a plain sum over memory, and
//! their operations per second. Flags:
//! - `--json`: one line of JSON for each number of rows instead of a table.
//! - `--rows -`: read numbers of rows from standard input, one per line, and print each result immediately. So two
//!   builds can be measured in turn (`benches/pairs.py`). `--most N`: the largest of them, 512 if not given.
//! - `--prune-argmax off|on`: a head of random numbers, read completely or with pruned argmax.
//! - `--isa NAME`: another instruction set than the best.
//! - `--kv-cache-dtype NAME`: cells of another type than bfloat16.
//! - `--list`: print the names of the steps.
//!
//! Flags of other benches of the package are ignored.

#![allow(clippy::disallowed_methods, reason = "a bench reads the clock; the core does not")]

use llaisys_core::dtype::{DType, KvDType};
use llaisys_core::ops::argmax_bounds::ArgmaxBounds;
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::{
    self, AttentionRow, AttentionRows, Gate, GatedPart, HeadWidths, LinearPart, OpContext,
    PrunedArgmaxScratch, Queries, RopeTable, Scoring,
};
use llaisys_core::tensor::{AlignedBuf, KvLayer, KvLayerMut, RowView};
use llaisys_core::threads::{Pool, share};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Rows from which a step is a prompt.
const PROMPT: usize = 64;
/// Bytes of the array for measuring the bandwidth.
const UNCACHED: usize = 256 << 20;
const D_HEAD: usize = 64;
/// The smallest number of cells: a cache with the memory pages of a real engine.
const N_CELLS: usize = 16_384;

/// The sizes of a model.
#[derive(Debug, Clone, Copy)]
struct Shape {
    d_model: usize,
    d_ff: usize,
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
    vocab_size: usize,
}

const QWEN: Shape =
    Shape { d_model: 896, d_ff: 4864, n_layers: 24, n_heads: 14, n_kv_heads: 2, vocab_size: 151_936 };
const SMOLLM2: Shape =
    Shape { d_model: 576, d_ff: 1536, n_layers: 30, n_heads: 9, n_kv_heads: 3, vocab_size: 49_152 };

/// Kinds of ops in the order of a layer.
const KINDS: [&str; 13] = [
    "embed",
    "norm",
    "qkv",
    "rope",
    "kv_store",
    "attention",
    "o",
    "norm2",
    "gate_up",
    "down",
    "final_norm",
    "head",
    "argmax",
];

struct Layer {
    qkv: [PackedMatrix; 3],
    o: PackedMatrix,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    k: AlignedBuf,
    v: AlignedBuf,
}

struct Model {
    shape: Shape,
    kv_dtype: KvDType,
    layers: Vec<Layer>,
    head: PackedMatrix,
    bounds: Option<ArgmaxBounds>,
    /// The head has random numbers.
    is_random: bool,
    scratch: PrunedArgmaxScratch,
    rope: RopeTable,
}

/// A matrix of small numbers that depend on their row and column.
fn matrix(pool: &Pool, format: PackedFormat, n: usize, k: usize) -> PackedMatrix {
    let dtype = format.dtype();
    // 0x2x or 0x3x in the upper bytes makes every float (of 16 or 32 bits) a number below one.
    let byte = |i: usize| if format.is_grouped() { (i * 89 % 61) as u8 } else { 0x20 | (i * 7 % 29) as u8 };
    let bytes: Vec<u8> = (0..dtype.bytes_of(k).expect("whole blocks") + 64).map(byte).collect();
    let n_bytes = bytes.len() - 64;
    let row = |n: usize| RowView { dtype, bytes: &bytes[n % 64..n % 64 + n_bytes] };
    PackedMatrix::pack(pool, format, n, k, &row).expect("memory for the weights")
}

/// A matrix of independent numbers between -1 and 1, approximately normal.
fn random_matrix(pool: &Pool, format: PackedFormat, n: usize, k: usize) -> PackedMatrix {
    let draw = &mut SplitMix64::new(43);
    // The sum of 4 numbers of 16 bits.
    let number =
        |bits: u64| (0..4).map(|i| (bits >> (16 * i) & 0xffff) as f32).sum::<f32>() / 131_070.0 - 1.0;
    let bytes: Vec<u8> = (0..n * k).flat_map(|_| number(draw.bits()).to_le_bytes()).collect();
    let row = |n: usize| RowView { dtype: DType::F32, bytes: &bytes[n * k * 4..(n + 1) * k * 4] };
    PackedMatrix::pack(pool, format, n, k, &row).expect("memory for the weights")
}

impl Model {
    fn new(pool: &Pool, args: &Arguments, n_cells: usize) -> Self {
        let (shape, (format, head)) = (args.shape, args.formats);
        let Shape { d_model, d_ff, n_heads, n_kv_heads, .. } = shape;
        let cells = || {
            let bytes = n_cells * n_kv_heads * args.kv_dtype.head_bytes(D_HEAD);
            let mut cells = AlignedBuf::zeroed("keys and values", bytes).expect("memory for the cells");
            cells.as_mut_slice::<u16>().fill(0x3c3c);
            cells
        };
        let layer = |_| Layer {
            qkv: [n_heads, n_kv_heads, n_kv_heads].map(|n| matrix(pool, format, n * D_HEAD, d_model)),
            o: matrix(pool, format, d_model, n_heads * D_HEAD),
            gate_up: matrix(pool, format, ops::gate_up_rows(d_ff), d_model),
            down: matrix(pool, format, d_model, d_ff),
            k: cells(),
            v: cells(),
        };
        let head = match args.prune_argmax {
            None => matrix(pool, head, shape.vocab_size, d_model),
            Some(_) => random_matrix(pool, head, shape.vocab_size, d_model),
        };
        let start = Instant::now();
        let prunes = args.prune_argmax == Some(true);
        let bounds = prunes.then(|| ArgmaxBounds::new(pool, &head).expect("memory").expect("a plain head"));
        if prunes {
            eprintln!("made the argmax bounds in {:.2} s", start.elapsed().as_secs_f64());
        }
        Self {
            shape,
            kv_dtype: args.kv_dtype,
            layers: (0..shape.n_layers).map(layer).collect(),
            head,
            bounds,
            is_random: args.prune_argmax.is_some(),
            scratch: PrunedArgmaxScratch::default(),
            rope: RopeTable::new(D_HEAD, 1e6),
        }
    }

    /// Bytes of each kind of product.
    fn n_bytes(&self, kind: &str) -> usize {
        let of = |layer: &Layer| match kind {
            "qkv" => layer.qkv.iter().map(PackedMatrix::n_bytes).sum(),
            "o" => layer.o.n_bytes(),
            "gate_up" => layer.gate_up.n_bytes(),
            "down" => layer.down.n_bytes(),
            _ => 0,
        };
        if kind == "head" { self.head.n_bytes() } else { self.layers.iter().map(of).sum() }
    }

    /// Weights of each kind of product.
    fn n_weights(&self, kind: &str) -> usize {
        let Shape { d_model, d_ff, n_layers, n_heads, n_kv_heads, vocab_size } = self.shape;
        match kind {
            "qkv" => n_layers * (n_heads + 2 * n_kv_heads) * D_HEAD * d_model,
            "o" => n_layers * n_heads * D_HEAD * d_model,
            "gate_up" => n_layers * ops::gate_up_rows(d_ff) * d_model,
            "down" => n_layers * d_ff * d_model,
            "head" => vocab_size * d_model,
            _ => 0,
        }
    }
}

/// The rows of a step and their activations.
struct Rows {
    n: usize,
    cells: Vec<u32>,
    listed: Vec<u32>,
    seen: Vec<AttentionRow>,
    positions: Vec<i32>,
    x: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    inner: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    logits: Vec<f32>,
}

impl Rows {
    /// `n` sequences of one row that sees `n_context` positions, or one of `n` rows.
    fn new(shape: Shape, n: usize, n_context: usize) -> Self {
        let Shape { d_model, d_ff, n_heads, n_kv_heads, vocab_size, .. } = shape;
        let prompt = n >= PROMPT;
        // Sequences have ranges of 32 cells in turn, as the KV cache allocates them.
        let cell = |seq: usize, i: usize| ((i / 32 * n + seq) * 32 + i % 32) as u32;
        let (mut listed, mut seen, mut cells, mut positions) = (vec![], vec![], vec![], vec![]);
        if prompt {
            listed.extend(0..n as u32);
            cells.extend(0..n as u32);
            positions.extend(0..n as i32);
            seen.extend((0..n as u32).map(|i| AttentionRow { start: 0, n_hidden: 0, n_visible: i + 1 }));
        } else {
            for seq in 0..n {
                let start = listed.len() as u32;
                listed.extend((0..n_context).map(|i| cell(seq, i)));
                seen.push(AttentionRow { start, n_hidden: 0, n_visible: n_context as u32 });
                cells.push(cell(seq, n_context - 1));
                positions.push(n_context as i32 - 1);
            }
        }
        let zeros = |width: usize| vec![0.0; n * width];
        Self {
            n,
            cells,
            listed,
            seen,
            positions,
            x: zeros(d_model),
            normed: zeros(d_model),
            q: zeros(n_heads * D_HEAD),
            k: zeros(n_kv_heads * D_HEAD),
            v: zeros(n_kv_heads * D_HEAD),
            attended: zeros(n_heads * D_HEAD),
            inner: zeros(d_ff),
            cos: zeros(D_HEAD / 2),
            sin: zeros(D_HEAD / 2),
            logits: vec![0.0; if prompt { 1 } else { n } * vocab_size],
        }
    }
}

/// Seconds of one step by kind.
struct Laps {
    last: Instant,
    spent: [Duration; KINDS.len()],
}

impl Laps {
    fn new() -> Self {
        Self { last: Instant::now(), spent: [Duration::ZERO; KINDS.len()] }
    }

    fn lap(&mut self, kind: usize) {
        let now = Instant::now();
        self.spent[kind] += now - self.last;
        self.last = now;
    }
}

/// One step, op by op.
fn step(cx: &mut OpContext, model: &mut Model, r: &mut Rows, start: &[f32]) -> Laps {
    let d_model = model.shape.d_model;
    let weight = vec![1.0; d_model];
    let mut laps = Laps::new();
    let n_inputs = r.x.len();
    r.x.copy_from_slice(&start[..n_inputs]);
    model.rope.angles(&r.positions, &mut r.cos, &mut r.sin);
    laps.lap(0);
    let part = |weight| LinearPart { weight, bias: None };
    for layer in &mut model.layers {
        ops::rms_norm(cx, &r.x, &weight, 1e-6, &mut r.normed);
        laps.lap(1);
        let qkv = [part(&layer.qkv[0]), part(&layer.qkv[1]), part(&layer.qkv[2])];
        ops::linear(cx, &r.normed, &qkv, &mut [&mut r.q, &mut r.k, &mut r.v]);
        laps.lap(2);
        ops::rope(cx, &mut r.q, HeadWidths::whole(D_HEAD), &r.cos, &r.sin);
        ops::rope(cx, &mut r.k, HeadWidths::whole(D_HEAD), &r.cos, &r.sin);
        laps.lap(3);
        let (dtype, n_kv_heads, d_head) = (model.kv_dtype, model.shape.n_kv_heads, D_HEAD);
        let (k, v) = (&mut layer.k, &mut layer.v);
        ops::kv_store(cx, KvLayerMut { dtype, n_kv_heads, d_head, k, v }, &r.cells, &r.k, &r.v);
        laps.lap(4);
        let cells = KvLayer { dtype, n_kv_heads, d_head, k: &layer.k, v: &layer.v };
        let rows = AttentionRows { cells: &r.listed, rows: &r.seen, window: None, n_shared: &[] };
        let scoring = Scoring { scale: 0.125, soft_cap: None };
        ops::attention(cx, Queries { q: &r.q, scoring, sinks: None }, cells, rows, &mut r.attended);
        laps.lap(5);
        ops::linear_add(cx, &r.attended, &layer.o, &mut r.x);
        laps.lap(6);
        ops::rms_norm(cx, &r.x, &weight, 1e-6, &mut r.normed);
        laps.lap(7);
        let part = GatedPart { gate_up: &layer.gate_up, bias: None, gate: Gate::Silu };
        ops::linear_gated(cx, &r.normed, part, &mut r.inner);
        laps.lap(8);
        ops::linear_add(cx, &r.inner, &layer.down, &mut r.x);
        laps.lap(9);
    }
    let n_out = r.logits.len() / model.shape.vocab_size;
    let hidden = &mut r.x[(r.n - n_out) * d_model..];
    if model.is_random {
        // The outputs of the layers are the same for all rows.
        hidden.copy_from_slice(&start[..n_out * d_model]);
    }
    ops::rms_norm_in_place(cx, hidden, &weight, 1e-6);
    laps.lap(10);
    if let Some(bounds) = &model.bounds {
        let ids = ops::pruned_argmax(cx, hidden, &model.head, bounds, &mut model.scratch);
        assert_eq!(ids.flatten().count(), n_out, "pruned argmax did not find every row");
        laps.lap(11);
        return laps;
    }
    ops::linear(cx, hidden, &[part(&model.head)], &mut [&mut r.logits]);
    laps.lap(11);
    for logits in r.logits.chunks_exact(model.shape.vocab_size) {
        black_box(ops::argmax(logits));
    }
    laps.lap(12);
    laps
}

/// The bandwidth of a plain sum over memory, in GB/s.
fn bandwidth(pool: &Pool, data: &[u64]) -> f64 {
    let once = || {
        let start = Instant::now();
        pool.run(&|worker| {
            let part = share(data.len(), pool.n_threads(), worker);
            black_box(data[part].iter().fold(0_u64, |sum, x| sum.wrapping_add(*x)));
        });
        UNCACHED as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    median((0..5).map(|_| once()).collect())
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

struct Arguments {
    shape: Shape,
    formats: (PackedFormat, PackedFormat),
    rows: Vec<usize>,
    /// Read numbers of rows from standard input; `rows` then has only the largest.
    from_stdin: bool,
    /// None: the best.
    isa: Option<IsaName>,
    kv_dtype: KvDType,
    n_threads: usize,
    /// Positions of every sequence in a decode step, its new one included.
    n_context: usize,
    seconds: f64,
    /// A head of random numbers, read completely (off) or with pruned argmax (on).
    prune_argmax: Option<bool>,
    json: bool,
    /// Only print the names of the steps, as Criterion does.
    lists: bool,
}

fn format(name: &str) -> PackedFormat {
    let found = PackedFormat::ALL.into_iter().find(|f| f.dtype().name().eq_ignore_ascii_case(name));
    found.unwrap_or_else(|| panic!("no format {name}"))
}

fn kv_dtype(name: &str) -> KvDType {
    let found = KvDType::ALL.into_iter().find(|dtype| format!("{dtype:?}").eq_ignore_ascii_case(name));
    found.unwrap_or_else(|| panic!("no cells of type {name}"))
}

fn arguments() -> Arguments {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str, default: &str| {
        let at = words.iter().position(|word| word == name);
        at.and_then(|at| words.get(at + 1)).map_or(default.to_owned(), Clone::clone)
    };
    let body = value("--format", "bf16");
    let head = value("--head", &body);
    let all_threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    let shape = if value("--model", "qwen") == "qwen" { QWEN } else { SMOLLM2 };
    let from_stdin = value("--rows", "") == "-";
    let isa = value("--isa", "");
    let rows = if from_stdin { value("--most", "512") } else { value("--rows", "1,4,16,512") };
    Arguments {
        shape: Shape {
            n_layers: value("--layers", &shape.n_layers.to_string()).parse().expect("a number"),
            ..shape
        },
        formats: (format(&body), format(&head)),
        rows: rows.split(',').map(|n| n.parse().expect("a number")).collect(),
        from_stdin,
        isa: (!isa.is_empty()).then(|| IsaName::parse(&isa).expect("an instruction set")),
        kv_dtype: kv_dtype(&value("--kv-cache-dtype", "bfloat16")),
        n_threads: value("--threads", &all_threads).parse().expect("a number"),
        n_context: value("--context", "96").parse().expect("a number"),
        seconds: value("--seconds", "1.0").parse().expect("a number"),
        prune_argmax: ["off", "on"]
            .iter()
            .position(|word| value("--prune-argmax", "") == *word)
            .map(|on| on == 1),
        json: words.iter().any(|word| word == "--json"),
        lists: words.iter().any(|word| word == "--list"),
    }
}

fn main() {
    let args = arguments();
    if args.lists {
        args.rows.iter().for_each(|n| println!("step/{n} rows: benchmark"));
        return;
    }
    let kernels = Kernels::select(args.isa).expect("the machine has the set");
    let pool = Pool::new(args.n_threads).expect("threads start");
    let data = vec![1_u64; UNCACHED / 8];
    let most = args.rows.iter().copied().max().unwrap_or(1);
    let mut cx = OpContext::new(kernels, pool, most, args.shape.d_ff).expect("memory for the scratch");
    let n_cells = (most.min(PROMPT) * args.n_context.next_multiple_of(32)).max(N_CELLS);
    let mut model = Model::new(&cx.pool, &args, n_cells);
    let start = SplitMix64::new(1).values(Size::Unit, most * args.shape.d_model);
    let lines = std::io::stdin().lines().map(|line| line.expect("text").trim().parse().expect("a number"));
    let asked: Box<dyn Iterator<Item = usize>> =
        if args.from_stdin { Box::new(lines) } else { Box::new(args.rows.clone().into_iter()) };
    for n in asked {
        let read = bandwidth(&cx.pool, &data);
        let mut rows = Rows::new(args.shape, n, args.n_context);
        let mut steps: Vec<Laps> = Vec::new();
        step(&mut cx, &mut model, &mut rows, &start);
        let begin = Instant::now();
        while steps.len() < 3 || begin.elapsed().as_secs_f64() < args.seconds {
            steps.push(step(&mut cx, &mut model, &mut rows, &start));
        }
        let of = |kind: usize| median(steps.iter().map(|s| s.spent[kind].as_secs_f64() * 1e6).collect());
        let spent: Vec<f64> = (0..KINDS.len()).map(of).collect();
        let whole =
            median(steps.iter().map(|s| s.spent.iter().sum::<Duration>().as_secs_f64() * 1e6).collect());
        report(&model, &Times { n, read, spent, whole }, args.json);
    }
}

/// The medians of steps with `n` rows.
struct Times {
    n: usize,
    /// The bandwidth of plain reads, in GB per second.
    read: f64,
    /// Microseconds of each of [`KINDS`].
    spent: Vec<f64>,
    /// Microseconds of a step.
    whole: f64,
}

/// Prints one step: the time of each kind of op, and its share of the memory bandwidth.
fn report(model: &Model, times: &Times, json: bool) {
    let Times { n, read, spent, whole } = times;
    let (n, read, whole) = (*n, *read, *whole);
    let tokens = n as f64 / whole * 1e6;
    if json {
        let kinds: Vec<String> =
            KINDS.iter().zip(spent).map(|(kind, us)| format!("\"{kind}\": {us:.1}")).collect();
        println!(
            "{{\"rows\": {n}, \"tokens_per_second\": {tokens:.1}, \"read_gb_s\": {read:.1}, \"step_us\": {whole:.1}, {}}}",
            kinds.join(", ")
        );
        return;
    }
    println!(
        "bound: weights and cells are read once, at {read:.1} GB/s; below 32 rows that limits, above it arithmetic"
    );
    println!("{n} rows: {whole:.0} us, {tokens:.1} tokens/s, memory reads {read:.1} GB/s");
    for (kind, us) in KINDS.iter().zip(spent) {
        let bytes = model.n_bytes(kind) as f64;
        let rate = if bytes == 0.0 {
            String::new()
        } else {
            let n = if *kind == "head" && n >= PROMPT { 1 } else { n };
            let products = (2 * model.n_weights(kind) * n) as f64;
            format!(
                "{:7.1} GB/s {:3.0} % {:7.0} GOP/s",
                bytes / us / 1e3,
                bytes / us / 10.0 / read,
                products / us / 1e3
            )
        };
        println!("  {kind:>10} {us:9.1} us {:5.1} % {rate}", us / whole * 100.0);
    }
}
