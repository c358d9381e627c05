//! The CUDA kernels of KV cells and of the sequences' state, on a device (the emulator, or a GPU).

use crate::emulator::arrays::Arrays;
use crate::emulator::close::assert_close;
use crate::emulator::compare::{rounded, ulp};
use crate::emulator::pick::{case, gpu_only, test_device};
use llaisys_core::cuda::device::{Device, DevicePtr, Element};
use llaisys_core::cuda::ops::rope_kv_store::{HeadShape, RopeKvStore, RopeShift};
use llaisys_core::cuda::ops::step::{CopyCells, StepBegin, StepRows};
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::{HeadWidths, reference};

const STORED: [Element; 2] = [Element::Bf16, Element::F16];
const EPS: f32 = 1e-6;

/// An f32 array on the device.
struct Floats {
    at: DevicePtr,
    values: Vec<f32>,
}

impl Floats {
    fn new(device: &dyn Device, what: &'static str, values: Vec<f32>) -> Self {
        Self { at: device.elements(what, Element::F32, &values), values }
    }
}

/// Returns the cosines and sines of positions `0..n`.
fn angles(device: &dyn Device, d: usize, n: i32) -> (Floats, Floats) {
    let angles = reference::rope::angles(d, 10_000.0, &(0..n).collect::<Vec<_>>());
    let cos = angles.iter().map(|x| x.cos() as f32).collect();
    let sin = angles.iter().map(|x| x.sin() as f32).collect();
    (Floats::new(device, "cos", cos), Floats::new(device, "sin", sin))
}

/// Returns `rms_norm` of a head, rounded where transformers rounds.
fn normed(element: Element, head: &[f32], weight: &[f32]) -> Vec<f32> {
    let ones = vec![1.0; head.len()];
    let quotients = reference::rms_norm::rms_norm(head, &ones, EPS);
    let product = |(x, &w): (&f64, &f32)| rounded(element, rounded(element, *x) * f64::from(w)) as f32;
    quotients.iter().zip(weight).map(product).collect()
}

/// The input of a rotation: heads `[.., d]`.
struct Rotated<'a> {
    x: &'a [f32],
    d: usize,
    /// The heads were normalized before they were rotated.
    is_normed: bool,
}

/// Compares heads `[.., d]` with the rotation of `x`.
///
/// The rotation's products and sum are rounded in f32, relative to the products. 2^-22 of both products covers that
/// where they cancel. A norm before the rotation may round to the number next to f64's result, which is one ulp of the
/// products.
fn assert_rotated(element: Element, got: &[f32], want: &[f64], rotated: Rotated<'_>, what: &str) {
    let Rotated { x, d, is_normed } = rotated;
    let tolerance = |i: usize, want: f64| {
        let (a, b) = (f64::from(x[i]).abs(), f64::from(x[i / d * d + (i % d + d / 2) % d]).abs());
        let norm = if is_normed { ulp(element, a) + ulp(element, b) } else { 0.0 };
        2.0 * ulp(element, want) + (a + b) * (-22.0_f64).exp2() + norm
    };
    assert_close(got, want, tolerance, what);
}

fn check_rope_kv_store(element: Element, shape: HeadShape, n_rows: usize, is_normed: bool) {
    let HeadShape { n_heads, n_kv_heads, d_head: d } = shape;
    let what = &format!("{element:?} {shape:?} {n_rows} rows, normed: {is_normed}");
    case("rope_kv_store", element, what);
    let (device, draw) = (&*test_device(), &mut SplitMix64::new((n_rows * d) as u64));
    let (n_positions, n_cells, width) = (40, n_rows + 5, shape.n_all() * d);
    let (cos, sin) = angles(device, d, n_positions);
    let positions: Vec<i32> = (0..n_rows).map(|_| draw.below(n_positions as usize) as i32).collect();
    let cells: Vec<u32> = draw.order(n_cells - 1).iter().take(n_rows).map(|&i| i as u32 + 1).collect();
    let qkv = device.elements("qkv", element, &draw.values(Size::Unit, n_rows * width));
    let before = device.read(element, qkv, n_rows * width);
    let q_norm = Floats::new(device, "q_norm", draw.values(Size::Unit, d));
    let k_norm = Floats::new(device, "k_norm", draw.values(Size::Unit, d));
    let unwritten = || device.unwritten("cells of a layer", element, n_cells * n_kv_heads * d);
    let (keys, values) = (unwritten(), unwritten());
    let or_null = |norm: &Floats| if is_normed { norm.at } else { DevicePtr::NULL };
    let op = RopeKvStore {
        element,
        shape,
        qkv,
        q_norm: or_null(&q_norm),
        k_norm: or_null(&k_norm),
        eps: EPS,
        cos: cos.at,
        sin: sin.at,
        positions: device.i32s("positions", &positions),
        cells: device.u32s("cells", &cells),
        keys,
        values,
        n_rows,
    };
    // SAFETY: positions are below the number of angles, and cells below that of keys and values.
    unsafe { op.launch(device) }.expect("the kernel runs");
    let after = device.read(element, qkv, n_rows * width);
    let n_kv = n_kv_heads * d;
    let (k_cells, v_cells) =
        (device.read(element, keys, n_cells * n_kv), device.read(element, values, n_cells * n_kv));
    for (t, (before, after)) in before.chunks_exact(width).zip(after.chunks_exact(width)).enumerate() {
        let (row_cos, row_sin) = {
            let start = positions[t] as usize * d / 2;
            (&cos.values[start..][..d / 2], &sin.values[start..][..d / 2])
        };
        let (q, rest) = before.split_at(n_heads * d);
        let (k, v) = rest.split_at(n_kv);
        assert_eq!(&after[n_heads * d..], rest, "k and v of the product do not change, {what}");
        let cell = cells[t] as usize * n_kv;
        assert_eq!(&v_cells[cell..][..n_kv], v, "{what}");
        for (x, norm, got) in [(q, &q_norm, &after[..n_heads * d]), (k, &k_norm, &k_cells[cell..][..n_kv])] {
            let x: Vec<f32> = match is_normed {
                true => x.chunks_exact(d).flat_map(|head| normed(element, head, &norm.values)).collect(),
                false => x.to_vec(),
            };
            let want = reference::rope::rope(&x, HeadWidths::whole(d), row_cos, row_sin);
            assert_rotated(element, got, &want, Rotated { x: &x, d, is_normed }, what);
        }
    }
    for cell in (0..n_cells).filter(|&cell| !cells.contains(&(cell as u32))) {
        let untouched = k_cells[cell * n_kv..][..n_kv].iter().chain(&v_cells[cell * n_kv..][..n_kv]);
        assert!(untouched.into_iter().all(|x| x.is_nan()), "cell {cell}, {what}");
    }
}

#[test]
fn rope_kv_store_norms_rotates_and_stores() {
    let shapes = [(14, 2, 64), (12, 2, 128), (28, 4, 128), (32, 8, 80), (8, 8, 96), (3, 1, 256), (2, 1, 4)];
    for element in STORED {
        for (n_heads, n_kv_heads, d_head) in shapes {
            let shape = HeadShape { n_heads, n_kv_heads, d_head };
            for (n_rows, is_normed) in [(1, false), (3, true), (9, false), (17, true)] {
                check_rope_kv_store(element, shape, n_rows, is_normed);
            }
        }
        check_rope_kv_store(element, HeadShape { n_heads: 2, n_kv_heads: 1, d_head: 64 }, 257, true);
        let all = shapes[..5].iter().flat_map(|&shape| [2, 7, 8, 16, 64, 257].map(|n_rows| (shape, n_rows)));
        for ((n_heads, n_kv_heads, d_head), n_rows) in gpu_only("rope_kv_store", all) {
            let shape = HeadShape { n_heads, n_kv_heads, d_head };
            check_rope_kv_store(element, shape, n_rows, n_rows % 2 == 0);
        }
    }
}

/// All padding rows write to cell 0 and to no other cell.
#[test]
fn padding_rows_store_in_cell_0() {
    let (device, element) = (&*test_device(), Element::Bf16);
    let shape = HeadShape { n_heads: 2, n_kv_heads: 1, d_head: 64 };
    let (cos, sin) = angles(device, 64, 1);
    let (keys, values) =
        (device.unwritten("keys", element, 3 * 64), device.unwritten("values", element, 3 * 64));
    let op = RopeKvStore {
        element,
        shape,
        qkv: device.elements("qkv", element, &[1.0; 5 * 4 * 64]),
        q_norm: DevicePtr::NULL,
        k_norm: DevicePtr::NULL,
        eps: EPS,
        cos: cos.at,
        sin: sin.at,
        positions: device.i32s("positions", &[0; 5]),
        cells: device.u32s("cells", &[0; 5]),
        keys,
        values,
        n_rows: 5,
    };
    // SAFETY: positions are below the number of angles, and cells below that of keys and values.
    unsafe { op.launch(device) }.expect("the kernel runs");
    for cells in [keys, values] {
        let got = device.read(element, cells, 3 * 64);
        assert!(got[..64].iter().all(|&x| x == 1.0) && got[64..].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn rope_shift_rotates_the_keys_of_the_listed_cells() {
    for element in STORED {
        for (n_kv_heads, d, n_shifted) in [(2, 64, 1), (8, 80, 7), (10, 96, 3), (4, 128, 30)] {
            let (device, draw) = (&*test_device(), &mut SplitMix64::new(d as u64));
            let (n_cells, width) = (33, n_kv_heads * d);
            case("rope_shift", element, format!("{n_shifted} cells of {n_kv_heads} heads of {d}"));
            let keys = device.elements("keys", element, &draw.values(Size::Unit, n_cells * width));
            let before = device.read(element, keys, n_cells * width);
            let angles = reference::rope::angles(d, 10_000.0, &[-7]);
            let cos: Vec<f32> = angles.iter().map(|x| x.cos() as f32).collect();
            let sin: Vec<f32> = angles.iter().map(|x| x.sin() as f32).collect();
            let cells: Vec<u32> = draw.order(n_cells).iter().take(n_shifted).map(|&i| i as u32).collect();
            let op = RopeShift {
                element,
                shape: HeadShape { n_heads: 0, n_kv_heads, d_head: d },
                keys,
                cells: device.u32s("cells", &cells),
                cos: device.elements("cos", Element::F32, &cos),
                sin: device.elements("sin", Element::F32, &sin),
                n_cells: n_shifted,
            };
            // SAFETY: the keys have every cell of the list.
            unsafe { op.launch(device) }.expect("the kernel runs");
            let after = device.read(element, keys, n_cells * width);
            for (cell, (before, after)) in
                before.chunks_exact(width).zip(after.chunks_exact(width)).enumerate()
            {
                let what = &format!("{element:?} {n_kv_heads} x {d}, cell {cell}");
                if cells.contains(&(cell as u32)) {
                    let want = reference::rope::rope(before, HeadWidths::whole(d), &cos, &sin);
                    assert_rotated(element, after, &want, Rotated { x: before, d, is_normed: false }, what);
                } else {
                    assert_eq!(before, after, "{what}");
                }
            }
        }
    }
}

#[test]
fn copy_cells_copies_in_every_array() {
    let (n_arrays, n_cells) = (6, 9);
    for cell_bytes in [16, 512, 4096] {
        let device = &*test_device();
        case("copy_cells", Element::Bf16, format!("{n_arrays} arrays, cells of {cell_bytes} bytes"));
        let draw = &mut SplitMix64::new(4);
        let size = n_arrays * n_cells * cell_bytes;
        let mut bytes: Vec<u8> = (0..size).map(|_| draw.below(256) as u8).collect();
        let arrays = device.bytes("cells of all layers", &bytes);
        let moves = [(7, 2), (1, 8), (7, 0)];
        let pairs: Vec<u32> = moves.iter().flat_map(|&(from, to)| [from, to]).collect();
        let stride = n_cells * cell_bytes;
        let moves_at = device.u32s("moves", &pairs);
        let op = CopyCells { arrays, n_arrays, stride, moves: moves_at, n_moves: moves.len(), cell_bytes };
        // SAFETY: each array has every cell of the moves.
        unsafe { op.launch(device) }.expect("the kernel runs");
        for array in bytes.chunks_exact_mut(stride) {
            for (from, to) in moves {
                array.copy_within(
                    from as usize * cell_bytes..(from as usize + 1) * cell_bytes,
                    to as usize * cell_bytes,
                );
            }
        }
        assert_eq!(device.read_bytes(arrays, size), bytes, "{cell_bytes} bytes a cell");
    }
}

/// A host model of a slot's state.
#[derive(Debug, Clone)]
struct Slot {
    cells: Vec<u32>,
    base: i32,
    last_token: i32,
}

#[test]
fn step_begin_appends_cells_and_writes_what_rows_see() {
    for (n_slots, n_rows, window) in [(4, 3, 0), (9, 8, 3), (300, 280, 5)] {
        let (device, draw) = (&*test_device(), &mut SplitMix64::new(n_rows as u64));
        let max_len = 12;
        case("step_begin", Element::F32, format!("{n_rows} rows of {n_slots} slots, a window of {window}"));
        let mut slots: Vec<Slot> = (0..n_slots)
            .map(|_| Slot {
                cells: (0..draw.below(8)).map(|_| draw.below(1000) as u32).collect(),
                base: draw.below(3) as i32 * 7,
                last_token: draw.below(50_000) as i32,
            })
            .collect();
        slots[0].cells.clear();
        let mut table = vec![u32::MAX; n_slots * max_len];
        for (slot, list) in slots.iter().zip(table.chunks_exact_mut(max_len)) {
            list[..slot.cells.len()].copy_from_slice(&slot.cells);
        }
        let cell_table = device.u32s("cell_table", &table);
        let lengths: Vec<i32> = slots.iter().map(|slot| slot.cells.len() as i32).collect();
        let lengths = device.i32s("lengths", &lengths);
        let bases = device.i32s("bases", &slots.iter().map(|slot| slot.base).collect::<Vec<i32>>());
        let last_tokens: Vec<i32> = slots.iter().map(|slot| slot.last_token).collect();
        let last_tokens = device.i32s("last_tokens", &last_tokens);
        let unwritten = |what| device.unwritten(what, Element::F32, n_rows);
        let rows = StepRows {
            tokens: unwritten("tokens"),
            positions: unwritten("positions"),
            cells: unwritten("cells"),
            starts: unwritten("starts"),
            n_hidden: unwritten("n_hidden"),
            n_visible: unwritten("n_visible"),
        };
        for _ in 0..4 {
            // Slots in any order, with some padding rows between them.
            let order = draw.order(n_slots - 1);
            let chosen: Vec<usize> = (0..n_rows)
                .map(|row| if draw.below(4) == 0 { 0 } else { order[row % order.len()] + 1 })
                .collect();
            let plan: Vec<(u32, u32)> =
                chosen.iter().map(|&slot| (slot as u32, 1 + draw.below(1000) as u32)).collect();
            let pairs: Vec<u32> = plan.iter().flat_map(|&(slot, cell)| [slot, cell]).collect();
            let plan_at = device.u32s("plan", &pairs);
            let op = StepBegin {
                plan: plan_at,
                cell_table,
                lengths,
                bases,
                last_tokens,
                rows,
                n_rows,
                max_len,
                window,
            };
            // SAFETY: the arrays have every slot of the plan, each with fewer than `max_len` cells.
            unsafe { op.launch(device) }.expect("the kernel runs");
            let [mut tokens, mut positions, mut cells, mut starts, mut hidden, mut visible] =
                [const { Vec::new() }; 6];
            for &(slot, cell) in &plan {
                let state = &mut slots[slot as usize];
                if slot != 0 {
                    state.cells.push(cell);
                }
                let n = state.cells.len() as i32;
                tokens.push(if slot == 0 { 0 } else { state.last_token });
                positions.push(if slot == 0 { 0 } else { state.base + n - 1 });
                cells.push(if slot == 0 { 0 } else { cell as i32 });
                starts.push(slot as i32 * max_len as i32);
                hidden.push(if window == 0 { 0 } else { (n - window as i32).max(0) });
                visible.push(n);
            }
            for (what, at, want) in [
                ("tokens", rows.tokens, tokens),
                ("positions", rows.positions, positions),
                ("cells", rows.cells, cells),
                ("starts", rows.starts, starts),
                ("n_hidden", rows.n_hidden, hidden),
                ("n_visible", rows.n_visible, visible),
            ] {
                assert_eq!(device.read_i32s(at, n_rows), want, "{what}, {n_rows} rows");
            }
            let table = device.read_i32s(cell_table, n_slots * max_len);
            let lengths = device.read_i32s(lengths, n_slots);
            for (i, (slot, list)) in slots.iter().zip(table.chunks_exact(max_len)).enumerate() {
                assert_eq!(lengths[i] as usize, slot.cells.len(), "slot {i}");
                assert!(list.iter().zip(&slot.cells).all(|(&got, &want)| got == want as i32), "slot {i}");
                assert!(list[slot.cells.len()..].iter().all(|&cell| cell == -1), "behind slot {i}");
            }
        }
    }
}
