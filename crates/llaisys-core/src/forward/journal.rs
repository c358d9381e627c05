//! The inputs of recurrent layers at rows whose sequences may be cut, from which their states can be computed again.

/// The inputs of each recurrent layer at some rows of one decode, in the order of the passes. A draft is verified after
/// the state behind it was written. If it is rejected, the state is computed again from the rows that are kept.
#[derive(Debug, Default)]
pub struct Journal {
    /// Rows of the next pass to record.
    rows: Vec<u32>,
    /// For each layer its inputs, each `[n, width]`.
    layers: Vec<Vec<Vec<f32>>>,
}

impl Journal {
    /// A journal of `n_layers` recurrent layers.
    pub fn new(n_layers: usize) -> Self {
        Self { rows: Vec::new(), layers: (0..n_layers).map(|_| Default::default()).collect() }
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.layers.iter_mut().flatten().for_each(Vec::clear);
    }

    /// Chooses the rows of the next pass to record.
    pub fn choose(&mut self, rows: &[u32]) {
        self.rows.clear();
        self.rows.extend_from_slice(rows);
    }

    /// Records the inputs of a layer at the chosen rows. `n_rows`: those of the pass.
    pub(super) fn record(&mut self, layer: usize, n_rows: usize, inputs: &[&[f32]]) {
        let buffers = &mut self.layers[layer];
        buffers.resize_with(inputs.len(), Vec::new);
        for (buffer, values) in buffers.iter_mut().zip(inputs) {
            let width = values.len() / n_rows;
            for &row in &self.rows {
                buffer.extend_from_slice(&values[row as usize * width..][..width]);
            }
        }
    }

    /// Writes the recorded inputs of a layer at `rows` of the journal to the first rows of `inputs`.
    pub(super) fn load<'v>(
        &self,
        layer: usize,
        rows: &[u32],
        inputs: impl IntoIterator<Item = &'v mut [f32]>,
    ) {
        for (buffer, values) in self.layers[layer].iter().zip(inputs) {
            let width = values.len() / rows.len();
            for (value, &row) in values.chunks_exact_mut(width).zip(rows) {
                value.copy_from_slice(&buffer[row as usize * width..][..width]);
            }
        }
    }
}
