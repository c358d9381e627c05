//! Folders in FP8 and by compressed-tensors: every layout is read exactly, and inconsistent folders are rejected.

use crate::model_files::folder::{Folder, Tensor};
use crate::model_files::scaled::{K, MODULE, N, Numbers, Scaled, Sharing, compressed_config, fp8_config};
use crate::model_files::{assert_names, bytes_of, damaged, format_error, unsupported};
use crate::stored::Rng;
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::dtype::{ComputeMode, DType};
use llaisys_core::error::{Error, FormatError};
use llaisys_core::quant::dequantize_row;
use llaisys_core::threads::Pool;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

const WEIGHT: WeightId = WeightId::Layer(0, LayerWeight::Down);

/// A folder, its values, and the type in which the rows are read.
struct Case {
    what: String,
    folder: Folder,
    values: Vec<f32>,
    dtype: DType,
}

fn sharing_of(strategy: &str) -> Sharing {
    match strategy {
        "tensor" => Sharing::matrix(&[1]),
        "channel" => Sharing::row(&[N, 1]),
        "group" => Sharing::block(1, 64),
        _ => Sharing::block(5, 64),
    }
}

fn weights(kind: &str, bits: usize, strategy: &str, symmetric: bool) -> Value {
    let mut weights = json!({"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy,
        "group_size": null, "block_structure": null, "actorder": null, "dynamic": false});
    match strategy {
        "group" => weights["group_size"] = json!(64),
        "block" => weights["block_structure"] = json!([5, 64]),
        _ => (),
    }
    weights
}

fn fp8_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let blocks = [[128, 128], [5, 64], [1, 32], [16, 160]];
    let blocks = blocks.map(|block @ [rows, columns]| (Some(block), Sharing::block(rows, columns)));
    let whole = [&[][..], &[1], &[1, 1]].map(|shape| (None, Sharing::matrix(shape)));
    let rows = [&[N][..], &[N, 1]].map(|shape| (None, Sharing::row(shape)));
    for (block, sharing) in blocks.into_iter().chain(whole).chain(rows) {
        for (scale_type, name) in
            [("F32", "weight_scale_inv"), ("BF16", "weight_scale"), ("F16", "weight_scale")]
        {
            let rng = &mut Rng(cases.len() as u64);
            let matrix = Scaled::random(Numbers::E4M3, sharing.clone(), scale_type, || rng.bits());
            let what = format!("fp8 {sharing:?} {scale_type}");
            let folder = matrix.folder(fp8_config(block), name);
            cases.push(Case { what, folder, values: matrix.values(), dtype: DType::Fp8 });
        }
    }
    cases
}

fn compressed_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (format, numbers, kind, bits) in [
        ("float-quantized", Numbers::E4M3, "float", 8),
        ("naive-quantized", Numbers::E4M3, "float", 8),
        ("int-quantized", Numbers::Bytes, "int", 8),
        ("naive-quantized", Numbers::Bytes, "int", 8),
        ("pack-quantized", Numbers::Packed8, "int", 8),
        ("pack-quantized", Numbers::Packed4, "int", 4),
    ] {
        for strategy in ["tensor", "channel", "group", "block"] {
            for scale_type in ["F32", "BF16", "F16"] {
                for symmetric in [true, false] {
                    if !symmetric && (numbers != Numbers::Packed4 || matches!(strategy, "tensor" | "block")) {
                        continue;
                    }
                    let rng = &mut Rng(1000 + cases.len() as u64);
                    let mut matrix = Scaled::random(numbers, sharing_of(strategy), scale_type, || rng.bits());
                    if !symmetric {
                        matrix = matrix.with_zeros(|| rng.bits());
                    }
                    let dtype = match numbers {
                        Numbers::E4M3 => DType::Fp8,
                        Numbers::Bytes | Numbers::Packed8 => DType::Int8,
                        // Every scale in bf16 is also one in f16, because it is small but not tiny.
                        Numbers::Packed4 if symmetric && scale_type != "F32" => DType::Q4_0,
                        Numbers::Packed4 => DType::Int4,
                    };
                    let config = compressed_config(format, weights(kind, bits, strategy, symmetric));
                    cases.push(Case {
                        what: format!("{format} {bits} {strategy} {scale_type} {symmetric}"),
                        folder: matrix.folder(config, "weight_scale"),
                        values: matrix.values(),
                        dtype,
                    });
                }
            }
        }
    }
    cases
}

#[test]
fn every_layout_is_read_exactly() {
    let pool = Pool::new(2).unwrap();
    for Case { what, folder, values, dtype } in fp8_cases().into_iter().chain(compressed_cases()) {
        let checkpoint = folder.open().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(checkpoint.tensor(WEIGHT).is_none(), "{what}");
        // All rows, and ranges that begin and end inside of blocks and words.
        for rows in [0..N, 3..N - 2, 7..8, 5..5] {
            let mut buffer = Vec::new();
            let loaded = checkpoint.read(WEIGHT, rows.clone(), &mut buffer, &pool).unwrap();
            assert_eq!((loaded.dtype, loaded.shape), (dtype, [rows.len(), K]), "{what}");
            for (i, n) in rows.enumerate() {
                let mut row = vec![f32::NAN; K];
                dequantize_row(loaded.view().row(i), &mut row);
                let want = &values[n * K..(n + 1) * K];
                let is_same = row.iter().zip(want).all(|(got, want)| got == want);
                assert!(is_same, "{what}, row {n}: {row:?} instead of {want:?}");
            }
        }
    }
}

fn matrix(numbers: Numbers, strategy: &str) -> Scaled {
    let rng = &mut Rng(5);
    Scaled::random(numbers, sharing_of(strategy), "F32", || rng.bits())
}

fn fp8() -> Folder {
    matrix(Numbers::E4M3, "block").folder(fp8_config(Some([5, 64])), "weight_scale_inv")
}

fn packed(symmetric: bool) -> Folder {
    let rng = &mut Rng(6);
    let matrix = matrix(Numbers::Packed4, "group").with_zeros(|| rng.bits());
    matrix.folder(compressed_config("pack-quantized", weights("int", 4, "group", symmetric)), "weight_scale")
}

fn tensor<'a>(folder: &'a mut Folder, part: &str) -> &'a mut Tensor {
    let name = format!("{MODULE}.{part}");
    folder.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

fn push(folder: &mut Folder, part: &str, dtype: &'static str, shape: &[usize], data: Vec<u8>) {
    folder.tensors.push(Tensor { name: format!("{MODULE}.{part}"), dtype, shape: shape.to_vec(), data });
}

#[test]
fn scales_of_activations_are_ignored() {
    let mut folder = fp8();
    push(&mut folder, "input_scale", "F32", &[], vec![0; 4]);
    push(&mut folder, "activation_scale", "BF16", &[1], vec![0; 2]);
    folder.open().unwrap();
    push(&mut folder, "output_scale", "BF16", &[1], vec![0; 2]);
    assert_names(&format_error(folder.open()), &["output_scale"]);
}

#[test]
fn plain_matrices_of_a_quantized_folder_are_read_as_they_are() {
    for config in [fp8_config(None), compressed_config("pack-quantized", weights("int", 4, "group", true))] {
        let folder = Folder::small("LlamaForCausalLM").with("quantization_config", config);
        assert_eq!(folder.open().unwrap().dtype(WEIGHT), DType::BF16);
    }
}

#[test]
fn missing_and_inconsistent_parts_are_rejected() {
    for (folder, parts) in [
        (fp8(), &["weight", "weight_scale_inv"][..]),
        (packed(false), &["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"]),
    ] {
        for part in parts {
            let name = format!("{MODULE}.{part}");
            let error = format_error(folder.clone().without_tensor(&name).open());
            let missing = match *part {
                "weight_packed" => format!("{MODULE}.weight"),
                "weight_scale_inv" => format!("{MODULE}.weight_scale"),
                _ => name.clone(),
            };
            assert_names(&error, &["missing", &missing]);

            let mut shape = folder.clone();
            let of_part = tensor(&mut shape, part);
            of_part.shape[0] += 1;
            of_part.data.resize(of_part.data.len() / (of_part.shape[0] - 1) * of_part.shape[0], 1);
            assert_names(&format_error(shape.open()), &[&name, "shape"]);

            let mut dtype = folder.clone();
            let of_part = tensor(&mut dtype, part);
            let n = of_part.shape.iter().product::<usize>();
            let other = if matches!(of_part.dtype, "I32" | "I64") { ("F32", 4) } else { ("I64", 8) };
            (of_part.dtype, of_part.data) = (other.0, vec![0; other.1 * n]);
            // A plain `.weight` is a matrix that is not quantized.
            assert_names(&unsupported(dtype.open()), &[&name, other.0]);
        }
    }
    let mut both = fp8();
    push(&mut both, "weight_scale", "F32", &[1], 1_f32.to_le_bytes().to_vec());
    assert_names(&format_error(both.open()), &["not part of this model", "weight_scale"]);
}

#[test]
fn a_shape_that_contradicts_the_configuration_is_rejected() {
    for (dtype, size) in [("I64", i64::MIN), ("I64", 15), ("I32", -1)] {
        let mut folder = packed(false);
        let shape = tensor(&mut folder, "weight_shape");
        let n_bytes = if dtype == "I64" { 8 } else { 4 };
        let sizes = [size, K as i64];
        shape.dtype = dtype;
        shape.data = sizes.iter().flat_map(|size| size.to_le_bytes()[..n_bytes].to_vec()).collect();
        assert_names(&format_error(folder.open()), &["weight_shape", "[16, 160]"]);
    }
}

#[test]
fn scales_that_cannot_be_used_are_rejected_by_name() {
    for scale in [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 4097.0, f32::MAX] {
        for (mut folder, part) in [(fp8(), "weight_scale_inv"), (packed(false), "weight_scale")] {
            let data = &mut tensor(&mut folder, part).data;
            let last = data.len() - 4;
            data[last..].copy_from_slice(&scale.to_le_bytes());
            let error = format_error(folder.open());
            assert!(matches!(&error, FormatError::Scale { .. }), "{error}");
            assert_names(&error, &[part, "4096"]);
        }
    }
    // The largest and the smallest that are allowed.
    for scale in [4096.0, -4096.0, f32::from_bits(1)] {
        let mut folder = fp8();
        tensor(&mut folder, "weight_scale_inv").data[..4].copy_from_slice(&f32::to_le_bytes(scale));
        bytes_of(&folder.open().unwrap(), WEIGHT).unwrap();
    }
}

#[test]
fn nan_in_fp8_is_rejected_with_its_row() {
    for byte in [0x7f, 0xff] {
        let mut folder = fp8();
        for row in [9, 11] {
            tensor(&mut folder, "weight").data[row * K + 159] = byte;
        }
        let error = format_error(bytes_of(&folder.open().unwrap(), WEIGHT));
        assert!(matches!(&error, FormatError::Nan { row: 9, .. }), "{error}");
        assert_names(&error, &[&format!("{MODULE}.weight"), "row 9"]);
    }
}

#[test]
fn zero_points_of_a_symmetric_matrix_must_be_zeros() {
    assert_names(&unsupported(packed(true).open()), &["zero points", MODULE]);
    let mut zeros = packed(true);
    tensor(&mut zeros, "weight_zero_point").data.fill(0);
    zeros.open().unwrap();
}

#[test]
fn only_floats_are_quantized_again() {
    let bytes = matrix(Numbers::Bytes, "channel")
        .folder(compressed_config("int-quantized", weights("int", 8, "channel", true)), "weight_scale");
    for (folder, dtype) in [(packed(false), "INT4"), (bytes, "INT8")] {
        let checkpoint = folder.open().unwrap();
        for mode in [ComputeMode::Int8, ComputeMode::Int4] {
            let error = checkpoint.check_quantizable(mode).unwrap_err();
            assert_names(&error, &[&format!("{MODULE}.weight"), dtype]);
        }
        checkpoint.check_quantizable(ComputeMode::Float32).unwrap();
    }
    fp8().open().unwrap().check_quantizable(ComputeMode::Int4).unwrap();
}

/// Vectors in FP8, and matrices of a folder that does not state how it is quantized, have no reader.
#[test]
fn other_tensors_in_fp8_are_rejected_by_name() {
    for name in ["model.norm.weight", "lm_head.weight"] {
        let mut folder = fp8();
        let tensor = folder.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        (tensor.dtype, tensor.data) = ("F8_E4M3", vec![0; tensor.data.len() / 2]);
        let words: &[&str] = match name {
            "lm_head.weight" => &["lm_head", "12 x 16", "multiples of 32"],
            _ => &["model.norm.weight", "F8_E4M3"],
        };
        assert_names(&unsupported(folder.open()), words);
    }
    let plain = fp8().without("quantization_config");
    assert_names(&unsupported(plain.open()), &[&format!("{MODULE}.weight"), "F8_E4M3", "F32, F16, BF16"]);
}

#[test]
fn other_settings_of_fp8_are_rejected_by_name() {
    let opened = |key: &str, value: Value| {
        let mut config = fp8_config(Some([5, 64]));
        config[key] = value;
        fp8().with("quantization_config", config).open()
    };
    opened("fmt", json!("e4m3")).unwrap();
    assert_names(&unsupported(opened("fmt", json!("e5m2"))), &["e5m2", "e4m3"]);
    for block in [json!([1, 16]), json!([128, 33])] {
        assert_names(&unsupported(opened("weight_block_size", block)), &["weight_block_size", "32"]);
    }
    for block in [json!([]), json!([128]), json!([0, 32]), json!([-1, 32]), json!(128), json!(["a", 32])] {
        assert!(matches!(opened("weight_block_size", block), Err(Error::Rejected(_))));
    }
    for block in [json!([usize::MAX, usize::MAX / 32 * 32]), json!([128, 128]), Value::Null] {
        assert_names(&format_error(opened("weight_block_size", block)), &[MODULE, "shape"]);
    }
}

#[test]
fn other_settings_of_compressed_tensors_are_rejected_by_name() {
    let opened = |change: &dyn Fn(&mut Value)| {
        let mut config = compressed_config("pack-quantized", weights("int", 4, "group", false));
        change(&mut config);
        packed(false).with("quantization_config", config).open()
    };
    opened(&|_| ()).unwrap();
    opened(&|config| config["sparsity_config"] = json!({"format": "dense"})).unwrap();
    for (key, value, words) in [
        ("kv_cache_scheme", json!({"num_bits": 8}), ["kv_cache_scheme", "kv_cache_dtype"]),
        ("sparsity_config", json!({"format": "sparse-24-bitmask"}), ["sparsity", "sparse-24-bitmask"]),
        ("transform_config", json!({"config_groups": {}}), ["transform_config", "rotated"]),
        ("config_groups", json!({"a": {}, "b": {}}), ["config_groups", "one group"]),
        ("config_groups", json!({}), ["config_groups", "one group"]),
        ("format", json!("nvfp4-pack-quantized"), ["nvfp4-pack-quantized", "pack-quantized"]),
        ("format", json!("marlin-24"), ["marlin-24", "pack-quantized"]),
        ("format", json!("int-quantized"), ["int-quantized int 4", "int-quantized int 8"]),
    ] {
        assert_names(&unsupported(opened(&|config| config[key] = value.clone())), &words);
    }
    let group = |key: &str, value: Value| {
        opened(&|config| config["config_groups"]["group_0"]["weights"][key] = value.clone())
    };
    group("actorder", json!("weight")).unwrap();
    group("strategy", Value::Null).unwrap();
    for (key, value, words) in [
        ("actorder", json!("group"), ["actorder", "group"]),
        ("actorder", json!(true), ["actorder", "true"]),
        ("num_bits", json!(3), ["int 3", "int 4"]),
        ("type", json!("float"), ["float 4", "float 8"]),
        ("strategy", json!("tensor_group"), ["strategy", "tensor_group"]),
        ("group_size", json!(16), ["group_size", "16"]),
        ("group_size", json!(-1), ["group_size", "0"]),
    ] {
        assert_names(&unsupported(group(key, value)), &words);
    }
    for (key, value) in [("num_bits", json!("4")), ("symmetric", json!(0)), ("strategy", json!("block"))] {
        assert!(matches!(group(key, value), Err(Error::Rejected(_))), "{key}");
    }
    for value in [Value::Null, json!([]), json!({"a": 1}), json!({"a": {}})] {
        let error = opened(&|config| config["config_groups"] = value.clone());
        assert!(matches!(error, Err(Error::Rejected(_))), "{value}");
    }
    let asymmetric = matrix(Numbers::Bytes, "channel")
        .folder(compressed_config("int-quantized", weights("int", 8, "channel", false)), "weight_scale");
    assert_names(&unsupported(asymmetric.open()), &["symmetric", "false"]);
    let newer =
        opened(&|config| config["config_groups"]["group_0"]["format"] = json!("mxfp4-pack-quantized"));
    assert_names(&unsupported(newer), &["mxfp4-pack-quantized"]);
}

/// Damages the configuration, or the header and the bytes after it. The folder must be rejected or load completely.
fn assert_valid_or_rejected(file: &str, changes: &[(Index, u8)]) {
    for folder in [fp8(), packed(false)] {
        let change =
            |front: &mut [u8]| changes.iter().for_each(|(at, byte)| front[at.index(front.len())] = *byte);
        let Some(checkpoint) = damaged(&folder, file, change) else { continue };
        for id in checkpoint.weight_ids() {
            let n_elements = checkpoint.config().shape(id).iter().product();
            match bytes_of(&checkpoint, id) {
                Ok(bytes) => {
                    assert_eq!(checkpoint.dtype(id).bytes_of(n_elements), Some(bytes.len()), "{id:?}")
                }
                Err(error) => assert_names(&error, &["NaN"]),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn damaged_folders_never_panic(
        is_config in any::<bool>(),
        changes in vec((any::<Index>(), prop_oneof![b'0'..=b'9', any::<u8>()]), 1..4),
    ) {
        assert_valid_or_rejected(if is_config { "config.json" } else { "model.safetensors" }, &changes);
    }
}
