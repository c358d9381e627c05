//! Views of tensors that were read from files, and aligned owned buffers.

#![allow(unsafe_code, reason = "owns aligned allocations")]

use crate::dtype::{DType, KvDType};
use crate::error::DeviceError;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

/// A borrowed row-major tensor, or some of its rows. `bytes.len()` equals the product of `shape` in `dtype`; the parser
/// that creates the view has checked that.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes, slowest first: `[n_rows, n_columns]` for a matrix, `[n]` for a vector, `[n, n_rows, n_columns]` for
    /// a stack.
    pub shape: &'a [usize],
    /// The elements, little endian, not necessarily aligned.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Rows of a matrix, or of all matrices of a stack; 1 for a vector.
    pub fn n_rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, above)| above.iter().product())
    }

    /// Length of a row (the last size).
    pub fn n_columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Row `i` of a matrix.
    ///
    /// Panics if row `i` does not exist: callers index by checked configuration.
    pub fn row(&self, i: usize) -> RowView<'a> {
        let n_bytes = self.bytes.len() / self.n_rows();
        RowView { dtype: self.dtype, bytes: &self.bytes[i * n_bytes..(i + 1) * n_bytes] }
    }
}

/// Rows of a tensor, ready to be packed: as stored in a file, or converted to blocks.
#[derive(Debug, Clone, Copy)]
pub struct TensorRows<'a> {
    /// Element type.
    pub dtype: DType,
    /// `[n_rows, n_columns]`
    pub shape: [usize; 2],
    /// The elements, as in [`TensorView`].
    pub bytes: &'a [u8],
}

impl TensorRows<'_> {
    /// The rows as a view.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, bytes: self.bytes }
    }
}

/// One row of a stored tensor.
#[derive(Debug, Clone, Copy)]
pub struct RowView<'a> {
    /// Element type.
    pub dtype: DType,
    /// The row's elements.
    pub bytes: &'a [u8],
}

impl RowView<'_> {
    /// Some columns of the row. Panics if the range is not inside the row, or does not start and end at blocks of the
    /// type.
    pub fn columns(self, range: Range<usize>) -> Self {
        let at = |column| self.dtype.bytes_of(column).expect("the loader has checked the borders");
        Self { bytes: &self.bytes[at(range.start)..at(range.end)], ..self }
    }
}

/// Owned zeroed bytes on a 64-byte boundary. Pages are touched only when they are written, so a large buffer takes
/// memory as it fills.
#[derive(Debug)]
pub struct AlignedBuf {
    /// The first byte on the boundary; dangling if `len` is 0.
    ptr: NonNull<u8>,
    /// The pointer from [`map`], or from the allocator: at most [`ALIGN`] bytes before `ptr`.
    base: NonNull<u8>,
    len: usize,
}

/// Size of a cache line and of a 512-bit register.
pub const ALIGN: usize = 64;

/// The alignment that `calloc` guarantees on 64-bit systems.
const NATURAL_ALIGN: usize = 16;

// SAFETY: the buffer is plain owned memory; the pointer is never shared outside borrows of `self`.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above; `&AlignedBuf` gives only shared slices.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Allocates `len` zero bytes for `what` (a name for the error message).
    pub fn zeroed(what: &'static str, len: usize) -> Result<Self, DeviceError> {
        if len == 0 {
            return Ok(Self { ptr: NonNull::dangling(), base: NonNull::dangling(), len });
        }
        let refused = DeviceError::Allocation { what, bytes: len };
        if is_mapped(len) {
            let ptr = map(len).ok_or(refused)?;
            return Ok(Self { ptr, base: ptr, len });
        }
        let Some(layout) = Self::layout(len) else { return Err(refused) };
        // SAFETY: the layout has a non-zero size (checked above).
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { return Err(refused) };
        // SAFETY: the offset is below ALIGN, and the layout holds `len + ALIGN` bytes.
        let ptr = unsafe { base.add(base.as_ptr().align_offset(ALIGN)) };
        Ok(Self { ptr, base, len })
    }

    /// The layout of `len` bytes plus [`ALIGN`] bytes to reach the boundary. With a larger alignment the allocator
    /// would write the zeros itself and touch every page; with the natural one it uses fresh zero pages of the system.
    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.checked_add(ALIGN)?, NATURAL_ALIGN).ok()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as plain numbers. A tail shorter than one element is omitted.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `ptr` covers `len` initialized bytes aligned to 64 >= align_of::<T>(); `Plain` types take any bits.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len / size_of::<T>()) }
    }

    /// The elements as mutable plain numbers, as [`AlignedBuf::as_slice`].
    pub fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `as_slice`, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / size_of::<T>()) }
    }
}

/// True for buffers that are mapped, each in pages of its own.
///
/// An allocator writes its notes next to a buffer. Each note touches memory before [`map`]'s advice, and Linux never joins
/// mappings that were touched apart: buffers below 2 MiB would then have no page of that size.
const fn is_mapped(len: usize) -> bool {
    cfg!(target_os = "linux") && len >= 64 << 10
}

/// Maps zeroed memory and asks for pages of 2 MiB, which neighboring buffers share. With pages of 4 KiB, each costs a walk
/// of the page tables, which is slowest under a hypervisor. If the system refuses large pages, only speed is lost. `None`
/// if there is no memory.
#[cfg(target_os = "linux")]
fn map(len: usize) -> Option<NonNull<u8>> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address that the system chooses.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the advice changes how memory is mapped, never what it holds nor whether it may be used.
    unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
    NonNull::new(start.cast())
}

#[cfg(not(target_os = "linux"))]
fn map(_: usize) -> Option<NonNull<u8>> {
    None
}

/// Frees a mapping.
///
/// # Safety
/// `map(len)` has returned `start`, and nothing refers to the memory any more.
#[cfg(target_os = "linux")]
unsafe fn unmap(start: NonNull<u8>, len: usize) {
    // SAFETY: as the caller promises.
    unsafe { libc::munmap(start.as_ptr().cast(), len) };
}

#[cfg(not(target_os = "linux"))]
unsafe fn unmap(_: NonNull<u8>, _: usize) {}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        if is_mapped(self.len) {
            // SAFETY: a buffer of this length is from `map`, and it is dropped once.
            return unsafe { unmap(self.base, self.len) };
        }
        let layout = Self::layout(self.len).expect("the layout was valid when allocated");
        // SAFETY: `base` came from `alloc_zeroed` with this very layout and is freed once.
        unsafe { dealloc(self.base.as_ptr(), layout) }
    }
}

/// Number types for which every bit pattern is a value and alignment is at most 64.
///
/// # Safety
/// Implementers have no padding, no invalid bit patterns and an alignment of at most [`ALIGN`].
pub unsafe trait Plain: Copy {}
// SAFETY: primitive integers and floats satisfy all three.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: a u16 in a transparent wrapper.
unsafe impl Plain for half::f16 {}

/// The key and value heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvHeads {
    /// Heads of K and V.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub d_head: usize,
}

/// K and V of one layer, the cells of all streams, to read: `[cell][kv_head][d_head]` each. For int8 each head's scale
/// follows it.
#[derive(Debug, Clone, Copy)]
pub struct KvLayer<'a> {
    /// Element type of both.
    pub dtype: KvDType,
    /// Heads of K and V.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub d_head: usize,
    /// Keys (already rotated).
    pub k: &'a AlignedBuf,
    /// Values.
    pub v: &'a AlignedBuf,
}

/// K and V of one layer, the cells of all streams, to write; the layout is that of [`KvLayer`].
#[derive(Debug)]
pub struct KvLayerMut<'a> {
    /// Element type of both.
    pub dtype: KvDType,
    /// Heads of K and V.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub d_head: usize,
    /// Keys (already rotated).
    pub k: &'a mut AlignedBuf,
    /// Values.
    pub v: &'a mut AlignedBuf,
}
