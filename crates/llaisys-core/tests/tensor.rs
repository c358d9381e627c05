//! Aligned buffers: on the boundary, zero, and not paid for before they are used.

use llaisys_core::tensor::{ALIGN, AlignedBuf};

/// Resident bytes of this process (Linux: the second field of `statm`, in pages of 4 KiB).
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: usize = statm.split(' ').nth(1).expect("two fields").parse().expect("a number");
    pages * 4096
}

#[test]
fn every_length_is_aligned_and_zero() {
    for len in [1, 3, 4, 63, 64, 65, 4096, 100_001] {
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

#[test]
fn a_large_buffer_costs_nothing_until_it_is_written() {
    let before = resident();
    let mut buf = AlignedBuf::zeroed("test", 512 << 20).expect("address space");
    assert!(resident() - before < 64 << 20);
    buf.as_mut_slice::<u8>()[..128 << 20].fill(1);
    assert!(resident() - before > 100 << 20);
}
