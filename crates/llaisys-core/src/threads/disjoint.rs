//! A slice that several workers write at the same time.

#![allow(unsafe_code, reason = "returns disjoint ranges of one slice to several workers")]

use std::marker::PhantomData;
use std::ops::Range;

/// A slice that several workers write at the same time, each its own ranges.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it only returns `&mut` to elements that may move between threads (T: Send), and `range` requires of its
// callers that no two overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows `data` for the life of the value.
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { ptr: data.as_mut_ptr(), len: data.len(), borrow: PhantomData }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of element `i`, which may be past the end.
    pub(crate) fn address(&self, i: usize) -> *const T {
        self.ptr.wrapping_add(i)
    }

    /// The elements of `range`, to write. Panics if the range is not inside the slice.
    ///
    /// # Safety
    /// While the returned slice is alive, no other slice from this value may overlap it.
    #[allow(
        clippy::mut_from_ref,
        reason = "the caller guarantees that ranges are disjoint, which is the purpose of the type"
    )]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the slice");
        // SAFETY: inside the borrowed slice (asserted); exclusive by the caller's guarantee.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// A writer for the ranges of one worker.
    ///
    /// # Safety
    /// While the writer is alive, its ranges must not overlap those of another writer or slice of this value.
    pub(crate) unsafe fn writer(&self) -> DisjointWriter<'_, T> {
        DisjointWriter { slice: self }
    }
}

/// Writes the ranges of one worker in a [`Disjoint`] slice.
pub(crate) struct DisjointWriter<'a, T> {
    slice: &'a Disjoint<'a, T>,
}

impl<T> DisjointWriter<'_, T> {
    /// The elements of `range`, to write. Panics if it is not inside the slice.
    pub(crate) fn range(&mut self, range: Range<usize>) -> &mut [T] {
        // SAFETY: no other writer has these elements, as the caller of `Disjoint::writer` guarantees, and
        // `&mut self` allows one range at a time.
        unsafe { self.slice.range(range) }
    }
}
