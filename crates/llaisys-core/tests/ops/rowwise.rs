//! The row-wise ops on every instruction set of the machine: compared with their references on the op cases, and bit
//! for bit with single rows. (`linear`, attention and the ops on KV cells are in other files.)

use crate::parity::{assert_close, contexts, name};
use crate::stored::{Rng, Stored};
use llaisys_core::dtype::DType;
use llaisys_core::ops::cases::{self, RowsCase, Size, SplitMix64};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::{
    self, ClampedSilu, Columns, Gate, LayerNorm, OpContext, RopeTable, Routing, reference,
};
use llaisys_core::tensor::RowView;

fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}, number {i}: {got:e} and {want:e}");
    }
}

#[test]
fn embed_gathers_the_stored_values() {
    for cx in contexts() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_weight()) {
            let (format, width) = (PackedFormat::of(dtype), 3 * dtype.block_len().max(32));
            let table = Stored::random(&mut Rng(3), dtype, 70, width);
            let packed = table.pack(&cx.pool, format);
            for n in [0, 1, 5, 300] {
                let draw = &mut SplitMix64::new(n as u64);
                let tokens: Vec<i32> = (0..n).map(|_| draw.below(70) as i32).collect();
                let mut out = vec![f32::NAN; n * width];
                ops::embed(&cx, &packed, &tokens, &mut out);
                let want = reference::embed::embed(&table.values(), width, &tokens);
                // Scale times integer is exact in f32, the sum with the minimum is rounded.
                let tolerance = |_, want: f64| cases::ROUNDING * want.abs();
                let exact = |_, _| 0.0;
                let what = format!("{} {dtype:?} {n}", name(&cx));
                if format.is_grouped() {
                    assert_close(&out, &want, tolerance, &what);
                } else {
                    assert_close(&out, &want, exact, &what);
                }
            }
        }
    }
}

#[test]
fn rms_norm_agrees_with_the_reference_within_rounding() {
    for cx in contexts() {
        for case @ RowsCase { n, width, size } in cases::rows_cases() {
            let draw = &mut SplitMix64::new(width as u64);
            let (x, weight) = (draw.values(size, n * width), draw.values(Size::Unit, width));
            let mut y = vec![f32::NAN; x.len()];
            ops::rms_norm(&cx, &x, &weight, 1e-5, &mut y);
            let want = reference::rms_norm::rms_norm(&x, &weight, 1e-5);
            let what = format!("{} {case:?}", name(&cx));
            assert_close(&y, &want, |_, want| cases::rms_norm_tolerance(width, want), &what);

            let mut in_place = x.clone();
            ops::rms_norm_in_place(&cx, &mut in_place, &weight, 1e-5);
            assert_same_bits(&in_place, &y, &what);
            let mut alone = vec![f32::NAN; x.len()];
            for (x, y) in x.chunks_exact(width).zip(alone.chunks_exact_mut(width)) {
                ops::rms_norm(&cx, x, &weight, 1e-5, y);
            }
            assert_same_bits(&y, &alone, &what);
        }
    }
}

#[test]
fn angles_agree_with_the_reference_at_large_positions() {
    for (d_head, theta) in [(64, 1e4), (128, 1e6), (80, 5e5), (2, 1e4)] {
        let positions = [0, 1, 2, 100, 511, 8191, 131_071, -1, -700];
        let n = positions.len() * d_head / 2;
        let (mut cos, mut sin) = (vec![f32::NAN; n], vec![f32::NAN; n]);
        RopeTable::new(d_head, theta).angles(&positions, &mut cos, &mut sin);
        let want = reference::rope::angles(d_head, theta, &positions);
        let of = |f: fn(f64) -> f64| want.iter().map(|&angle| f(angle)).collect::<Vec<f64>>();
        let tolerance = |i: usize, _| cases::angle_tolerance(theta, want[i]);
        assert_close(&cos, &of(f64::cos), tolerance, "cos");
        assert_close(&sin, &of(f64::sin), tolerance, "sin");
    }
}

#[test]
fn rope_agrees_with_the_reference_within_rounding() {
    for cx in contexts() {
        for case in cases::rope_cases() {
            let (half, row_len) = (case.widths.d_rope / 2, case.n_heads * case.widths.d_head);
            let x = SplitMix64::new(5).values(Size::Outliers, case.n * row_len);
            let positions: Vec<i32> = (0..case.n as i32).map(|i| i * 37 + 1).collect();
            let (mut cos, mut sin) = (vec![0.0; case.n * half], vec![0.0; case.n * half]);
            RopeTable::new(case.widths.d_rope, 1e4).angles(&positions, &mut cos, &mut sin);
            let mut y = x.clone();
            ops::rope(&cx, &mut y, case.widths, &cos, &sin);
            let what = format!("{} {case:?}", name(&cx));
            if case.n > 0 {
                let want = reference::rope::rope(&x, case.widths, &cos, &sin);
                let sizes: Vec<f32> = x.iter().map(|x| x.abs()).collect();
                // |a cos| + |b sin|: a rotation of absolute values with the sign that adds them.
                let add = |s: &[f32], sign: f32| s.iter().map(|s| s.abs() * sign).collect::<Vec<f32>>();
                let low = reference::rope::rope(&sizes, case.widths, &add(&cos, 1.0), &add(&sin, -1.0));
                let high = reference::rope::rope(&sizes, case.widths, &add(&cos, 1.0), &add(&sin, 1.0));
                let products = |i: usize| if i % case.widths.d_head < half { low[i] } else { high[i] };
                assert_close(&y, &want, |i, _| cases::rope_tolerance(products(i)), &what);
            }
            let mut alone = x.clone();
            let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
            for (x, (cos, sin)) in alone.chunks_exact_mut(row_len).zip(angles) {
                ops::rope(&cx, x, case.widths, cos, sin);
            }
            assert_same_bits(&y, &alone, &what);
        }
    }
}

/// `linear_gated` of given numbers `[n, d_ff]`: row t of the inputs selects the weights of columns 2t (gates) and 2t +
/// 1 (ups), and its product with them is exact.
fn gated(cx: &mut OpContext, function: Gate, d_ff: usize, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let n = gate.len() / d_ff;
    let k = 2 * n.max(1);
    let row = |i: usize| {
        let numbers = ops::gate_up_row(d_ff, i).map(|(is_up, f)| (is_up, if is_up { up } else { gate }, f));
        (0..k).flat_map(move |c| {
            let number = numbers.filter(|(is_up, ..)| usize::from(*is_up) == c % 2 && c / 2 < n);
            number.map_or(0.0, |(_, numbers, f)| numbers[c / 2 * d_ff + f]).to_le_bytes()
        })
    };
    let bytes: Vec<u8> = (0..ops::gate_up_rows(d_ff)).flat_map(row).collect();
    let stored = |i: usize| RowView { dtype: DType::F32, bytes: &bytes[i * 4 * k..(i + 1) * 4 * k] };
    let n_rows = ops::gate_up_rows(d_ff);
    let weight = PackedMatrix::pack(&cx.pool, PackedFormat::F32, n_rows, k, &stored).expect("memory");
    let x: Vec<f32> = (0..n * k).map(|i| if i % k / 2 == i / k { 1.0 } else { 0.0 }).collect();
    let mut y = vec![f32::NAN; gate.len()];
    let part = ops::GatedPart { gate_up: &weight, bias: None, gate: function };
    ops::linear_gated(cx, &x, part, &mut y);
    y
}

#[test]
fn gate_up_rows_have_each_row_of_both_once() {
    for d_ff in cases::swiglu_widths() {
        let rows: Vec<_> = (0..ops::gate_up_rows(d_ff)).filter_map(|n| ops::gate_up_row(d_ff, n)).collect();
        let sorted: std::collections::BTreeSet<_> = rows.iter().copied().collect();
        let both = [false, true].into_iter().flat_map(|is_up| (0..d_ff).map(move |row| (is_up, row)));
        assert!(rows.len() == 2 * d_ff && sorted.into_iter().eq(both), "d_ff {d_ff}");
    }
}

#[test]
fn swiglu_agrees_with_the_reference_within_rounding() {
    for mut cx in contexts() {
        for d_ff in cases::swiglu_widths() {
            for (n, size) in
                [(3, Size::Unit), (1, Size::Huge), (2, Size::Tiny), (0, Size::Unit), (17, Size::Outliers)]
            {
                let draw = &mut SplitMix64::new(d_ff as u64);
                let (gate, up) = (draw.values(size, n * d_ff), draw.values(size, n * d_ff));
                assert_swiglu(&mut cx, d_ff, &gate, &up);
            }
        }
    }
}

/// Every gate from -130 to 130 in steps of 1/64: the exponential over its whole range.
#[test]
fn swiglu_is_accurate_for_every_gate() {
    for mut cx in contexts() {
        let gate: Vec<f32> = (-130 * 64..130 * 64).map(|i| i as f32 / 64.0).collect();
        assert_swiglu(&mut cx, gate.len(), &gate, &vec![1.0; gate.len()]);
    }
}

fn assert_swiglu(cx: &mut OpContext, d_ff: usize, gate: &[f32], up: &[f32]) {
    let y = gated(cx, Gate::Silu, d_ff, gate, up);
    let want = reference::swiglu::swiglu(gate, up);
    let what = format!("{} {d_ff}", name(cx));
    assert_close(&y, &want, |i, want| cases::swiglu_tolerance(f64::from(up[i]), want), &what);
    for ((gate, up), y) in gate.chunks_exact(d_ff).zip(up.chunks_exact(d_ff)).zip(y.chunks_exact(d_ff)) {
        let alone = gated(cx, Gate::Silu, d_ff, gate, up);
        assert_same_bits(y, &alone, &what);
    }
}

/// Gates and ups from far below the bounds to far above them, the bounds themselves, and NaN.
#[test]
fn clamped_swiglu_agrees_with_the_reference_within_rounding() {
    for mut cx in contexts() {
        for (limit, alpha) in [(7.0, 1.702), (0.5, 3.0)] {
            let clamp = ClampedSilu { limit, alpha };
            let mut gate: Vec<f32> = (-60 * 64..20 * 64).map(|i| i as f32 / 64.0).collect();
            gate.extend([limit, -limit, f32::INFINITY, 1e30, -1e30, 1e-30, 0.0]);
            let mut up: Vec<f32> = SplitMix64::new(4).values(Size::Unit, gate.len());
            up.iter_mut().for_each(|up| *up *= 2.0 * limit);
            let of = Gate::ClampedSilu(clamp);
            let y = gated(&mut cx, of, gate.len(), &gate, &up);
            let want = reference::clamped_swiglu::clamped_swiglu(&gate, &up, clamp);
            let bound = |i: usize, want| cases::clamped_swiglu_tolerance(clamp, gate[i], want);
            assert_close(&y, &want, bound, &name(&cx));
            for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
                assert!(gated(&mut cx, of, 1, &[gate], &[up])[0].is_nan(), "{}", name(&cx));
            }
        }
    }
}

#[test]
fn geglu_agrees_with_the_reference_within_rounding() {
    for mut cx in contexts() {
        // Every gate from -13 to 13 in steps of 1/512, and larger ones.
        let mut gate: Vec<f32> = (-13 * 512..13 * 512).map(|i| i as f32 / 512.0).collect();
        gate.extend([-0.0, 1e-30, -1e-30, 100.0, -100.0, 1e15, -1e15, f32::MAX, f32::MIN]);
        let up = SplitMix64::new(4).values(Size::Unit, gate.len());
        let y = gated(&mut cx, Gate::GeluTanh, gate.len(), &gate, &up);
        let want = reference::geglu::geglu(&gate, &up);
        let bound = |i: usize, want| cases::geglu_tolerance(gate[i], up[i], want);
        assert_close(&y, &want, bound, &name(&cx));
        for (i, y) in y.iter().enumerate().step_by(97) {
            let alone = gated(&mut cx, Gate::GeluTanh, 1, &gate[i..=i], &up[i..=i]);
            assert_same_bits(&alone, std::slice::from_ref(y), "alone");
        }
    }
}

#[test]
fn gelu_columns_agree_with_the_reference_within_rounding() {
    for cx in contexts() {
        for (n, width, first, row_len) in [(1, 1, 0, 1), (3, 8, 16, 40), (5, 17, 3, 23), (90, 256, 256, 768)]
        {
            let draw = &mut SplitMix64::new(width as u64);
            let mut gate = draw.values(Size::Unit, n * width);
            gate.iter_mut().for_each(|gate| *gate *= 12.0);
            let x = draw.values(Size::Unit, n * row_len);
            let mut y = gate.clone();
            ops::gelu_columns(&cx, &mut y, width, Columns { x: &x, row_len, first });
            let want = reference::gelu_columns::gelu_columns(&gate, width, &x, first);
            let up = |i: usize| x[i / width * row_len + first + i % width];
            let bound = |i: usize, want| cases::geglu_tolerance(gate[i], up(i), want);
            assert_close(&y, &want, bound, &name(&cx));
            let (row, last) = (&mut gate[(n - 1) * width..].to_vec(), &x[(n - 1) * row_len..]);
            ops::gelu_columns(&cx, row, width, Columns { x: last, row_len, first });
            assert_same_bits(row, &y[(n - 1) * width..], "alone");
        }
        ops::gelu_columns(&cx, &mut [], 4, Columns { x: &[], row_len: 8, first: 4 });
    }
}

#[test]
fn soft_cap_agrees_with_the_reference_within_rounding() {
    for cx in contexts() {
        for (cap, size) in [(50.0, Size::Outliers), (2.0, Size::Unit), (30.0, Size::Huge), (1.0, Size::Tiny)]
        {
            let mut x = SplitMix64::new(9).values(size, 40_003);
            x.extend((-2000..2000).map(|i| i as f32 / 100.0));
            let want = reference::soft_cap::soft_cap(&x, cap);
            let mut y = x.clone();
            ops::soft_cap(&cx, &mut y, cap);
            assert_close(&y, &want, |_, want| cases::soft_cap_tolerance(want), &name(&cx));
            let mut alone = x.clone();
            alone.chunks_mut(7).for_each(|x| ops::soft_cap(&cx, x, cap));
            assert_same_bits(&y, &alone, &name(&cx));
        }
    }
}

#[test]
fn scale_and_add_round_once() {
    for cx in contexts() {
        for n in [0, 1, 17, 40_001] {
            let draw = &mut SplitMix64::new(n as u64);
            let (x, y) = (draw.values(Size::Outliers, n), draw.values(Size::Unit, n));
            let rounded = |want: Vec<f64>| want.into_iter().map(|y| y as f32).collect::<Vec<f32>>();
            let mut scaled = x.clone();
            ops::scale(&cx, &mut scaled, 0.3);
            assert_same_bits(&scaled, &rounded(reference::scale::scale(&x, 0.3)), &name(&cx));
            let mut scaled = x.clone();
            ops::scale_rows(&cx, &mut scaled, &y);
            let one_by_one = if n == 0 { vec![] } else { reference::scale_rows::scale_rows(&x, &y) };
            assert_same_bits(&scaled, &rounded(one_by_one), &name(&cx));
            let mut sum = x.clone();
            ops::add(&cx, &mut sum, &y);
            assert_same_bits(&sum, &rounded(reference::add::add(&x, &y)), &name(&cx));
        }
    }
}

#[test]
fn scale_rows_gives_each_row_its_own_factor() {
    for cx in contexts() {
        for (n, width) in [(1, 64), (3, 17), (129, 576)] {
            let draw = &mut SplitMix64::new(width as u64);
            let (x, factors) = (draw.values(Size::Outliers, n * width), draw.values(Size::Unit, n));
            let mut scaled = x.clone();
            ops::scale_rows(&cx, &mut scaled, &factors);
            let want = reference::scale_rows::scale_rows(&x, &factors);
            let want: Vec<f32> = want.into_iter().map(|y| y as f32).collect();
            assert_same_bits(&scaled, &want, &name(&cx));
        }
    }
}

#[test]
fn gathered_rows_are_scattered_back_with_their_weights() {
    for cx in contexts() {
        for (n, width) in [(1, 1), (9, 5), (50, 576)] {
            let draw = &mut SplitMix64::new(width as u64);
            let x = draw.values(Size::Outliers, n * width);
            let rows: Vec<u32> = draw.order(n)[..n.div_ceil(2)].iter().map(|&row| row as u32).collect();
            let mut out = vec![f32::NAN; rows.len() * width];
            ops::gather(&cx, &x, width, &rows, &mut out);
            assert_same_bits(&out, &reference::gather::gather(&x, width, &rows), &name(&cx));
            let (mut y, weights) = (draw.values(Size::Unit, n * width), draw.values(Size::Unit, rows.len()));
            let want = reference::scatter_add::scatter_add(&y, width, &rows, &weights, &out);
            let sizes = y.iter().map(|y| y.abs()).collect::<Vec<f32>>();
            let all = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<f32>>();
            let sizes = reference::scatter_add::scatter_add(&sizes, width, &rows, &all(&weights), &all(&out));
            ops::scatter_add(&mut y, width, &rows, &weights, &out);
            // The product and the sum round once each.
            assert_close(&y, &want, |i, _| 2.0 * cases::ROUNDING * sizes[i], &name(&cx));
        }
    }
}

#[test]
fn routes_agree_with_the_reference() {
    let mut routes = ops::Routes::default();
    for (n_experts, n_used) in [(1, 1), (2, 1), (5, 2), (8, 8), (128, 8)] {
        let mut logits = SplitMix64::new(n_experts as u64).values(Size::Unit, 30 * n_experts);
        logits.iter_mut().for_each(|x| *x *= 9.0);
        // Ties: the lower number wins.
        logits[n_experts..2 * n_experts].fill(1.5);
        let bias = SplitMix64::new(7).values(Size::Unit, n_experts);
        let factors: Vec<f32> = bias.iter().map(|x| 0.5 + x.abs()).collect();
        let softmax = Routing {
            n_experts,
            n_used,
            sigmoid: false,
            bias: None,
            normalize: false,
            scale: 1.0,
            expert_scale: None,
        };
        let sigmoid = Routing { sigmoid: true, scale: 2.5, ..softmax };
        for routing in [
            softmax,
            Routing { normalize: true, ..softmax },
            Routing { normalize: true, expert_scale: Some(&factors), ..softmax },
            sigmoid,
            Routing { normalize: true, ..sigmoid },
            Routing { bias: Some(&bias), ..sigmoid },
            Routing { bias: Some(&bias), normalize: true, ..sigmoid },
        ] {
            ops::route(&logits, routing, &mut routes);
            let want = reference::route::route(&logits, routing);
            let mut got = vec![Vec::new(); 30];
            for group in routes.groups() {
                for i in group.rows.clone() {
                    got[routes.rows()[i] as usize].push((group.expert, routes.weights()[i]));
                }
            }
            for (got, want) in got.iter().zip(&want) {
                let numbers = |chosen: &Vec<(usize, f32)>| chosen.iter().map(|&(e, _)| e).collect::<Vec<_>>();
                assert_eq!(numbers(got), want.iter().map(|&(e, _)| e).collect::<Vec<_>>());
                for ((_, got), (_, want)) in got.iter().zip(want) {
                    let bound = cases::route_tolerance(n_experts, *want);
                    assert!((f64::from(*got) - want).abs() <= bound, "{got} for {want}");
                }
            }
        }
    }
    // NaN is chosen last.
    let plain = Routing {
        n_experts: 3,
        n_used: 2,
        sigmoid: false,
        bias: None,
        normalize: true,
        scale: 1.0,
        expert_scale: None,
    };
    ops::route(&[f32::NAN, -1.0, 2.0], plain, &mut routes);
    assert_eq!(routes.groups().iter().map(|group| group.expert).collect::<Vec<_>>(), [1, 2]);
    // The bias chooses, but does not weigh.
    let biased =
        Routing { n_used: 1, sigmoid: true, bias: Some(&[1.0, 0.0, 0.0]), normalize: false, ..plain };
    ops::route(&[0.0, -1.0, 2.0], biased, &mut routes);
    assert_eq!((routes.groups()[0].expert, routes.rows(), routes.weights()), (0, &[0][..], &[0.5][..]));
}

/// Non-finite numbers remain non-finite and affect only their row.
#[test]
fn non_finite_numbers_are_propagated() {
    for mut cx in contexts() {
        let mut x = vec![1.0; 3 * 40];
        x[45] = f32::NAN;
        let mut y = vec![0.0; x.len()];
        ops::rms_norm(&cx, &x, &[1.0; 40], 1e-5, &mut y);
        let nan: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
        assert!(
            nan[40..80].iter().all(|&nan| nan) && !nan[..40].contains(&true) && !nan[80..].contains(&true)
        );

        let gate = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY];
        let up = [1.0, 1.0, 1.0, f32::NAN, 0.0];
        let y = gated(&mut cx, Gate::Silu, 5, &gate, &up);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY && y[2..].iter().all(|y| y.is_nan()), "{y:?}");
    }
}

#[test]
fn argmax_agrees_with_the_reference() {
    for logits in cases::argmax_cases() {
        let what = format!("{} logits", logits.len());
        let want = reference::argmax::argmax(&logits);
        assert_eq!(ops::argmax(&logits), want, "{what}");
        let finite = logits.iter().all(|x| x.is_finite());
        assert_eq!(ops::argmax_finite(&logits), finite.then_some(want), "{what}");
    }
}

#[test]
fn layer_norm_agrees_with_the_reference_within_rounding() {
    for cx in contexts() {
        for case @ RowsCase { n, width, size } in cases::rows_cases() {
            let draw = &mut SplitMix64::new(width as u64);
            let (x, weight) = (draw.values(size, n * width), draw.values(Size::Unit, width));
            let bias = draw.values(Size::Unit, width);
            let tolerances: Vec<_> =
                x.chunks(width).map(|row| cases::layer_norm_tolerance(row, 1e-5)).collect();
            for bias in [None, Some(&bias[..])] {
                let norm = LayerNorm { weight: &weight, bias, eps: 1e-5 };
                let mut y = x.clone();
                ops::layer_norm(&cx, &mut y, norm);
                let want = reference::layer_norm::layer_norm(&x, &weight, bias, 1e-5);
                let what = format!("{} {case:?}", name(&cx));
                assert_close(&y, &want, |i, want| tolerances[i / width](want), &what);
                let mut alone = x.clone();
                alone.chunks_mut(width).for_each(|row| ops::layer_norm(&cx, row, norm));
                assert_same_bits(&y, &alone, &what);
            }
        }
    }
}

#[test]
fn gelu_agrees_with_the_reference_within_rounding() {
    for mut cx in contexts() {
        // Every number from -13 to 13 in steps of 1/512, and larger ones.
        let mut x: Vec<f32> = (-13 * 512..13 * 512).map(|i| i as f32 / 512.0).collect();
        x.extend([-0.0, 1e-30, -1e-30, 100.0, -100.0, 1e15, -1e15, f32::MAX, f32::MIN]);
        let want = reference::gelu::gelu(&x);
        let mut y = x.clone();
        ops::gelu(&cx, &mut y);
        assert_close(&y, &want, |_, want| cases::gelu_tolerance(want), &name(&cx));
        let mut alone = x.clone();
        alone.chunks_mut(7).for_each(|x| ops::gelu(&cx, x));
        assert_same_bits(&y, &alone, &name(&cx));
        let gated = gated(&mut cx, Gate::Gelu, x.len(), &x, &vec![1.0; x.len()]);
        assert_same_bits(&gated, &y, &name(&cx));
        let mut special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        ops::gelu(&cx, &mut special);
        assert!(special[0].is_nan() && special[1] == f32::INFINITY && special[2] == 0.0, "{special:?}");
    }
}
