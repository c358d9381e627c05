//! Greedy generation: token ids in, token ids out. Tokenizing is the caller's part.
//!
//! ```console
//! cargo run --release --example generate -- MODEL_PATH TOKEN_ID...
//! ```
//!
//! `MODEL_PATH` is a Hugging Face folder or a `.gguf` file.

use llaisys_core::batch::{BatchArrays, output};
use llaisys_core::checkpoint::Checkpoint;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest};
use llaisys_core::sample::SamplerSpec;
use llaisys_core::seq::SeqId;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

const MAX_NEW_TOKENS: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: generate MODEL_PATH TOKEN_ID...")?;
    let prompt: Vec<i32> = args.map(|id| id.parse()).collect::<Result<_, _>>()?;

    let checkpoint = Checkpoint::open(Path::new(&path))?;
    let eos_token_ids = checkpoint.info().eos_token_ids.clone();
    let mut context = Context::new(checkpoint, ContextConfig::default(), Arc::default())?;

    let seq = context.seq_acquire(0)?;
    let greedy = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
    context.set_sampler(seq, greedy, &prompt, &[])?;

    let mut generated = Vec::new();
    let mut token = decode(&mut context, seq, 0, &prompt)?;
    while generated.len() < MAX_NEW_TOKENS && !eos_token_ids.iter().any(|eos| *eos as i32 == token) {
        generated.push(token);
        token = decode(&mut context, seq, prompt.len() + generated.len() - 1, &[token])?;
    }
    context.seq_release(seq)?;

    let words: Vec<String> = generated.iter().map(i32::to_string).collect();
    println!("{}", words.join(" "));
    Ok(())
}

/// Decode `tokens` of one sequence from position `start` on; return the token sampled after the last one.
fn decode(context: &mut Context, seq: SeqId, start: usize, tokens: &[i32]) -> llaisys_core::Result<i32> {
    let positions: Vec<i32> = (start..start + tokens.len()).map(|position| position as i32).collect();
    let mut wants_output = vec![output::NONE; tokens.len()];
    if let Some(last) = wants_output.last_mut() {
        *last = output::LOGITS;
    }
    let arrays = BatchArrays {
        tokens,
        positions: &positions,
        n_seq_id: &vec![1; tokens.len()],
        seq_ids: &vec![seq.to_raw(); tokens.len()],
        wants_output: &wants_output,
        ..BatchArrays::default()
    };
    let result = context.decode(&DecodeRequest { arrays, masks: None, return_logits: false })?;
    Ok(result.token_ids[0])
}
