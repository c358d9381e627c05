//! The tensors of a checkpoint: where each lies in its mapped files.

use super::mapped::MappedFile;
use crate::dtype::DType;
use crate::tensor::TensorView;
use std::ops::Range;

/// One tensor in a file. The parser that made it has checked that `range` lies in the file and is exactly
/// `shape` elements of `dtype`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// The name as the file spells it.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes, slowest first.
    pub shape: Vec<usize>,
    /// Index of its file.
    pub file: usize,
    /// Its bytes in that file.
    pub range: Range<usize>,
}

/// All tensors of a checkpoint, in order of their names, with the maps that hold them.
#[derive(Debug)]
pub struct TensorFiles {
    files: Vec<MappedFile>,
    tensors: Vec<StoredTensor>,
}

impl TensorFiles {
    /// Takes checked tensors whose names are unique.
    pub(super) fn new(files: Vec<MappedFile>, mut tensors: Vec<StoredTensor>) -> Self {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Self { files, tensors }
    }

    /// The tensors, in order of their names.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The index in [`Self::tensors`] of the tensor called `name`.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()
    }

    /// As [`MappedFile::release_pages`], of every file.
    pub fn release_pages(&self) {
        self.files.iter().for_each(MappedFile::release_pages);
    }

    /// Tensor `index` of [`Self::tensors`]. Panics if there is no such index.
    pub fn view(&self, index: usize) -> TensorView<'_> {
        let tensor = &self.tensors[index];
        let bytes = &self.files[tensor.file].bytes()[tensor.range.clone()];
        TensorView { dtype: tensor.dtype, shape: &tensor.shape, bytes }
    }
}
