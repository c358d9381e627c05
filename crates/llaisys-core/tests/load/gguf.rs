//! Damaged and hostile GGUF files: each is rejected by name, without a panic and without an allocation that is larger
//! than the file justifies.

use crate::model_files::gguf::{F32, Gguf, Meta, Q8_0, array_head, parse, put_string};
use crate::model_files::{assert_names, check, gguf_error, unsupported};
use llaisys_core::error::GgufError;

fn small() -> Gguf {
    Gguf::small("llama")
}

/// `small` with one key of a raw type and raw bytes.
fn with_raw(type_id: u32, bytes: Vec<u8>) -> Gguf {
    small().with("x", Meta::Raw(type_id, bytes))
}

#[test]
fn small_files_of_every_architecture_open() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        for version in [2, 3] {
            let mut file = Gguf::small(architecture);
            file.version = version;
            check(&file.open().unwrap());
        }
    }
}

#[test]
fn truncation_at_every_byte_is_rejected() {
    let whole = small().bytes();
    parse(&whole).unwrap();
    for end in 0..whole.len() {
        gguf_error(parse(&whole[..end]));
    }
}

#[test]
fn empty_file_is_rejected() {
    assert!(matches!(gguf_error(parse(&[])), GgufError::Truncated { needed: 4, left: 0, .. }));
}

#[test]
fn wrong_magic_number_is_rejected() {
    let mut bytes = small().bytes();
    bytes[..4].copy_from_slice(b"lmgg");
    assert!(matches!(gguf_error(parse(&bytes)), GgufError::Magic { .. }));
}

#[test]
fn other_versions_are_rejected_by_name() {
    for version in [0, 1, 4, u32::MAX] {
        let file = Gguf { version, ..small() };
        assert_names(&unsupported(file.parse()), &["GGUF version", &version.to_string(), "2 and 3"]);
    }
}

#[test]
fn big_endian_is_rejected_by_name() {
    let swapped = Gguf { version: 3_u32.swap_bytes(), ..small() };
    assert_names(&unsupported(swapped.parse()), &["byte order", "big-endian", "little-endian"]);
    let mut bytes = small().bytes();
    bytes[..4].copy_from_slice(b"FUGG");
    assert_names(&unsupported(parse(&bytes)), &["big-endian"]);
}

#[test]
fn one_file_of_several_is_rejected_by_name() {
    let split = small().with("split.count", Meta::U32(3));
    assert_names(&unsupported(split.parse()), &["split.count = 3", "one file"]);
    small().with("split.count", Meta::U32(1)).parse().unwrap();
}

#[test]
fn huge_counts_are_rejected_before_allocating() {
    for count in [1 << 20, 1 << 40, u64::MAX] {
        let tensors = Gguf { n_tensors: Some(count), ..small() };
        assert!(matches!(gguf_error(tensors.parse()), GgufError::Count { what: "tensors", .. }));
        let keys = Gguf { n_keys: Some(count), ..small() };
        assert!(matches!(gguf_error(keys.parse()), GgufError::Count { what: "metadata keys", .. }));
        let string = with_raw(8, count.to_le_bytes().into());
        assert!(matches!(gguf_error(string.parse()), GgufError::Count { .. }));
        for element in [0, 5, 7, 8, 12] {
            let array = with_raw(9, array_head(element, count));
            assert!(matches!(gguf_error(array.parse()), GgufError::Count { what: "array elements", .. }));
        }
    }
}

#[test]
fn counts_above_the_limit_are_rejected_even_if_the_file_is_long_enough() {
    let n = (1 << 22) + 1;
    let mut array = array_head(0, n);
    array.resize(array.len() + n as usize, 0);
    let error = gguf_error(with_raw(9, array).parse());
    assert_eq!(error, GgufError::Count { what: "array elements", count: n, max: n - 1 });
    let n = (16 << 20) + 1;
    let mut string = vec![];
    put_string(&mut string, &vec![b'a'; n]);
    assert!(matches!(gguf_error(with_raw(8, string).parse()), GgufError::Count { .. }));
}

#[test]
fn wrong_counts_of_keys_or_tensors_are_rejected() {
    let n_keys = small().keys.len() as u64;
    assert!(Gguf { n_keys: Some(n_keys - 1), ..small() }.parse().is_err());
    assert!(Gguf { n_keys: Some(n_keys + 1), ..small() }.parse().is_err());
    assert!(Gguf { n_tensors: Some(small().tensors.len() as u64 + 1), ..small() }.parse().is_err());
}

#[test]
fn unknown_value_types_are_rejected() {
    for type_id in [13, 99, u32::MAX] {
        let want = GgufError::UnknownValueType { key: "x".into(), type_id, in_array: false };
        assert_eq!(gguf_error(with_raw(type_id, vec![0; 8]).parse()), want);
    }
}

#[test]
fn arrays_of_arrays_and_of_unknown_types_are_rejected() {
    for type_id in [9, 13, u32::MAX] {
        let want = GgufError::UnknownValueType { key: "x".into(), type_id, in_array: true };
        assert_eq!(gguf_error(with_raw(9, array_head(type_id, 0)).parse()), want);
    }
}

#[test]
fn booleans_other_than_0_and_1_are_rejected() {
    with_raw(7, vec![1]).parse().unwrap();
    assert_eq!(gguf_error(with_raw(7, vec![2]).parse()), GgufError::Bool { key: "x".into(), value: 2 });
    let mut array = array_head(7, 3);
    array.extend([0, 1, 255]);
    assert_eq!(gguf_error(with_raw(9, array).parse()), GgufError::Bool { key: "x".into(), value: 255 });
}

#[test]
fn every_value_type_is_read() {
    for (type_id, n_bytes) in
        [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (10, 8), (11, 8), (12, 8)]
    {
        with_raw(type_id, vec![0xff; n_bytes]).parse().unwrap();
        let mut array = array_head(type_id, 3);
        array.resize(array.len() + 3 * n_bytes, 0xff);
        with_raw(9, array).parse().unwrap();
    }
}

#[test]
fn strings_that_are_not_utf8_are_rejected() {
    let mut text = vec![];
    put_string(&mut text, &[0xc3, 0x28]);
    assert!(matches!(gguf_error(with_raw(8, text).parse()), GgufError::Utf8 { .. }));
    let mut array = array_head(8, 1);
    put_string(&mut array, &[0xff]);
    assert!(matches!(gguf_error(with_raw(9, array).parse()), GgufError::Utf8 { .. }));
}

#[test]
fn repeated_key_is_rejected() {
    let mut file = small();
    file.keys.push(("general.architecture".into(), "qwen2".into()));
    assert_eq!(gguf_error(file.parse()), GgufError::DuplicateKey { key: "general.architecture".into() });
}

#[test]
fn repeated_tensor_is_rejected() {
    let mut file = small();
    file.vector("output_norm.weight", 32);
    assert_eq!(gguf_error(file.parse()), GgufError::DuplicateTensor { name: "output_norm.weight".into() });
}

#[test]
fn empty_names_are_rejected() {
    assert!(matches!(gguf_error(small().with("", Meta::U32(1)).parse()), GgufError::EmptyName { .. }));
    let mut file = small();
    file.vector("", 32);
    assert!(matches!(gguf_error(file.parse()), GgufError::EmptyName { .. }));
}

#[test]
fn tensors_without_1_to_4_dimensions_are_rejected() {
    for n_dims in [0_usize, 5, 64] {
        let mut file = small();
        file.tensor("output_norm.weight").sizes = vec![1; n_dims];
        let want = GgufError::Dimensions { name: "output_norm.weight".into(), n_dims: n_dims as u32 };
        assert_eq!(gguf_error(file.parse()), want);
    }
}

#[test]
fn zero_and_overflowing_sizes_are_rejected() {
    for sizes in [
        vec![0],
        vec![32, 0],
        vec![1 << 32, 1 << 32],
        vec![1 << 63, 2],
        vec![1 << 62],
        vec![!31, u64::MAX, u64::MAX, u64::MAX],
        vec![1 << 16, 1 << 16, 1 << 16, 1 << 16],
    ] {
        let mut file = small();
        file.tensor("output_norm.weight").sizes = sizes.clone();
        assert_eq!(gguf_error(file.parse()), GgufError::Sizes { name: "output_norm.weight".into(), sizes });
    }
}

#[test]
fn rows_of_partial_blocks_are_rejected() {
    let mut file = small();
    // The product is a multiple of 32, the row is not.
    file.tensor("token_embd.weight").sizes = vec![16, 16];
    let want = GgufError::PartialBlock { name: "token_embd.weight".into(), columns: 16, block: 32 };
    assert_eq!(gguf_error(file.parse()), want);
    for type_id in [10, 11, 12, 13, 14] {
        let mut file = small();
        let tensor = file.tensor("token_embd.weight");
        (tensor.sizes, tensor.type_id) = (vec![128, 2], type_id);
        let want = GgufError::PartialBlock { name: "token_embd.weight".into(), columns: 128, block: 256 };
        assert_eq!(gguf_error(file.parse()), want);
    }
}

#[test]
fn alignments_other_than_powers_of_two_up_to_1_mib_are_rejected() {
    for alignment in [0, 3, 33, (1 << 20) + 1, 1 << 21, u32::MAX] {
        let file = small().with("general.alignment", Meta::U32(alignment));
        let want = GgufError::Alignment { alignment: alignment.into(), max: 1 << 20 };
        assert_eq!(gguf_error(file.parse()), want);
    }
    let text = small().with("general.alignment", "32");
    assert!(matches!(gguf_error(text.parse()), GgufError::KeyType { .. }));
    for alignment in [1, 8, 64, 4096, 1 << 20] {
        let file = small().with("general.alignment", Meta::U32(alignment));
        check(&Gguf { alignment: alignment as usize, ..file }.open().unwrap());
    }
}

#[test]
fn unaligned_data_is_rejected() {
    let mut file = small();
    file.tensor("output_norm.weight").offset = Some(8);
    let want = GgufError::Misaligned { name: "output_norm.weight".into(), offset: 8, alignment: 32 };
    assert_eq!(gguf_error(file.parse()), want);
}

#[test]
fn data_outside_of_the_file_is_rejected() {
    for offset in [1 << 20, 1 << 62, !31] {
        let mut file = small();
        file.tensor("output_norm.weight").offset = Some(offset);
        let error = gguf_error(file.parse());
        assert!(
            matches!(error, GgufError::OutsideFile { offset: o, bytes: 128, .. } if o == offset),
            "{error}"
        );
    }
}

#[test]
fn header_without_data_is_rejected() {
    let (mut header, _) = small().header();
    assert!(matches!(gguf_error(parse(&header)), GgufError::OutsideFile { data_bytes: 0, .. }));
    header.truncate(header.len() - 1);
    assert!(matches!(gguf_error(parse(&header)), GgufError::Truncated { .. }));
}

#[test]
fn overlapping_tensors_are_rejected() {
    let mut file = small();
    file.tensor("blk.0.attn_norm.weight").offset = Some(0);
    let (first, second) = ("token_embd.weight".into(), "blk.0.attn_norm.weight".into());
    assert_eq!(gguf_error(file.parse()), GgufError::Overlap { first, second });
    // One tensor within the data of another.
    let mut file = small();
    file.vector("one", 64);
    file.vector("two", 8);
    file.tensor("two").offset = Some(32);
    file.tensor("one").offset = Some(0);
    assert!(matches!(gguf_error(file.parse()), GgufError::Overlap { .. }));
}

#[test]
fn other_tensor_types_are_rejected_by_their_ggml_name() {
    for (type_id, name) in
        [(9, "Q8_1"), (15, "Q8_K"), (23, "IQ4_XS"), (28, "F64"), (40, "NVFP4"), (4, "number 4")]
    {
        let mut file = small();
        file.tensor("blk.0.ffn_up.weight").type_id = type_id;
        assert_names(
            &unsupported(file.parse()),
            &["blk.0.ffn_up.weight", name, "Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K"],
        );
    }
}

#[test]
fn every_supported_tensor_type_is_accepted() {
    let of_32 =
        [(F32, 128), (1, 64), (2, 18), (3, 20), (6, 22), (7, 24), (Q8_0, 34), (20, 18), (30, 64), (39, 17)];
    let of_256 = [(10, 84), (11, 110), (12, 144), (13, 176), (14, 210)];
    let types = of_32.map(|t| (t, 32)).into_iter().chain(of_256.map(|t| (t, 256)));
    for ((type_id, n_bytes), n) in types {
        let mut file = small();
        file.vector("extra", n);
        let tensor = file.tensor("extra");
        (tensor.type_id, tensor.data) = (type_id, vec![0; n_bytes]);
        file.parse().unwrap();
        file.tensor("extra").data.pop();
        assert!(matches!(gguf_error(file.parse()), GgufError::OutsideFile { .. }));
    }
}
