//! Aligned buffers: aligned and zeroed. Their memory use is in `own_process.rs`.

use llaisys_core::tensor::{ALIGN, AlignedBuf};

#[test]
fn every_length_is_aligned_and_zero() {
    for len in [1, 3, 4, 63, 64, 65, 4096, 65_535, 65_536, 100_001] {
        let mut buf = AlignedBuf::zeroed("test", len).expect("small");
        assert_eq!(buf.len(), len);
        assert_eq!(buf.as_slice::<u8>().as_ptr().align_offset(ALIGN), 0);
        assert!(buf.as_slice::<u8>().iter().all(|&b| b == 0));
        assert_eq!(buf.as_slice::<f32>().len(), len / 4);
        buf.as_mut_slice::<u8>().fill(7);
    }
    assert!(AlignedBuf::zeroed("test", 0).expect("empty").as_slice::<f32>().is_empty());
    assert!(AlignedBuf::zeroed("test", usize::MAX).is_err());
}
