//! The forward pass: the list of launches for all layers, and the logits of the rows that want them.

use super::decoder::{DeviceDecoder, attention};
use super::load::{DeviceLayer, n_head_rows};
use super::rows::{self, DeviceRows, Seen};
use crate::cuda::device::{Device, DevicePtr, Element, Exchange, Product};
use crate::cuda::ops::add_rms_norm::AddRmsNorm;
use crate::cuda::ops::attention::Attention;
use crate::cuda::ops::attn_decode::{AttnDecode, n_splits};
use crate::cuda::ops::attn_prefill::AttnPrefill;
use crate::cuda::ops::embed::Embed;
use crate::cuda::ops::gate::Gate;
use crate::cuda::ops::gather::Gather;
use crate::cuda::ops::gemv;
use crate::cuda::ops::join_columns::JoinColumns;
use crate::cuda::ops::rope_kv_store::RopeKvStore;
use crate::error::DeviceError;
use crate::forward::decoder::ForwardRows;
use crate::ops::AttentionRows;

impl DeviceDecoder {
    /// Runs all layers for `rows`, and calls `on_layer` before each layer is launched. The final hidden states stay for
    /// [`DeviceDecoder::outputs`] until the next pass. A row's bits depend only on what it sees and on the number of
    /// rows.
    ///
    /// Panics on more rows or listed cells than the limits, and on a token, position or cell that does not exist.
    /// Errors: the device's.
    pub fn run(
        &self,
        device: &dyn Device,
        rows: &ForwardRows<'_>,
        on_layer: &dyn Fn(),
    ) -> Result<(), DeviceError> {
        self.check_rows(rows);
        let n = rows.tokens.len();
        let group = self.config.n_heads / self.config.n_kv_heads;
        let rows = rows::upload(device, self.memory.rows, rows, group)?;
        // SAFETY: `check_rows` accepted the values that `upload` copied.
        let pass = unsafe { Pass::new(self, device, rows, n) };
        pass.run(on_layer)
    }

    /// Gathers the final hidden states of `outputs`, rows of the last pass, and computes the logits of the first
    /// `n_logits` of them. Both stay on the device until the next pass or call.
    ///
    /// Panics on more outputs than the limits, and on a row outside of them. Errors: the device's.
    pub fn outputs(
        &self,
        device: &dyn Device,
        outputs: &[usize],
        n_logits: usize,
    ) -> Result<(), DeviceError> {
        let (n, most) = (outputs.len(), &self.limits);
        assert!(n_logits <= n && n <= most.n_outputs, "{n} outputs, {n_logits} of them with logits");
        assert!(outputs.iter().all(|&row| row < most.n_rows), "outputs of rows {outputs:?}");
        device.upload_words(self.memory.outputs, outputs.iter().map(|&row| row as u32))?;
        if n == 0 {
            return Ok(());
        }
        let gather = Gather {
            element: self.element,
            x: self.memory.branch,
            rows: self.memory.outputs,
            out: self.memory.hidden,
            n_rows: n,
            width: self.config.d_model,
        };
        // SAFETY: every row is below `limits.n_rows` (asserted), the rows of `branch`.
        unsafe { gather.launch(device) }?;
        if n_logits == 0 { Ok(()) } else { head(self, device, self.memory.hidden, n_logits) }
    }

    /// Runs a pass whose outputs are known: [`DeviceDecoder::run`], then the logits of `outputs`. Returns them as
    /// `[outputs.len(), vocab_size]` f32.
    ///
    /// Panics and errors: as both.
    pub fn forward(
        &self,
        device: &dyn Device,
        rows: &ForwardRows<'_>,
        outputs: &[usize],
    ) -> Result<DevicePtr, DeviceError> {
        self.run(device, rows, &|| ())?;
        self.outputs(device, outputs, outputs.len())?;
        Ok(self.logits())
    }

    /// As [`DeviceDecoder::forward`] of `n` rows whose arrays are in device memory, each the only row of its sequence.
    /// Returns the logits of all, `[n, vocab_size]`. It only launches, so it can be captured.
    ///
    /// Panics on more rows than the limits. Errors: the device's.
    ///
    /// # Safety
    /// As [`Pass::new`].
    pub(super) unsafe fn forward_resident(
        &self,
        device: &dyn Device,
        rows: DeviceRows,
        n: usize,
    ) -> Result<DevicePtr, DeviceError> {
        assert!(n <= self.limits.n_rows && n <= self.limits.n_outputs, "{n} rows of a step");
        // SAFETY: the caller's promise.
        let pass = unsafe { Pass::new(self, device, rows, n) };
        pass.run(&|| ())?;
        head(self, device, self.memory.branch, n)?;
        Ok(self.memory.logits)
    }

    /// Panics unless kernels can index memory with the values of `rows`.
    fn check_rows(&self, rows: &ForwardRows<'_>) {
        let ForwardRows { tokens, positions, cells, attention, windowed, recurrent: _, lora: _ } = *rows;
        let (n, most) = (tokens.len(), &self.limits);
        let n_listed = attention.cells.len().max(windowed.map_or(0, |rows| rows.cells.len()));
        assert!(n <= most.n_rows && n_listed <= most.n_listed, "{n} rows, {n_listed} listed cells");
        assert!(positions.len() == n && cells.len() == n, "{n} tokens, not as many positions and cells");
        let is_below = |values: &[i32], end: usize| values.iter().all(|&x| x >= 0 && (x as usize) < end);
        assert!(is_below(tokens, self.config.vocab_size), "a token outside of the vocabulary");
        assert!(is_below(positions, most.max_len), "a position outside of {}", most.max_len);
        self.check_cells(cells);
        for attention in [Some(attention), windowed].into_iter().flatten() {
            assert_eq!(attention.rows.len(), n, "the rows of attention");
            self.check_seen(&attention);
        }
    }

    /// Panics if a row sees a part of the list that does not exist, or a cell that the decoder does not have.
    fn check_seen(&self, attention: &AttentionRows<'_>) {
        for sequence in attention.rows.chunk_by(|a, b| a.start == b.start) {
            let begin = sequence.iter().map(|row| row.n_hidden).min().unwrap_or(0) as usize;
            let end = sequence.iter().map(|row| row.n_visible).max().unwrap_or(0) as usize;
            let start = sequence[0].start as usize;
            if begin < end {
                self.check_cells(&attention.cells[start + begin..start + end]);
            }
        }
    }
}

/// A pass over all layers.
struct Pass<'a> {
    decoder: &'a DeviceDecoder,
    device: &'a dyn Device,
    rows: DeviceRows,
    n: usize,
}

impl<'a> Pass<'a> {
    /// Returns the pass of the first `n` rows of `rows`.
    ///
    /// # Safety
    /// When the launched work runs, the arrays of `rows` have `n` rows: tokens below the vocabulary size, positions
    /// below `limits.max_len`, cells of the decoder (the device's numbers), and ranges of lists that exist and contain
    /// such cells. `n` is at most `limits.n_rows`.
    unsafe fn new(decoder: &'a DeviceDecoder, device: &'a dyn Device, rows: DeviceRows, n: usize) -> Self {
        Self { decoder, device, rows, n }
    }

    /// Launches all layers and the final norm, which leaves the hidden states in `memory.branch`.
    fn run(&self, on_layer: &dyn Fn()) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, weights, memory, .. } = self.decoder;
        let embed = Embed {
            element: *element,
            table: weights.embed,
            tokens: self.rows.tokens,
            out: memory.x,
            n_rows: self.n,
            width: config.d_model,
        };
        // SAFETY: tokens are below the vocabulary size, by `new`; `table` has a row for each id.
        unsafe { embed.launch(self.device) }?;
        let mut added = DevicePtr::NULL;
        for (index, layer) in weights.layers.iter().enumerate() {
            on_layer();
            self.add_norm(added, layer.attn_norm)?;
            self.attention(index, layer)?;
            self.add_norm(memory.branch, layer.ffn_norm)?;
            self.feed_forward(layer)?;
            added = memory.branch;
        }
        self.add_norm(added, weights.output_norm)
    }

    /// Adds `x` to the residual stream, and writes the norm of the sum to `memory.branch`.
    fn add_norm(&self, x: DevicePtr, weight: DevicePtr) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let norm = AddRmsNorm {
            element: *element,
            residual: memory.x,
            x,
            weight,
            out: memory.branch,
            n_rows: self.n,
            width: config.d_model,
            eps: config.rms_eps,
        };
        norm.launch(self.device)
    }

    fn attention(&self, index: usize, layer: &DeviceLayer) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let shape = self.decoder.shape();
        let (q, qkv) = (config.n_heads * config.d_head, shape.n_all() * config.d_head);
        let branch = Columns { at: memory.branch, width: config.d_model };
        self.product(branch, layer.qkv, layer.qkv_bias, Columns { at: memory.qkv, width: qkv })?;
        let (keys, values) = self.decoder.cells(index);
        let rope = RopeKvStore {
            element: *element,
            shape,
            qkv: memory.qkv,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            eps: config.rms_eps,
            cos: memory.cos,
            sin: memory.sin,
            positions: self.rows.positions,
            cells: self.rows.cells,
            keys,
            values,
            n_rows: self.n,
        };
        // SAFETY: positions and cells exist, by `new`; `cos` and `sin` have `limits.max_len` positions, `keys` and
        // `values` every cell.
        unsafe { rope.launch(self.device) }?;
        let seen = self.rows.windowed.filter(|_| config.windowed[index]).unwrap_or(self.rows.full);
        self.attend(keys, values, seen)?;
        self.product(Columns { at: memory.attended, width: q }, layer.o, DevicePtr::NULL, branch)?;
        self.sum_branch()
    }

    fn feed_forward(&self, layer: &DeviceLayer) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let (d_model, d_ff) = (config.d_model, config.d_ff);
        let none = DevicePtr::NULL;
        let branch = Columns { at: memory.branch, width: d_model };
        self.product(branch, layer.gate_up, none, Columns { at: memory.gate_up, width: 2 * d_ff })?;
        Gate {
            element: *element,
            kind: config.arch.activation.gate(),
            gate_up: memory.gate_up,
            out: memory.inner,
            n_rows: self.n,
            width: d_ff,
        }
        .launch(self.device)?;
        self.product(Columns { at: memory.inner, width: d_ff }, layer.down, none, branch)?;
        self.sum_branch()
    }

    /// Replaces `memory.branch` by its sum over the ranks.
    fn sum_branch(&self) -> Result<(), DeviceError> {
        if self.device.world() == 1 {
            return Ok(());
        }
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let n = self.n * config.d_model;
        self.device.exchange(&Exchange::AllReduceSum { at: memory.branch, n, element: *element })
    }

    /// Launches attention: one launch for the leading rows that are the only one of their sequence, another for chunks
    /// of prompts.
    fn attend(&self, k: DevicePtr, v: DevicePtr, seen: Seen) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let of = Attention {
            q: memory.qkv,
            k,
            v,
            cells: seen.cells,
            n_hidden: seen.n_hidden,
            n_visible: seen.n_visible,
            out: memory.attended,
            ..attention(config, *element)
        };
        if self.rows.n_alone > 0 {
            let decode = AttnDecode {
                attention: of,
                start: seen.start,
                n_rows: self.rows.n_alone,
                n_splits: n_splits(self.rows.n_alone, config.n_kv_heads, self.device.facts().n_sms as usize),
                scratch: memory.scratch,
            };
            // SAFETY: rows see lists that exist, of the decoder's cells, by `new`; `k` and `v` have every cell.
            unsafe { decode.launch(self.device) }?;
        }
        if seen.n_tiles > 0 {
            let prefill = AttnPrefill { attention: of, tiles: seen.tiles, n_tiles: seen.n_tiles };
            // SAFETY: as above; `rows::upload` computed the tiles from the same rows.
            unsafe { prefill.launch(self.device) }?;
        }
        Ok(())
    }

    /// `out[n, width] = input[n, k] . weight^T + bias`.
    fn product(
        &self,
        input: Columns,
        weight: DevicePtr,
        bias: DevicePtr,
        out: Columns,
    ) -> Result<(), DeviceError> {
        let element = self.decoder.element;
        let product = Product {
            m: self.n,
            n: out.width,
            k: input.width,
            element,
            out_element: element,
            input: input.at,
            weight,
            bias,
            out: out.at,
        };
        launch_product(self.device, &product)
    }
}

/// Rows of `width` elements on the device.
#[derive(Clone, Copy)]
struct Columns {
    at: DevicePtr,
    width: usize,
}

/// Computes the logits of `n` rows of final hidden states, on all ranks.
fn head(
    decoder: &DeviceDecoder,
    device: &dyn Device,
    hidden: DevicePtr,
    n: usize,
) -> Result<(), DeviceError> {
    let DeviceDecoder { config, element, weights, memory, .. } = decoder;
    let world = device.world();
    let width = n_head_rows(config.vocab_size, world);
    let own = if world == 1 { memory.logits } else { memory.own_logits };
    let head = Product {
        m: n,
        n: width,
        k: config.d_model,
        element: *element,
        out_element: Element::F32,
        input: hidden,
        weight: weights.head,
        bias: DevicePtr::NULL,
        out: own,
    };
    launch_product(device, &head)?;
    if world == 1 {
        return Ok(());
    }
    let (parts, n_columns) = (memory.all_logits, config.vocab_size);
    device.exchange(&Exchange::AllGather { from: own, to: parts, n: n * width, element: Element::F32 })?;
    JoinColumns { parts, out: memory.logits, n_rows: n, width, n_columns }.launch(device)
}

/// Launches our own kernel for few rows, whose time is that of reading the weight, and the library's product otherwise.
fn launch_product(device: &dyn Device, product: &Product) -> Result<(), DeviceError> {
    if gemv::fits(product) { gemv::launch(device, product) } else { device.product(product) }
}
