//! Arrays in device memory that tests write and read, on the emulator and on a GPU.

use super::product::{decode, encode, size_of};
use llaisys_core::cuda::device::{Device, DevicePtr, Element};

/// The byte of unwritten memory: NaN in every float type, -1 as an integer.
pub(super) const FRESH: u8 = 0xff;

/// Creates and reads the arrays of a test. Memory lives as long as its device.
pub(crate) trait Arrays {
    /// Returns memory with these bytes.
    fn bytes(&self, what: &'static str, bytes: &[u8]) -> DevicePtr;

    /// Returns `n_bytes` bytes of unwritten memory, which is NaN.
    fn fresh(&self, what: &'static str, n_bytes: usize) -> DevicePtr;

    /// Returns `n_bytes` bytes of memory.
    fn read_bytes(&self, from: DevicePtr, n_bytes: usize) -> Vec<u8>;

    /// Returns memory with these elements.
    fn elements(&self, what: &'static str, element: Element, values: &[f32]) -> DevicePtr {
        self.bytes(what, &encode(element, values))
    }

    /// Returns memory with these integers.
    fn i32s(&self, what: &'static str, values: &[i32]) -> DevicePtr {
        self.bytes(what, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Returns memory with these integers.
    fn u32s(&self, what: &'static str, values: &[u32]) -> DevicePtr {
        self.bytes(what, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Returns unwritten memory for `n` elements, which are NaN.
    fn unwritten(&self, what: &'static str, element: Element, n: usize) -> DevicePtr {
        self.fresh(what, n * size_of(element))
    }

    /// Returns the values of `n` elements.
    fn read(&self, element: Element, from: DevicePtr, n: usize) -> Vec<f32> {
        decode(element, &self.read_bytes(from, n * size_of(element)))
    }

    /// Returns the values of `n` integers.
    fn read_i32s(&self, from: DevicePtr, n: usize) -> Vec<i32> {
        let bytes = self.read_bytes(from, n * 4);
        bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

impl<D: Device + ?Sized> Arrays for D {
    fn bytes(&self, what: &'static str, bytes: &[u8]) -> DevicePtr {
        let at = self.alloc(what, bytes.len()).expect("the device has memory");
        self.upload(at, bytes).expect("the array is inside the allocation");
        at
    }

    fn fresh(&self, what: &'static str, n_bytes: usize) -> DevicePtr {
        let at = self.alloc(what, n_bytes).expect("the device has memory");
        self.fill(at, FRESH, n_bytes).expect("the array is inside the allocation");
        at
    }

    fn read_bytes(&self, from: DevicePtr, n_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; n_bytes];
        self.download(from, &mut bytes).expect("the array is inside the allocation");
        bytes
    }
}
