//! Ops on KV cells of every type, on every instruction set of the machine: storing, and rotating keys.

use crate::parity::{assert_close, contexts, name};
use llaisys_core::dtype::KvDType;
use llaisys_core::ops::cases::{self, Size, SplitMix64};
use llaisys_core::ops::{self, HeadWidths, RopeTable, reference};
use llaisys_core::tensor::{AlignedBuf, KvLayerMut};

/// K and V of 700 cells, written by `kv_store`. All other cells are NaN.
struct Tensors {
    dtype: KvDType,
    heads: (usize, usize),
    k: AlignedBuf,
    v: AlignedBuf,
}

impl Tensors {
    const N_CELLS: usize = 700;

    fn new(dtype: KvDType, heads: (usize, usize)) -> Self {
        let n_bytes = Self::N_CELLS * heads.0 * dtype.head_bytes(heads.1);
        let nan = || {
            let mut tensor = AlignedBuf::zeroed("test", n_bytes).expect("memory for the test");
            tensor.as_mut_slice::<u8>().fill(0xff);
            tensor
        };
        Self { dtype, heads, k: nan(), v: nan() }
    }

    fn layer(&mut self) -> KvLayerMut<'_> {
        let (n_kv_heads, d_head) = self.heads;
        KvLayerMut { dtype: self.dtype, n_kv_heads, d_head, k: &mut self.k, v: &mut self.v }
    }

    fn numbers(&self, tensor: &AlignedBuf) -> Vec<f32> {
        let heads = tensor.as_slice::<u8>().chunks(self.dtype.head_bytes(self.heads.1));
        heads.flat_map(|head| reference::kv_store::decode(self.dtype, head)).collect()
    }
}

#[test]
fn kv_store_writes_the_named_cells_and_no_others() {
    for cx in contexts() {
        for dtype in KvDType::ALL {
            for (n, heads) in [
                (0, (1, 2)),
                (1, (1, 2)),
                (3, (2, 10)),
                (7, (3, 64)),
                (300, (3, 34)),
                (129, (2, 128)),
                (90, (9, 16)),
            ] {
                let width = heads.0 * heads.1;
                let draw = &mut SplitMix64::new(n as u64);
                let cells: Vec<u32> =
                    draw.order(Tensors::N_CELLS)[..n].iter().map(|&cell| cell as u32).collect();
                let mut k = draw.values(Size::Outliers, n * width);
                let v = draw.values(Size::Tiny, n * width);
                let odd =
                    [f32::NAN, f32::INFINITY, -0.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX, 1e-42];
                let n_odd = odd.len().min(k.len());
                k[..n_odd].copy_from_slice(&odd[..n_odd]);
                let mut tensors = Tensors::new(dtype, heads);
                ops::kv_store(&cx, tensors.layer(), &cells, &k, &v);
                for (tensor, rows) in [(&tensors.k, &k), (&tensors.v, &v)] {
                    let mut want = vec![f32::NAN; Tensors::N_CELLS * width];
                    if n > 0 {
                        reference::kv_store::kv_store(dtype, heads.1, &mut want, &cells, rows);
                    }
                    let same = |(got, want): (&f32, &f32)| {
                        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
                    };
                    let got = tensors.numbers(tensor);
                    assert!(got.iter().zip(&want).all(same), "{} {dtype:?} {n} {heads:?}", name(&cx));
                }
            }
        }
    }
}

#[test]
fn shifted_keys_equal_keys_of_the_new_positions() {
    // Relative to the largest number of a head. Int8: half a scale, which grows by sqrt 2 at most with the rotation.
    let steps = [cases::ROUNDING, 1.0 / 2048.0, 1.0 / 512.0, 2.0_f64.sqrt() / 254.0];
    for cx in contexts() {
        for (dtype, step) in KvDType::ALL.into_iter().zip(steps) {
            let shapes = [(1, 2), (2, 24), (3, 64), (2, 80), (1, 256)].map(|heads| (heads, heads.1));
            // Heads that are rotated in part.
            for (heads, d_rope) in shapes.into_iter().chain([((2, 24), 18), ((3, 64), 32), ((1, 34), 2)]) {
                let (width, half) = (heads.0 * heads.1, d_rope / 2);
                let widths = HeadWidths { d_head: heads.1, d_rope };
                let table = RopeTable::new(d_rope, 1e4);
                let raw = SplitMix64::new(23).values(Size::Unit, 5 * width);
                let key_at = |positions: [i32; 5]| {
                    let (mut cos, mut sin) = (vec![0.0; 5 * half], vec![0.0; 5 * half]);
                    table.angles(&positions, &mut cos, &mut sin);
                    let mut k = raw.clone();
                    ops::rope(&cx, &mut k, widths, &cos, &sin);
                    k
                };
                let mut tensors = Tensors::new(dtype, heads);
                let cells = [7, 3, 600, 4, 5];
                let before = key_at([0, 5, 90, 1000, 1001]);
                ops::kv_store(&cx, tensors.layer(), &cells, &before, &before);
                ops::rope_shift(&cx, tensors.layer(), &cells[..4], -90, &table);
                let want = key_at([-90, -85, 0, 910, 1001]);
                let got = tensors.numbers(&tensors.k);
                for (i, cell) in cells.into_iter().enumerate() {
                    let got = &got[cell as usize * width..][..width];
                    let want: Vec<f64> = want[i * width..][..width].iter().map(|&k| f64::from(k)).collect();
                    // Numbers are below 1.5 and are rounded to storage before and after the shift (the first error is
                    // rotated with its pair). Three angles of up to 1000 have an error of 14 roundings.
                    let bound = 1.5 * (2.5 * step + 3.0 * 1000.0 * 14.0 * cases::ROUNDING);
                    assert_close(got, &want, |_, _| bound, &format!("{} {dtype:?} {heads:?}", name(&cx)));
                }
                let values = tensors.numbers(&tensors.v);
                let kept = reference::kv_store::stored(dtype, heads.1, &before[..width]);
                assert_eq!(values[7 * width..8 * width], kept, "values stay");
            }
        }
    }
}

/// The error bound of int8 cells for every head, on every instruction set: half a scale, which is a 127th of the
/// largest number. A head with a non-finite number becomes NaN.
#[test]
fn int8_cells_have_an_error_of_half_a_scale() {
    for cx in contexts() {
        for (heads, size) in
            [((3, 64), Size::Unit), ((1, 34), Size::Outliers), ((2, 256), Size::Tiny), ((2, 16), Size::Huge)]
        {
            let width = heads.0 * heads.1;
            let mut k = SplitMix64::new(5).values(size, 9 * width);
            k[4 * width] = f32::NEG_INFINITY;
            let v = vec![0.0; k.len()];
            let mut tensors = Tensors::new(KvDType::Int8, heads);
            let cells: Vec<u32> = (100..109).collect();
            ops::kv_store(&cx, tensors.layer(), &cells, &k, &v);
            let got = &tensors.numbers(&tensors.k)[100 * width..];
            for (i, (k, got)) in k.chunks(heads.1).zip(got.chunks(heads.1)).enumerate() {
                if i == 4 * heads.0 {
                    assert!(got.iter().all(|x| x.is_nan()), "{}", name(&cx));
                    continue;
                }
                let largest = k.iter().fold(0.0, |most: f64, &x| most.max(f64::from(x).abs()));
                // The division and the product round too.
                let bound = largest / 254.0 * (1.0 + 1e-4);
                let k: Vec<f64> = k.iter().map(|&x| f64::from(x)).collect();
                assert_close(got, &k, |_, _| bound, &format!("{} {heads:?} {size:?}", name(&cx)));
            }
            assert!(tensors.numbers(&tensors.v)[100 * width..109 * width].iter().all(|&x| x == 0.0));
        }
    }
}

#[test]
fn scaled_tables_rotate_by_their_frequencies_and_shifts_keep_the_amplitude() {
    let plain = RopeTable::new(8, 1e4);
    let table = plain.clone().scaled(1.5, |i, f| if i == 1 { f / 4.0 } else { f });
    let angles = |table: &RopeTable, position: i32| {
        let (mut cos, mut sin) = ([0.0; 4], [0.0; 4]);
        table.angles(&[position], &mut cos, &mut sin);
        (cos, sin)
    };
    let ((plain_cos, plain_sin), (cos, sin)) = (angles(&plain, 100), angles(&table, 100));
    let slower = angles(&plain, 25);
    for i in 0..4 {
        let (want_cos, want_sin) =
            if i == 1 { (slower.0[1], slower.1[1]) } else { (plain_cos[i], plain_sin[i]) };
        assert_eq!((cos[i], sin[i]), (1.5 * want_cos, 1.5 * want_sin), "pair {i}");
    }
    for cx in contexts() {
        let raw = SplitMix64::new(2).values(Size::Unit, 8);
        let key_at = |position: i32| {
            let (cos, sin) = angles(&table, position);
            let mut k = raw.clone();
            ops::rope(&cx, &mut k, HeadWidths::whole(8), &cos, &sin);
            k
        };
        let mut tensors = Tensors::new(KvDType::Float32, (1, 8));
        let before = key_at(70);
        ops::kv_store(&cx, tensors.layer(), &[3], &before, &before);
        ops::rope_shift(&cx, tensors.layer(), &[3], -30, &table);
        let want: Vec<f64> = key_at(40).into_iter().map(f64::from).collect();
        // As in the test above, with numbers below 1.5 * 1.5.
        let bound = 2.3 * (2.5 + 3.0 * 100.0 * 14.0) * cases::ROUNDING;
        assert_close(&tensors.numbers(&tensors.k)[24..32], &want, |_, _| bound, &name(&cx));
    }
}
