//! Bounds on how much a text can grow before it is tokenized.

use crate::error::FormatError;
use serde_json::Value;

/// Characters that all normalizers together may produce from one.
const GROWTH_MAX: u64 = 64;
/// Times that the post-processors together may repeat the text.
const REPEATS_MAX: u64 = 8;
/// Special tokens that the post-processors together may add to the text.
const SPECIALS_MAX: u64 = 256;

/// Rejects normalizers that multiply a text by more than [`GROWTH_MAX`].
pub(super) fn check_normalizer(normalizer: &Value) -> Result<(), FormatError> {
    let got = growth(normalizer);
    if got > GROWTH_MAX {
        let what = "the characters that the normalizers make of one";
        return Err(FormatError::Growth { what, got, max: GROWTH_MAX });
    }
    Ok(())
}

/// Returns the factor by which a normalizer, or a sequence of them, can multiply a text. Unicode normal forms are not
/// counted: their factor is at most 18, once.
fn growth(value: &Value) -> u64 {
    match value {
        Value::Array(items) => items.iter().fold(1, |product, item| product.saturating_mul(growth(item))),
        Value::Object(map) => {
            let n_chars = |text: &Value| text.as_str().map_or(0, |text| text.chars().count()) as u64;
            let of = |key: &str| map.get(key).map_or(0, n_chars);
            let prepended = of("prepend").saturating_add(1);
            // A regular expression may match the empty string: the content is then inserted at each character.
            let replaced = match map.get("pattern").and_then(|pattern| pattern.get("String")).map(n_chars) {
                Some(n @ 1..) => of("content").div_ceil(n).max(1),
                _ if map.contains_key("pattern") => of("content").saturating_add(1),
                _ => 1,
            };
            let inner = map.values().fold(1_u64, |product, item| product.saturating_mul(growth(item)));
            prepended.saturating_mul(replaced).saturating_mul(inner)
        }
        _ => 1,
    }
}

/// Rejects post-processors that repeat the text or add special tokens more often than any real one.
pub(super) fn check_post_processor(post_processor: &Value) -> Result<(), FormatError> {
    let mut found = Pieces { n_texts: 0, n_specials: 0 };
    found.count(post_processor);
    if found.n_texts > REPEATS_MAX {
        let what = "the number of places for the text in the post-processors";
        return Err(FormatError::Growth { what, got: found.n_texts, max: REPEATS_MAX });
    }
    if found.n_specials > SPECIALS_MAX {
        let what = "the number of special tokens in the post-processors";
        return Err(FormatError::Growth { what, got: found.n_specials, max: SPECIALS_MAX });
    }
    Ok(())
}

/// The pieces that templates are made of.
struct Pieces {
    n_texts: u64,
    n_specials: u64,
}

impl Pieces {
    fn count(&mut self, value: &Value) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.count(item)),
            Value::Object(map) => {
                for (key, item) in map {
                    match key.as_str() {
                        "Sequence" => self.n_texts = self.n_texts.saturating_add(1),
                        "SpecialToken" => self.n_specials = self.n_specials.saturating_add(1),
                        "ids" => {
                            let n = item.as_array().map_or(0, Vec::len) as u64;
                            self.n_specials = self.n_specials.saturating_add(n);
                        }
                        _ => {}
                    }
                    self.count(item);
                }
            }
            _ => {}
        }
    }
}
