//! Tensor names: paths of string keys and list indices, in the form in which files hold them.
//!
//! A path of one string is stored as that string. Every other path is stored as byte 0x1E and a
//! JSON array. One-string paths that the plain form cannot carry (the empty string, and strings
//! that begin with 0x1E) are stored as JSON too, which every release since 2.9.0 reads back.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::{Escaped, Shortened};

/// Longest name that the format can hold, in bytes.
pub const MAX_NAME_LEN: usize = u16::MAX as usize;

/// Maximum number of steps in a path. Real structures have a handful, and code that walks the tree
/// may recurse.
pub const MAX_DEPTH: usize = 256;

/// The first character of a stored path.
pub(super) const MARK: char = '\u{1e}';

/// One step of a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum Component {
    /// A mapping's key.
    Key(Box<str>),
    /// A list's index.
    Index(u64),
}

impl<'de> Deserialize<'de> for Component {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ComponentVisitor;
        impl Visitor<'_> for ComponentVisitor {
            type Value = Component;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a non-negative integer")
            }

            fn visit_str<E>(self, key: &str) -> Result<Component, E> {
                Ok(Component::Key(key.into()))
            }

            fn visit_u64<E>(self, index: u64) -> Result<Component, E> {
                Ok(Component::Index(index))
            }
        }
        from.deserialize_any(ComponentVisitor)
    }
}

/// A tensor's name: a plain string, or a JSON array in the spelling that is
/// written. Clones share the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(Arc<str>);

impl Name {
    /// The name of a one-string path.
    pub fn from_key(key: &str) -> Result<Self, String> {
        if key.is_empty() || key.starts_with(MARK) {
            return Self::from_path(&[Component::Key(key.into())]);
        }
        check_len(key.as_bytes())?;
        Ok(Name(key.into()))
    }

    /// The name of any path.
    pub fn from_path(path: &[Component]) -> Result<Self, String> {
        let name = Self::of_path(path)?;
        check_len(name.stored().as_bytes())?;
        Ok(name)
    }

    fn of_path(path: &[Component]) -> Result<Self, String> {
        match path {
            [] => Err("Invalid empty tensor path".to_owned()),
            [Component::Key(key)] if !key.is_empty() && !key.starts_with(MARK) => {
                Ok(Name((**key).into()))
            }
            _ if path.len() > MAX_DEPTH => Err(format!(
                "tensor name is nested too deeply: expected at most {MAX_DEPTH} levels, found {}",
                path.len()
            )),
            _ => Ok(Name(encode(path)?.into())),
        }
    }

    /// The name that is stored in these bytes; JSON may be spelled in other ways than ours.
    pub fn parse(stored: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(stored)
            .map_err(|_| format!("tensor name is not UTF-8: {}", preview(stored)))?;
        check_len(stored)?;
        match text.strip_prefix(MARK) {
            Some(json) => Self::of_path(&parse_path(json).map_err(|what| {
                format!("invalid structured tensor name {}: {what}", preview(stored))
            })?),
            None if text.is_empty() => Self::of_path(&[]),
            None => Ok(Name(text.into())),
        }
    }

    /// Like [`Name::from_key`], but a string in the stored form of a structured name is parsed as
    /// one.
    pub fn from_stored_or_key(text: &str) -> Result<Self, String> {
        if text.starts_with(MARK) { Self::parse(text.as_bytes()) } else { Self::from_key(text) }
    }

    /// The name as a file holds it.
    pub fn stored(&self) -> &str {
        &self.0
    }

    /// The stored form, to be shared.
    pub(super) fn shared(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }

    /// The name as a string; None if its path is not a single string.
    pub fn key(&self) -> Option<String> {
        match self.path().as_deref() {
            None => Some(self.stored().to_owned()),
            Some([Component::Key(key)]) => Some(key.to_string()),
            Some(_) => None,
        }
    }

    /// The steps of the path; None if the name is stored as a plain string.
    pub fn path(&self) -> Option<Vec<Component>> {
        // The name was validated when it was made.
        self.0.strip_prefix(MARK).and_then(|json| parse_path(json).ok())
    }

    /// The path's steps; a plain name is one key.
    pub fn components(&self) -> Vec<Component> {
        self.path().unwrap_or_else(|| vec![Component::Key((*self.0).into())])
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Escaped(self.0.trim_start_matches(MARK)).fmt(f)
    }
}

/// The marker and a JSON array in ASCII, without white space.
pub(super) fn encode(path: &[Component]) -> Result<String, String> {
    let mut out = String::from(MARK);
    for letter in serde_json::to_string(path).map_err(|e| e.to_string())?.chars() {
        if matches!(letter, ' '..='~') {
            out.push(letter);
        } else {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}").map_err(|e| e.to_string())?;
            }
        }
    }
    Ok(out)
}

/// Parses an array of strings and non-negative integers.
pub(super) fn parse_path(json: &str) -> Result<Vec<Component>, String> {
    if json.contains(['\n', '\r']) || !json.starts_with('[') || !json.ends_with(']') {
        return Err("expected a JSON array in one line".to_owned());
    }
    serde_json::from_str(json).map_err(|e| {
        let what = Shortened(&e.to_string()).to_string();
        // So serde_json's errors for these end, and no others.
        let is_surrogate = what.contains("hex escape");
        if is_surrogate { format!("lone surrogates are not supported: {what}") } else { what }
    })
}

fn check_len(stored: &[u8]) -> Result<(), String> {
    if stored.len() > MAX_NAME_LEN {
        return Err(format!(
            "tensor name is too long: expected at most {MAX_NAME_LEN} bytes, found {} ({})",
            stored.len(),
            preview(stored)
        ));
    }
    Ok(())
}

/// The start of some bytes, for messages.
fn preview(bytes: &[u8]) -> String {
    const SHOWN: usize = 60;
    match bytes.get(..SHOWN) {
        Some(start) => format!("{}…", start.escape_ascii()),
        None => bytes.escape_ascii().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Component {
        Component::Key(text.into())
    }

    #[test]
    fn name_paths_round_trip() {
        for path in [
            vec![Component::Index(0)],
            vec![key("m"), key("w"), Component::Index(12)],
            vec![key("é\u{1f600}\"\\\n\u{7f}"), key("")],
            vec![key("")],
            vec![key("\u{1e}[")],
            vec![key("x"), Component::Index(u64::MAX)],
        ] {
            let name = Name::from_path(&path).unwrap();
            assert!(name.stored().is_ascii());
            let again = Name::parse(name.stored().as_bytes()).unwrap();
            assert_eq!(again.components(), path);
        }
        assert_eq!(Name::from_path(&[key("a.b")]).unwrap().stored(), "a.b");
        // As 2.12.1 writes it.
        let path = [key("é☃😀"), key("\u{7f}\"\\/\u{1}\n\u{8}\u{c}"), Component::Index(0)];
        assert_eq!(
            Name::from_path(&path).unwrap().stored(),
            "\u{1e}[\"\\u00e9\\u2603\\ud83d\\ude00\",\"\\u007f\\\"\\\\/\\u0001\\n\\b\\f\",0]"
        );
    }

    #[test]
    fn malformed_names_are_refused() {
        for text in [
            "",
            "\u{1e}",
            "\u{1e}abc",
            "\u{1e}[]",
            "\u{1e}[1.0]",
            "\u{1e}[-1]",
            "\u{1e}[null]",
            "\u{1e}[[1]]",
            "\u{1e}[\"a\"]x",
            "\u{1e}[\"a\",]",
            "\u{1e}[\"a\n\"]",
            "\u{1e}[01]",
            "\u{1e}[{}]",
            "\u{1e}[99999999999999999999]",
            "\u{1e}[\"\\x\"]",
            "\u{1e}[\"a",
            "\u{1e}[true]",
            "\u{1e}[1]\n",
            "\u{1e}[1,\n2]",
            "\u{1e}[1] ",
            "\u{1e}[\"\\ud800\"]",
            "\u{1e}[\"\\udc00\\ud800\"]",
        ] {
            assert!(Name::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        let surrogate = Name::parse(b"\x1e[\"a\\ud800b\"]").unwrap_err();
        assert!(surrogate.contains("lone surrogates are not supported"), "{surrogate}");
        let deep = |levels: usize| format!("\u{1e}[{}]", vec!["0"; levels].join(","));
        assert!(Name::parse(deep(MAX_DEPTH).as_bytes()).is_ok());
        assert!(Name::parse(deep(MAX_DEPTH + 1).as_bytes()).is_err());
        assert!(Name::parse(&[0xff]).is_err());
        assert!(Name::from_key(&"x".repeat(MAX_NAME_LEN + 1)).is_err());
        assert!(Name::from_key(&"x".repeat(MAX_NAME_LEN)).is_ok());
    }
}
