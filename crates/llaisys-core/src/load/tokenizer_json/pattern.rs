//! Rejects regular expressions that take a backtracking matcher exponential time.
//!
//! A repeated group that contains an alternation or another repetition may match a text in exponentially many ways
//! (`(a+)+`, `(a|aa)*`). With a back reference or a call, this is hard to decide. The pre-tokenizers of known models
//! have neither. All other patterns take polynomial time at worst, and the matcher limits its own number of steps.

use crate::error::FormatError;
use serde_json::Value;

/// Bytes of one pattern.
const PATTERN_BYTES_MAX: usize = 16 << 10;

/// Checks every `{"Regex": pattern}` in `value`.
pub(super) fn check_all(value: &Value) -> Result<(), FormatError> {
    match value {
        Value::Array(items) => items.iter().try_for_each(check_all),
        Value::Object(map) => map.iter().try_for_each(|(key, value)| match value {
            Value::String(pattern) if key == "Regex" => check(pattern),
            value => check_all(value),
        }),
        _ => Ok(()),
    }
}

fn check(pattern: &str) -> Result<(), FormatError> {
    let shown = || pattern.chars().take(200).collect();
    if pattern.len() > PATTERN_BYTES_MAX {
        return Err(FormatError::Pattern { pattern: shown(), why: "longer than 16 KiB" });
    }
    find_danger(pattern.as_bytes()).map_or(Ok(()), |why| Err(FormatError::Pattern { pattern: shown(), why }))
}

/// Returns why a pattern is rejected. It scans bytes, because all syntax is ASCII.
fn find_danger(pattern: &[u8]) -> Option<&'static str> {
    // For each open group, whether it contains an alternation or a repetition; the first is the whole pattern.
    let mut open = vec![false];
    let mut at = 0_usize;
    while let Some(&byte) = pattern.get(at) {
        at = at.saturating_add(1);
        let mut closed = None;
        match byte {
            b'\\' => {
                if matches!(pattern.get(at), Some(b'1'..=b'9' | b'k' | b'g')) {
                    return Some("a back reference or a call");
                }
                at = at.saturating_add(1);
            }
            b'[' => at = end_of_class(pattern, at),
            b'(' => {
                if matches!(pattern.get(at..at.saturating_add(2)), Some(b"?~" | b"?(" | b"?&" | b"?R")) {
                    return Some("a condition, a call or an absence");
                }
                at = after_group_head(pattern, at);
                open.push(false);
            }
            b')' => closed = open.pop(),
            b'|' => mark(&mut open),
            _ => {}
        }
        let quantifier = Quantifier::at(pattern, at);
        if quantifier.most > 1 && closed == Some(true) {
            return Some("a repeated group with a choice or a repetition in it");
        }
        if quantifier.varies || closed == Some(true) {
            mark(&mut open);
        }
        at = quantifier.end;
        if open.is_empty() {
            return Some("more groups are closed than opened");
        }
    }
    None
}

fn mark(open: &mut [bool]) {
    if let Some(innermost) = open.last_mut() {
        *innermost = true;
    }
}

/// Returns the index after the `]` of a class whose `[` is before `at`. Classes nest.
fn end_of_class(pattern: &[u8], mut at: usize) -> usize {
    let mut depth = 1_usize;
    while let Some(&byte) = pattern.get(at) {
        at = at.saturating_add(1);
        match byte {
            b'\\' => at = at.saturating_add(1),
            b'[' => depth = depth.saturating_add(1),
            b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// Returns the index after `?:`, `?=`, `?<name>`, `?i:` and the like, so that their `?` is not read as a quantifier.
fn after_group_head(pattern: &[u8], at: usize) -> usize {
    if pattern.get(at) != Some(&b'?') {
        return at;
    }
    let rest = pattern.get(at..).unwrap_or_default();
    let head = rest.iter().take_while(|&&b| b.is_ascii_alphanumeric() || b"?-_<>=!:'".contains(&b));
    let ends = |&b: &u8| matches!(b, b':' | b'=' | b'!' | b'>');
    let n = head.enumerate().find(|(_, b)| ends(b)).map_or(1, |(i, _)| i.saturating_add(1));
    at.saturating_add(n)
}

/// The quantifier after a piece of a pattern.
struct Quantifier {
    /// The largest number of repetitions.
    most: u32,
    /// The number of repetitions varies.
    varies: bool,
    /// The index after it.
    end: usize,
}

impl Quantifier {
    fn at(pattern: &[u8], at: usize) -> Self {
        let next = at.saturating_add(1);
        let mut found = match pattern.get(at) {
            Some(b'*' | b'+') => Self { most: u32::MAX, varies: true, end: next },
            Some(b'?') => Self { most: 1, varies: true, end: next },
            Some(b'{') => braces(pattern, at).unwrap_or(Self { most: 1, varies: false, end: at }),
            _ => Self { most: 1, varies: false, end: at },
        };
        // A suffix makes it lazy or possessive, or is a quantifier of a quantifier. Only `*` is taken as the latter.
        while let (true, Some(byte @ (b'*' | b'+' | b'?'))) = (found.end > at, pattern.get(found.end)) {
            found.most = if *byte == b'*' { u32::MAX } else { found.most };
            found.end = found.end.saturating_add(1);
        }
        found
    }
}

/// `{n}`, `{n,}`, `{,m}` or `{n,m}`; None if the brace is an ordinary character.
fn braces(pattern: &[u8], at: usize) -> Option<Quantifier> {
    let rest = pattern.get(at.saturating_add(1)..)?;
    let length = rest.iter().position(|&b| b == b'}')?;
    let text = std::str::from_utf8(rest.get(..length)?).ok()?;
    let (low, high) = text.split_once(',').unwrap_or((text, text));
    let is_number = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(low) || !is_number(high) || (low.is_empty() && high.is_empty()) {
        return None;
    }
    let most = if high.is_empty() { u32::MAX } else { high.parse().unwrap_or(u32::MAX) };
    Some(Quantifier { most, varies: low != high, end: at.saturating_add(length).saturating_add(2) })
}

#[cfg(test)]
mod tests {
    use super::find_danger;

    #[test]
    fn patterns_of_known_models_are_accepted() {
        for pattern in [
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[!#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"\p{N}",
            r"\d{1,3}(?=(?:\d{3})*\b)",
            r" ?[^(\s|[.,!?…。，、।۔،])]+",
            " {2,}",
            "{",
            "a{x}",
        ] {
            assert_eq!(find_danger(pattern.as_bytes()), None, "{pattern}");
        }
    }

    #[test]
    fn patterns_with_exponential_backtracking_are_rejected() {
        let why = "a repeated group with a choice or a repetition in it";
        for pattern in [
            "(a+)+$",
            "(?:a*)*b",
            "(a|aa)+$",
            "(?<x>a+){2,}",
            "((a+))*",
            "(?:(?:a{1,9}){1,9}){1,9}",
            "(a+?)+?",
            "(?i:[ab]+)*",
            "(x(y+)?)*",
            "(?:a|b){9}",
            "(a+)??*",
            "(?:a?a)+",
            "(?=(a+)+b)c",
        ] {
            assert_eq!(find_danger(pattern.as_bytes()), Some(why), "{pattern}");
        }
        for pattern in [r"(a)\1", r"\k<a>", r"(?<a>x|\g<a>y)", "(?~a)", "(?(1)a|b)", "(?R)", ")"] {
            assert!(find_danger(pattern.as_bytes()).is_some(), "{pattern}");
        }
    }
}
