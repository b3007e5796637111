//! Tensor names: paths of string keys and list indices, in the form in which files hold them.
//!
//! A path of one string is stored as that string. Every other path is stored as byte 0x1E and a
//! JSON array. One-string paths that the plain form cannot carry (the empty string, and strings
//! that begin with 0x1E) are stored as JSON too, which every release since 2.9.0 reads back.

use std::sync::Arc;

pub use super::path::Component;
pub(super) use super::path::MARK;
use super::path::{Steps, encode, has_split_pair, is_encoded};
use crate::error::Escaped;

/// Longest name that the format can hold, in bytes.
pub const MAX_NAME_LEN: usize = u16::MAX as usize;

/// Maximum number of steps in a path. Real structures have a handful, and code that walks the tree
/// may recurse.
pub const MAX_DEPTH: usize = 256;

/// A tensor's name as stored: a plain string, or a JSON array that has been validated. Clones share
/// the text.
#[derive(Debug, Clone)]
pub struct Name(Arc<str>);

impl Name {
    /// The name of a one-string path.
    pub fn from_key(key: &str) -> Result<Self, String> {
        if key.is_empty() || key.starts_with(MARK) {
            return Self::from_path(vec![Component::Key(key.as_bytes().into())]);
        }
        Self::checked(key.into())
    }

    /// The name of any path.
    pub fn from_path(path: Vec<Component>) -> Result<Self, String> {
        if path.is_empty() {
            return Err("Invalid empty tensor path".to_owned());
        }
        if let [Component::Key(key)] = path.as_slice()
            && let Some(text) = as_plain(key)
        {
            return Self::checked(text.into());
        }
        let split = |step: &Component| matches!(step, Component::Key(key) if has_split_pair(key));
        if path.iter().any(split) {
            return Err(format!(
                "a name cannot have a surrogate pair, which would be read back as one character: \
                 {}",
                preview(encode(path).as_bytes())
            ));
        }
        let depth = path.len();
        let name = Self::checked(encode(path).into())?;
        check_depth(depth)?;
        Ok(name)
    }

    /// The name that is stored in these bytes.
    pub fn parse(stored: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(stored)
            .map_err(|_| format!("tensor name is not UTF-8: {}", preview(stored)))?;
        if text.is_empty() {
            return Err("Invalid empty tensor path".to_owned());
        }
        let Some(json) = text.strip_prefix(MARK) else {
            return Self::checked(text.into());
        };
        let depth = Steps::new(json).try_fold(0, |depth, step| step.map(|_| depth + 1));
        let depth = depth.map_err(|what| {
            format!("invalid structured tensor name {}: {what}", preview(stored))
        })?;
        let name = Self::checked(text.into())?;
        check_depth(depth)?;
        Ok(name)
    }

    /// Like [`Name::from_key`], but a string in the stored form of a structured name is parsed as
    /// one.
    pub fn from_stored_or_key(text: &str) -> Result<Self, String> {
        if text.starts_with(MARK) { Self::parse(text.as_bytes()) } else { Self::from_key(text) }
    }

    fn checked(stored: Arc<str>) -> Result<Self, String> {
        if stored.len() > MAX_NAME_LEN {
            return Err(format!(
                "tensor name is too long: expected at most {MAX_NAME_LEN} bytes, found {} ({})",
                stored.len(),
                preview(stored.as_bytes())
            ));
        }
        Ok(Name(stored))
    }

    /// The name as the file holds it.
    pub fn stored(&self) -> &str {
        &self.0
    }

    /// The name as a string; None if its path is not a single string of valid UTF-8.
    pub fn key(&self) -> Option<String> {
        let mut steps = self.components();
        match (steps.next(), steps.next()) {
            (Some(Component::Key(key)), None) => String::from_utf8(key.into()).ok(),
            _ => None,
        }
    }

    /// The steps of the path, parsed lazily; None if the name is stored as a plain string.
    pub fn path(&self) -> Option<impl Iterator<Item = Component> + '_> {
        // The name was validated when it was made, so no step fails here.
        Some(Steps::new(self.0.strip_prefix(MARK)?).map_while(Result::ok))
    }

    /// The path's steps; a plain name is one key.
    pub fn components(&self) -> impl Iterator<Item = Component> + '_ {
        let path = self.path();
        let plain = path.is_none().then(|| Component::Key(self.0.as_bytes().into()));
        plain.into_iter().chain(path.into_iter().flatten())
    }

    /// The canonical form, which all spellings of one path share: the one that is written.
    pub(super) fn canonical(&self) -> Arc<str> {
        let Some(json) = self.0.strip_prefix(MARK) else { return Arc::clone(&self.0) };
        if is_encoded(json) {
            return Arc::clone(&self.0);
        }
        let mut steps = self.components();
        if let (Some(Component::Key(key)), None) = (steps.next(), steps.next())
            && let Some(text) = as_plain(&key)
        {
            return text.into();
        }
        encode(self.components()).into()
    }

    /// True if two names stand for the same path, even if they are spelled differently.
    pub fn same_path(&self, other: &Name) -> bool {
        self.0 == other.0 || self.components().eq(other.components())
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Escaped(self.0.trim_start_matches(MARK)).fmt(f)
    }
}

/// A key as a plain name, if it can be one.
pub(super) fn as_plain(key: &[u8]) -> Option<&str> {
    std::str::from_utf8(key).ok().filter(|text| !text.is_empty() && !text.starts_with(MARK))
}

fn check_depth(depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!(
            "tensor name is nested too deeply: expected at most {MAX_DEPTH} levels, found {depth}"
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn key(text: &str) -> Component {
        Component::Key(text.as_bytes().into())
    }

    #[test]
    fn name_paths_round_trip() {
        let surrogate = Component::Key([0xed, 0xa0, 0x80, b'x'].into());
        for path in [
            vec![Component::Index(0)],
            vec![key("m"), key("w"), Component::Index(12)],
            vec![key("é\u{1f600}\"\\\n\u{7f}"), key("")],
            vec![key("")],
            vec![key("\u{1e}[")],
            vec![surrogate, Component::Index(u64::MAX)],
        ] {
            let name = Name::from_path(path.clone()).unwrap();
            assert!(name.stored().is_ascii());
            let again = Name::parse(name.stored().as_bytes()).unwrap();
            assert_eq!(again.components().collect::<Vec<_>>(), path);
        }
        assert_eq!(Name::from_path(vec![key("a.b")]).unwrap().stored(), "a.b");
        let text = Name::from_path(vec![key("\u{7f}\u{1f600}"), Component::Index(1)]).unwrap();
        assert_eq!(text.stored(), "\u{1e}[\"\\u007f\\ud83d\\ude00\",1]");
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
        ] {
            assert!(Name::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        let deep = |levels: usize| format!("\u{1e}[{}]", vec!["0"; levels].join(","));
        assert!(Name::parse(deep(MAX_DEPTH).as_bytes()).is_ok());
        assert!(Name::parse(deep(MAX_DEPTH + 1).as_bytes()).is_err());
        assert!(Name::parse(&[0xff]).is_err());
        assert!(Name::from_key(&"x".repeat(MAX_NAME_LEN + 1)).is_err());
        assert!(Name::from_key(&"x".repeat(MAX_NAME_LEN)).is_ok());
    }
}
