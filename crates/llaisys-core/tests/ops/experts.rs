//! `experts` on every instruction set, compared bit for bit with its experts one after the other.

use crate::stored::{Rng, Stored, block_len};
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::{
    ExpertPart, ExpertScratch, Gate, GateBias, GatedPart, LinearPart, Mixture, OpContext, Routes, Routing,
    experts, gate_up_rows, gather, linear, linear_gated, route, scatter_add,
};
use llaisys_core::threads::Pool;

const N_EXPERTS: usize = 5;

/// The matrices and biases of one expert.
struct Expert {
    gate_up: PackedMatrix,
    down: PackedMatrix,
    /// Of gate, up and down.
    biases: [Vec<f32>; 3],
}

impl Expert {
    fn part(&self, has_bias: bool) -> ExpertPart<'_> {
        let [gate, up, down] = &self.biases;
        ExpertPart {
            gated: GatedPart {
                gate_up: &self.gate_up,
                bias: has_bias.then_some(GateBias { gate, up }),
                gate: Gate::Silu,
            },
            down: LinearPart { weight: &self.down, bias: has_bias.then_some(down) },
        }
    }
}

/// Five experts of `format`, of which a row uses two. Expert 3 is never chosen.
struct Layer {
    d_model: usize,
    d_ff: usize,
    experts: Vec<Expert>,
}

impl Layer {
    fn new(pool: &Pool, formats: [PackedFormat; 2]) -> Self {
        let rng = &mut Rng(29);
        let whole = |n: usize| n.next_multiple_of(block_len(formats[0]).max(block_len(formats[1])));
        let (d_model, d_ff) = (whole(70), whole(40));
        let expert = |i: usize| {
            let format = formats[i % 2];
            Expert {
                gate_up: Stored::of(rng, format, gate_up_rows(d_ff), d_model).pack(pool, format),
                down: Stored::of(rng, format, d_model, d_ff).pack(pool, format),
                biases: [d_ff, d_ff, d_model].map(|n| rng.units(n)),
            }
        };
        Self { d_model, d_ff, experts: (0..N_EXPERTS).map(expert).collect() }
    }

    fn routes(n: usize) -> Routes {
        let mut logits = Rng(31).units(n * N_EXPERTS);
        logits.iter_mut().skip(3).step_by(N_EXPERTS).for_each(|x| *x = -9.0);
        let (bias, expert_scale) = (None, None);
        let routing = Routing {
            n_experts: N_EXPERTS,
            n_used: 2,
            sigmoid: false,
            bias,
            normalize: true,
            scale: 1.0,
            expert_scale,
        };
        let mut routes = Routes::default();
        route(&logits, routing, &mut routes);
        routes
    }

    /// Adds the experts to `y` one after the other.
    fn one_by_one(&self, cx: &mut OpContext, x: &[f32], mixture: Mixture<'_>, y: &mut [f32]) {
        let Mixture { routes, part } = mixture;
        for group in routes.groups() {
            let ExpertPart { gated, down } = part(group.expert);
            let (n, rows) = (group.rows.len(), &routes.rows()[group.rows.clone()]);
            let mut gathered = vec![f32::NAN; n * self.d_model];
            gather(cx, x, self.d_model, rows, &mut gathered);
            let (mut inner, mut out) = (vec![f32::NAN; n * self.d_ff], gathered.clone());
            linear_gated(cx, &gathered, gated, &mut inner);
            linear(cx, &inner, &[down], &mut [&mut out]);
            scatter_add(y, self.d_model, rows, &routes.weights()[group.rows.clone()], &out);
        }
    }

    /// Memory for `n` rows: inputs and inner values.
    fn memory(&self, n: usize) -> [Vec<f32>; 2] {
        [vec![f32::NAN; n * self.d_model], vec![f32::NAN; n * self.d_ff]]
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// With one region for all experts, and with memory for a part of them at a time.
#[test]
fn experts_together_have_the_bits_of_one_after_the_other() {
    use PackedFormat::{BF16, Q4_0, Q4_1, Q6_K};
    for isa in IsaName::available() {
        for (n_threads, formats) in [(1, [Q4_0; 2]), (3, [BF16; 2]), (2, [Q4_1, Q6_K]), (2, [BF16, Q4_0])] {
            let kernels = Kernels::select(Some(isa)).unwrap();
            let mut cx = OpContext::new(kernels, Pool::new(n_threads).unwrap(), 100, 512).unwrap();
            let layer = Layer::new(&cx.pool, formats);
            for (n, has_bias) in [(1, false), (2, true), (13, true), (60, false)] {
                let (x, routes) = (Rng(37).units(n * layer.d_model), Layer::routes(n));
                assert!(routes.groups().iter().all(|group| group.expert != 3));
                let part = |i: usize| layer.experts[i].part(has_bias);
                let mixture = Mixture { routes: &routes, part: &part };
                let start = Rng(41).units(n * layer.d_model);
                let mut want = start.clone();
                layer.one_by_one(&mut cx, &x, mixture, &mut want);
                for capacity in [n, 2 * n] {
                    let mut got = start.clone();
                    let [mut gathered, mut inner] = layer.memory(capacity);
                    let scratch = ExpertScratch { gathered: &mut gathered, inner: &mut inner };
                    experts(&mut cx, &x, mixture, scratch, &mut got);
                    let what =
                        format!("{isa:?} {formats:?}, {n} rows, {n_threads} threads, memory for {capacity}");
                    assert_eq!(bits(&got), bits(&want), "{what}");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "the scratch 3")]
fn memory_for_fewer_rows_than_an_expert_has_panics() {
    let mut cx = OpContext::new(Kernels::select(None).unwrap(), Pool::new(1).unwrap(), 100, 512).unwrap();
    let layer = Layer::new(&cx.pool, [PackedFormat::F32; 2]);
    let (x, routes) = (Rng(37).units(20 * layer.d_model), Layer::routes(20));
    let part = |i: usize| layer.experts[i].part(false);
    let (mut y, [mut gathered, mut inner]) = (vec![0.0; x.len()], layer.memory(3));
    let scratch = ExpertScratch { gathered: &mut gathered, inner: &mut inner };
    experts(&mut cx, &x, Mixture { routes: &routes, part: &part }, scratch, &mut y);
}
