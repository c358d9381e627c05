//! The K and V tensors: sizes, layout and NaN fill.

use llaisys_core::dtype::KvDType;
use llaisys_core::error::DeviceError;
use llaisys_core::kv::{Copies, Storage};
use llaisys_core::ops::KvHeads;
use llaisys_core::ops::reference::kv_store::decode;

fn heads(n_kv_heads: usize, d_head: usize) -> KvHeads {
    KvHeads { n_kv_heads, d_head }
}

#[test]
fn each_layer_has_its_own_zeroed_tensors() {
    let mut storage = Storage::new(&[heads(3, 4); 2], 5, KvDType::Float32).unwrap();
    assert_eq!((storage.n_layers(), storage.n_bytes()), (2, 2 * 2 * 5 * 3 * 4 * 4));
    storage.layer_mut(1).k.as_mut_slice::<f32>().fill(f32::NAN);
    let (first, second) = (storage.layer(0), storage.layer(1));
    assert_eq!((first.n_kv_heads, first.d_head, first.dtype), (3, 4, KvDType::Float32));
    assert_eq!(first.k.as_slice::<f32>(), [0.0; 60]);
    assert!(second.k.as_slice::<f32>().iter().all(|x| x.is_nan()));
    assert_eq!(second.v.as_slice::<f32>(), [0.0; 60]);
}

#[test]
fn narrow_types_need_fewer_bytes() {
    let bytes = |dtype| Storage::new(&[heads(2, 8)], 64, dtype).unwrap().n_bytes();
    let float32 = 2 * 64 * 2 * 8 * 4;
    // An int8 head has its scale of four bytes.
    let want = [float32, float32 / 2, float32 / 2, 2 * 64 * 2 * (8 + 4)];
    assert_eq!(KvDType::ALL.map(bytes), want);
}

/// A read before the first write shows as NaN, in every type.
#[test]
fn nan_filled_cells_read_as_nan() {
    for dtype in KvDType::ALL {
        let mut storage = Storage::new(&[heads(2, 6)], 4, dtype).unwrap();
        storage.nan_fill(&[2]);
        let numbers = |storage: &Storage| {
            let layer = storage.layer(0);
            let heads = layer.v.as_slice::<u8>().chunks(dtype.head_bytes(6));
            heads.flat_map(|head| decode(dtype, head)).collect::<Vec<f32>>()
        };
        let nan: Vec<bool> = numbers(&storage).into_iter().map(f32::is_nan).collect();
        assert_eq!(nan, [[false; 12], [false; 12], [true; 12], [false; 12]].as_flattened(), "{dtype:?}");
        storage.nan_fill_all();
        assert!(numbers(&storage).into_iter().all(f32::is_nan), "{dtype:?}");
    }
}

#[test]
fn size_that_overflows_is_rejected() {
    let error = Storage::new(&[heads(2, 64)], usize::MAX / 2, KvDType::Bfloat16).unwrap_err();
    assert!(matches!(error, DeviceError::Allocation { what: "KV cells", bytes: usize::MAX }), "{error}");
}

/// Cells of layers with heads of different widths: exported and imported, and copied, bit for bit.
#[test]
fn layers_can_differ_in_their_heads() {
    for dtype in KvDType::ALL {
        let layers = [heads(2, 6), heads(1, 16), heads(3, 4)];
        let mut storage = Storage::new(&layers, 5, dtype).unwrap();
        let of_layer = |layer: &KvHeads| 2 * layer.n_kv_heads * dtype.head_bytes(layer.d_head);
        assert_eq!(storage.cell_bytes(), layers.iter().map(of_layer).sum::<usize>());
        let data: Vec<u8> = (0..2 * storage.cell_bytes()).map(|i| (i % 251) as u8).collect();
        storage.write_cells(&[3, 1], &data);
        assert_eq!(storage.read_cells(&[3, 1]), data, "{dtype:?}");
        storage.copy(&Copies { from: vec![3, 1], to: vec![0, 4] });
        assert_eq!(storage.read_cells(&[0, 4]), data, "{dtype:?}");
        assert_eq!((storage.layer(1).n_kv_heads, storage.layer(1).d_head), (1, 16));
    }
}
