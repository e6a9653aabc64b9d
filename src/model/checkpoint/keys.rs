//! Finds duplicate keys in a JSON object. The JSON parser silently keeps the last of them.

use std::collections::HashSet;

/// The first duplicate key. `json` must be valid JSON.
pub(super) fn duplicate(json: &str) -> Option<String> {
    let bytes = json.as_bytes();
    let mut objects: Vec<HashSet<String>> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'{' => objects.push(HashSet::new()),
            b'}' => drop(objects.pop()),
            b'"' => {
                let end = end_of_string(bytes, at);
                let is_key = bytes[end..].iter().find(|b| !b.is_ascii_whitespace()) == Some(&b':');
                if is_key {
                    // Parsed, because a key may have escapes.
                    let key: String = serde_json::from_str(&json[at..end]).ok()?;
                    if !objects.last_mut()?.insert(key.clone()) {
                        return Some(key);
                    }
                }
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// The index after the closing quote of the string that begins at `start`.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_finds_keys_of_one_object_only() {
        for fine in [r#"{"a":{"b":"a","c":["a","a"]},"b":{"b":1}}"#, "{}", "[]", r#"{"a\"":1,"a":2}"#, "\"a\"", ""] {
            assert_eq!(duplicate(fine), None, "{fine}");
        }
        for twice in [r#"{"a":1, "b":2, "a" :3}"#, r#"{"x":{"a":{},"a":{}}}"#, r#"{"a":1,"\u0061":2}"#] {
            assert_eq!(duplicate(twice).as_deref(), Some("a"), "{twice}");
        }
    }
}
