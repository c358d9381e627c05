//! The K and V tensors: sizes, layout, refusal.

use llaisys_core::dtype::KvDType;
use llaisys_core::error::DeviceError;
use llaisys_core::kv::Storage;

#[test]
fn each_layer_has_its_own_zeroed_tensors() {
    let mut storage = Storage::new(2, 5, 3, 4, KvDType::Float32).unwrap();
    assert_eq!((storage.n_layers(), storage.n_bytes()), (2, 2 * 2 * 5 * 3 * 4 * 4));
    storage.layer_mut(1).k.as_mut_slice::<f32>().fill(f32::NAN);
    let (first, second) = (storage.layer(0), storage.layer(1));
    assert_eq!((first.n_kv_heads, first.d_head, first.dtype), (3, 4, KvDType::Float32));
    assert_eq!(first.k.as_slice::<f32>(), [0.0; 60]);
    assert!(second.k.as_slice::<f32>().iter().all(|x| x.is_nan()));
    assert_eq!(second.v.as_slice::<f32>(), [0.0; 60]);
}

#[test]
fn bfloat16_takes_half() {
    let bytes = |dtype| Storage::new(1, 64, 2, 8, dtype).unwrap().n_bytes();
    assert_eq!(bytes(KvDType::Float32), 2 * bytes(KvDType::Bfloat16));
}

#[test]
fn a_size_that_cannot_be_is_refused() {
    let error = Storage::new(1, usize::MAX / 2, 2, 64, KvDType::Bfloat16).unwrap_err();
    assert!(matches!(error, DeviceError::Allocation { what: "KV cells", bytes: usize::MAX }), "{error}");
}
