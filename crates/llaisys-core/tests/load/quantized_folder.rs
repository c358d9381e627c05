//! GPTQ and AWQ folders: integers, zero points and scales are read correctly, and inconsistent folders are rejected.

use crate::model_files::folder::{DOWN as MODULE, Folder, Tensor};
use crate::model_files::{TempFolder, assert_names, bytes_of, damaged, format_error, unsupported};
use crate::stored::Rng;
use half::f16;
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::dtype::DType;
use llaisys_core::error::FormatError;
use llaisys_core::error::{Error, Result};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::quant::dequantize_row;
use llaisys_core::threads::Pool;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

/// Outputs and inputs of the quantized matrix.
const N: usize = 16;
const K: usize = 128;
const WEIGHT: WeightId = WeightId::Layer(0, LayerWeight::Down);

/// The integers, zero points and scales of a matrix.
struct Quants {
    group_size: usize,
    /// `[N][K]`.
    q: Vec<u8>,
    /// `[N][groups]`.
    zeros: Vec<u8>,
    /// `[N][groups]`.
    scales: Vec<f16>,
}

impl Quants {
    fn random(seed: u64, group_size: usize, symmetric: bool) -> Self {
        let rng = &mut Rng(seed);
        let n_groups = N * K.div_ceil(group_size);
        let mut nibbles = |n: usize| (0..n).map(|_| rng.bits() as u8 & 15).collect::<Vec<u8>>();
        let (q, mut zeros) = (nibbles(N * K), nibbles(n_groups));
        if symmetric {
            zeros.fill(8);
        }
        let scales = rng.units(n_groups).into_iter().map(f16::from_f32).collect();
        Self { group_size, q, zeros, scales }
    }

    fn n_groups(&self) -> usize {
        K.div_ceil(self.group_size)
    }

    fn values(&self) -> Vec<f32> {
        let value = |i: usize| {
            let group = i / K * self.n_groups() + i % K / self.group_size;
            self.scales[group].to_f32() * (f32::from(self.q[i]) - f32::from(self.zeros[group]))
        };
        (0..N * K).map(value).collect()
    }

    /// `[groups, N]`.
    fn stored_scales(&self) -> Vec<u8> {
        let of = |i: usize| self.scales[i % N * self.n_groups() + i / N].to_le_bytes();
        (0..self.scales.len()).flat_map(of).collect()
    }
}

/// Words whose integer `i`, counted from the lowest bits, is `of(word, i)`.
fn words(n: usize, of: impl Fn(usize, usize) -> u8) -> Vec<u32> {
    (0..n).map(|word| (0..8).map(|i| u32::from(of(word, i)) << (4 * i)).sum()).collect()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn push(folder: &mut Folder, part: &str, dtype: &'static str, shape: &[usize], data: Vec<u8>) {
    folder.tensors.push(Tensor { name: format!("{MODULE}.{part}"), dtype, shape: shape.to_vec(), data });
}

fn stated(group_size: usize) -> i64 {
    if group_size == K { -1 } else { group_size as i64 }
}

fn gptq(quants: &Quants, format: &str) -> Folder {
    let config = json!({"quant_method": "gptq", "bits": 4, "group_size": stated(quants.group_size),
        "desc_act": false, "checkpoint_format": format});
    let mut folder = Folder::without_down(K, config);
    let (g, less) = (quants.n_groups(), if format == "gptq" { 0x1111_1111 } else { 0 });
    let q = words(K / 8 * N, |word, i| quants.q[word % N * K + word / N * 8 + i]);
    let zeros = words(g * N / 8, |word, i| quants.zeros[(word % (N / 8) * 8 + i) * g + word / (N / 8)]);
    let zeros: Vec<u32> = zeros.into_iter().map(|word| word.wrapping_sub(less)).collect();
    let g_idx: Vec<u32> = (0..K).map(|k| (k / quants.group_size) as u32).collect();
    push(&mut folder, "qweight", "I32", &[K / 8, N], bytes(&q));
    push(&mut folder, "qzeros", "I32", &[g, N / 8], bytes(&zeros));
    push(&mut folder, "scales", "F16", &[g, N], quants.stored_scales());
    push(&mut folder, "g_idx", "I32", &[K], bytes(&g_idx));
    folder
}

fn awq(quants: &Quants) -> Folder {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let config = json!({"quant_method": "awq", "bits": 4, "group_size": stated(quants.group_size),
        "zero_point": true, "version": "GEMM"});
    let mut folder = Folder::without_down(K, config);
    let g = quants.n_groups();
    let output = |word: usize, i: usize| word % (N / 8) * 8 + ORDER[i];
    let q = words(K * N / 8, |word, i| quants.q[output(word, i) * K + word / (N / 8)]);
    let zeros = words(g * N / 8, |word, i| quants.zeros[output(word, i) * g + word / (N / 8)]);
    push(&mut folder, "qweight", "I32", &[K, N / 8], bytes(&q));
    push(&mut folder, "qzeros", "I32", &[g, N / 8], bytes(&zeros));
    push(&mut folder, "scales", "F16", &[g, N], quants.stored_scales());
    folder
}

fn assert_loads(folder: &Folder, quants: &Quants, dtype: DType, what: &str) {
    let scratch = TempFolder::new();
    folder.write(&scratch);
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    assert!(checkpoint.tensor(WEIGHT).is_none(), "{what}");
    assert_eq!(checkpoint.weight_id(&format!("{MODULE}.weight")), Some(WEIGHT));
    let want = quants.values();
    // All rows, and some of them.
    for rows in [0..N, 3..N - 2] {
        let mut buffer = Vec::new();
        let loaded = checkpoint.read(WEIGHT, rows.clone(), &mut buffer, &Pool::new(2).unwrap()).unwrap();
        assert_eq!((loaded.dtype, loaded.shape), (dtype, [rows.len(), K]), "{what}");
        for (i, n) in rows.enumerate() {
            let mut row = vec![f32::NAN; K];
            dequantize_row(loaded.view().row(i), &mut row);
            assert_eq!(row, want[n * K..(n + 1) * K], "{what}, row {n}");
        }
    }
}

#[test]
fn integers_zero_points_and_scales_are_read_from_their_layouts() {
    for group_size in [32, 64, 96, K] {
        for symmetric in [false, true] {
            let quants = Quants::random(group_size as u64, group_size, symmetric);
            let dtype = if symmetric { DType::Q4_0 } else { DType::Int4 };
            for (folder, method) in [
                (gptq(&quants, "gptq"), "gptq"),
                (gptq(&quants, "gptq_v2"), "gptq_v2"),
                (awq(&quants), "awq"),
            ] {
                assert_loads(&folder, &quants, dtype, &format!("{method} {group_size} {symmetric}"));
            }
        }
    }
}

/// Scales in bf16 and f32 cannot be stored in Q4_0's f16.
#[test]
fn scales_in_bf16_and_f32_are_exact() {
    for (dtype, n_bytes) in [("BF16", 2), ("F32", 4)] {
        let mut quants = Quants::random(1, 32, true);
        // 1/4 in each type.
        quants.scales.fill(f16::from_f32(0.25));
        let mut folder = gptq(&quants, "gptq");
        let scales = folder.tensors.iter_mut().find(|t| t.name.ends_with(".scales")).unwrap();
        let quarter = &0.25_f32.to_le_bytes()[4 - n_bytes..];
        (scales.dtype, scales.data) = (dtype, quarter.repeat(scales.data.len() / 2));
        assert_loads(&folder, &quants, DType::Int4, dtype);
    }
}

#[test]
fn bias_of_zeros_is_ignored_and_any_other_is_rejected() {
    let quants = Quants::random(2, 64, false);
    let mut folder = gptq(&quants, "gptq");
    push(&mut folder, "bias", "F16", &[N], vec![0; 2 * N]);
    assert_loads(&folder, &quants, DType::Int4, "zero bias");
    folder.tensors.last_mut().unwrap().data[5] = 1;
    let error = format_error(folder.open());
    assert!(matches!(&error, FormatError::ExtraTensors { n_extra: 1, first } if first.ends_with(".bias")));
}

#[test]
fn missing_and_inconsistent_parts_are_rejected() {
    let quants = Quants::random(3, 64, false);
    for (folder, parts) in [
        (gptq(&quants, "gptq"), &["qweight", "qzeros", "scales", "g_idx"][..]),
        (awq(&quants), &["qweight", "qzeros", "scales"]),
    ] {
        for part in parts {
            let name = format!("{MODULE}.{part}");
            let without = folder.clone().without_tensor(&name).open();
            match *part {
                "g_idx" => drop(without.unwrap()),
                // Without `qweight` the matrix is not recognized as quantized: its `.weight` is missing.
                "qweight" => assert_names(&format_error(without), &[&format!("{MODULE}.weight")]),
                _ => assert_names(&format_error(without), &[&name]),
            }

            let mut shape = folder.clone();
            let tensor = shape.tensors.iter_mut().find(|t| t.name == name).unwrap();
            tensor.shape[0] += 1;
            tensor.data.resize(tensor.data.len() / (tensor.shape[0] - 1) * tensor.shape[0], 0);
            assert_names(&format_error(shape.open()), &[&name, "shape"]);

            let mut dtype = folder.clone();
            let tensor = dtype.tensors.iter_mut().find(|t| t.name == name).unwrap();
            (tensor.dtype, tensor.data) = match tensor.dtype {
                "I32" => ("F32", tensor.data.clone()),
                _ => ("I32", tensor.data.repeat(2)),
            };
            assert_names(&unsupported(dtype.open()), &[&name, "has type"]);
        }
    }
}

/// Inputs in another order than their groups, with and without `desc_act` in the configuration.
#[test]
fn inputs_out_of_order_are_rejected_by_name() {
    let quants = Quants::random(4, 64, false);
    for group in [0, 2, u32::MAX] {
        let mut folder = gptq(&quants, "gptq");
        let g_idx = folder.tensors.last_mut().unwrap();
        g_idx.data[4 * 100..4 * 101].copy_from_slice(&group.to_le_bytes());
        assert_names(&unsupported(folder.open()), &["desc_act", &format!("{MODULE}.g_idx")]);
    }
}

#[test]
fn packed_words_are_rejected_as_weights() {
    let mut folder = gptq(&Quants::random(5, 64, false), "gptq");
    let embed = folder.tensors.iter_mut().find(|t| t.name == "model.embed_tokens.weight").unwrap();
    (embed.dtype, embed.data) = ("I32", embed.data.repeat(2));
    assert_names(&unsupported(folder.open()), &["model.embed_tokens.weight", "I32", "F32, F16, BF16"]);
}

fn opened(config: Value) -> Result<Checkpoint> {
    gptq(&Quants::random(6, 64, false), "gptq").with("quantization_config", config).open()
}

#[test]
fn other_settings_are_rejected_by_name() {
    let gptq = |key: &str, value: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 64});
        config[key] = value;
        opened(config)
    };
    gptq("sym", json!(false)).unwrap();
    gptq("dynamic", json!({})).unwrap();
    for (key, value, words) in [
        ("bits", json!(8), ["bits", "8"]),
        ("bits", json!(3), ["bits", "3"]),
        ("group_size", json!(16), ["group_size", "16"]),
        ("group_size", json!(0), ["group_size", "0"]),
        ("group_size", json!(-2), ["group_size", "-2"]),
        ("group_size", json!(i64::MIN), ["group_size", "-9223372036854775808"]),
        ("checkpoint_format", json!("marlin"), ["GPTQ format", "marlin"]),
        ("is_marlin_format", json!(true), ["GPTQ format", "marlin"]),
        ("dynamic", json!({"-:.*down.*": {}}), ["dynamic", "down"]),
    ] {
        assert_names(&unsupported(gptq(key, value)), &words);
    }
    for (key, value) in [("group_size", Value::Null), ("group_size", json!("64")), ("bits", json!("4"))] {
        assert!(matches!(gptq(key, value), Err(Error::Rejected(_))));
    }
    // Groups of another size than in the tensors, up to the largest number.
    for size in [32, 128, i64::MAX / 32 * 32] {
        assert_names(&format_error(gptq("group_size", json!(size))), &[MODULE, "shape"]);
    }
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 64});
    for (key, value, words) in [
        ("version", json!("gemv"), ["AWQ version", "gemv"]),
        ("zero_point", json!(false), ["zero_point", "false"]),
        ("w_bit", json!(3), ["bits", "3"]),
    ] {
        let mut config = awq.clone();
        config[key] = value;
        if key == "w_bit" {
            config.as_object_mut().unwrap().remove("bits");
        }
        assert_names(&unsupported(opened(config)), &words);
    }
}

#[test]
fn matrices_of_partial_words_or_blocks_are_rejected_by_name() {
    // 24 columns are not whole blocks.
    let mut folder = Folder::small("LlamaForCausalLM")
        .without_tensor(&format!("{MODULE}.weight"))
        .with("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": -1}));
    push(&mut folder, "qweight", "I32", &[3, 16], vec![0; 4 * 3 * 16]);
    assert_names(&unsupported(folder.open()), &[MODULE, "16 x 24", "multiples of 32"]);
}

/// Damages the configuration, or the header and the words after it. The folder must be rejected or load completely.
fn assert_valid_or_rejected(file: &str, changes: &[(Index, u8)]) {
    let quants = Quants::random(7, 32, false);
    for folder in [gptq(&quants, "gptq"), awq(&quants)] {
        let change =
            |front: &mut [u8]| changes.iter().for_each(|(at, byte)| front[at.index(front.len())] = *byte);
        let Some(checkpoint) = damaged(&folder, file, change) else { continue };
        for id in checkpoint.weight_ids() {
            let n_elements = checkpoint.config().shape(id).iter().product();
            let n_bytes = bytes_of(&checkpoint, id).unwrap().len();
            assert_eq!(checkpoint.dtype(id).bytes_of(n_elements), Some(n_bytes), "{id:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn damaged_folders_never_panic(
        is_config in any::<bool>(),
        // Digits, which change numbers and shapes, and any other bytes.
        changes in vec((any::<Index>(), prop_oneof![b'0'..=b'9', any::<u8>()]), 1..4),
    ) {
        assert_valid_or_rejected(if is_config { "config.json" } else { "model.safetensors" }, &changes);
    }
}
