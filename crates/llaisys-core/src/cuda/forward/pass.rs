//! One pass over all layers: the list of launches.

use super::load::{DeviceLayer, n_head_rows};
use super::rows::{DeviceRows, Seen};
use super::{DeviceDecoder, gate_kind};
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

/// One pass at work.
pub(super) struct Pass<'a> {
    pub(super) decoder: &'a DeviceDecoder,
    pub(super) device: &'a dyn Device,
    pub(super) rows: DeviceRows,
    /// Rows.
    pub(super) n: usize,
}

impl Pass<'_> {
    /// All layers, and the final norm: hidden states are left in the branch's place.
    pub(super) fn run(&self, on_layer: &dyn Fn()) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, weights, memory, .. } = self.decoder;
        Embed {
            element: *element,
            table: weights.embed,
            tokens: self.rows.tokens,
            out: memory.x,
            n_rows: self.n,
            width: config.d_model,
        }
        .launch(self.device)?;
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

    /// Adds a branch to the residual stream and norms that into the branch's place.
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
            rounds_twice: true,
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
        RopeKvStore {
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
        }
        .launch(self.device)?;
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
            kind: gate_kind(config),
            gate_up: memory.gate_up,
            out: memory.inner,
            n_rows: self.n,
            width: d_ff,
        }
        .launch(self.device)?;
        self.product(Columns { at: memory.inner, width: d_ff }, layer.down, none, branch)?;
        self.sum_branch()
    }

    /// Puts the sum over the ranks in the branch's place.
    fn sum_branch(&self) -> Result<(), DeviceError> {
        if self.device.world() == 1 {
            return Ok(());
        }
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let n = self.n * config.d_model;
        self.device.exchange(&Exchange::AllReduceSum { at: memory.branch, n, element: *element })
    }

    /// Rows that are alone in their sequence come first and share one launch, chunks of prompts another.
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
            ..super::attention(config, *element)
        };
        if self.rows.n_alone > 0 {
            AttnDecode {
                attention: of,
                start: seen.start,
                n_rows: self.rows.n_alone,
                n_splits: n_splits(self.rows.n_alone, config.n_kv_heads, self.device.facts().n_sms as usize),
                scratch: memory.scratch,
            }
            .launch(self.device)?;
        }
        if seen.n_tiles > 0 {
            AttnPrefill { attention: of, tiles: seen.tiles, n_tiles: seen.n_tiles }.launch(self.device)?;
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
        start(self.device, &product)
    }
}

/// Rows of `width` elements on the device.
#[derive(Clone, Copy)]
struct Columns {
    at: DevicePtr,
    width: usize,
}

/// Gathers the final hidden states of `n` rows that [`Pass::run`] left in the branch's place, and computes the logits
/// of the first `n_logits`.
pub(super) fn outputs(
    decoder: &DeviceDecoder,
    device: &dyn Device,
    n: usize,
    n_logits: usize,
) -> Result<(), DeviceError> {
    let DeviceDecoder { config, element, memory, .. } = decoder;
    if n == 0 {
        return Ok(());
    }
    Gather {
        element: *element,
        x: memory.branch,
        rows: memory.outputs,
        out: memory.hidden,
        n_rows: n,
        width: config.d_model,
    }
    .launch(device)?;
    if n_logits == 0 { Ok(()) } else { head(decoder, device, memory.hidden, n_logits) }
}

/// The logits of `n` rows of final hidden states.
pub(super) fn head(
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
    start(device, &head)?;
    if world == 1 {
        return Ok(());
    }
    let (parts, n_columns) = (memory.all_logits, config.vocab_size);
    device.exchange(&Exchange::AllGather { from: own, to: parts, n: n * width, element: Element::F32 })?;
    JoinColumns { parts, out: memory.logits, n_rows: n, width, n_columns }.launch(device)
}

/// By our own kernel where few rows read the weight, by the library else.
fn start(device: &dyn Device, product: &Product) -> Result<(), DeviceError> {
    if gemv::fits(product) { gemv::launch(device, product) } else { device.product(product) }
}
