//! A slice that several workers write at once.

#![allow(unsafe_code, reason = "lends disjoint ranges of one slice to several workers")]

use std::marker::PhantomData;
use std::ops::Range;

/// A slice that several workers write at once, each its own ranges.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it only gives out `&mut` to elements that may move between threads (T: Send); that no two overlap
// is what `range` asks of its callers.
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

    /// Where element `i` is or would be.
    pub(crate) fn address(&self, i: usize) -> *const T {
        self.ptr.wrapping_add(i)
    }

    /// The elements of `range`, to write. Panics if it does not lie inside.
    ///
    /// # Safety
    /// While the returned slice lives, no other one from this value may overlap it.
    #[allow(
        clippy::mut_from_ref,
        reason = "disjointness is the caller's promise, that is what the type is for"
    )]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the slice");
        // SAFETY: inside the borrowed slice (asserted); exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// A writer for the ranges that one worker has.
    ///
    /// # Safety
    /// While the writer lives, it is asked only for ranges that no other writer or slice of this value overlaps.
    pub(crate) unsafe fn writer(&self) -> DisjointWriter<'_, T> {
        DisjointWriter { slice: self }
    }
}

/// The right of one worker to write its ranges of a [`Disjoint`] slice.
pub(crate) struct DisjointWriter<'a, T> {
    slice: &'a Disjoint<'a, T>,
}

impl<T> DisjointWriter<'_, T> {
    /// The elements of `range`, to write. Panics if it is not inside the slice.
    pub(crate) fn range(&mut self, range: Range<usize>) -> &mut [T] {
        // SAFETY: no other writer has these elements, as the caller of `Disjoint::writer` promised, and this one lends
        // one range at a time.
        unsafe { self.slice.range(range) }
    }
}
