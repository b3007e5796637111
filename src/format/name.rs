//! Tensor names: the encoding of a path of string keys and list indices.
//!
//! A path of one string is stored as that string. Every other path is stored as byte 0x1E and a
//! JSON array. One-string paths that the plain form cannot carry (the empty string, and strings
//! that begin with 0x1E) are stored as JSON too, which every release since 2.9.0 reads back.

use std::fmt::Write as _;

const MARK: char = '\u{1e}';
/// Longest name that the format can hold, in bytes.
pub const MAX_NAME_LEN: usize = u16::MAX as usize;

/// Most steps of a path. Real structures have a handful; what walks the tree may recurse.
pub const MAX_DEPTH: usize = 256;

/// One step of a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Component {
    /// A mapping's key: UTF-8, except that JSON can spell lone surrogates, which are kept in the
    /// same way that UTF-8 would encode them.
    Key(Box<[u8]>),
    /// A list's index.
    Index(u64),
}

/// A tensor's name as stored, and the path that it stands for.
#[derive(Debug, Clone)]
pub struct Name {
    stored: Box<str>,
    /// `None` where the path is the stored string.
    path: Option<Box<[Component]>>,
}

impl Name {
    /// The name of a one-string path.
    pub fn from_key(key: &str) -> Result<Self, String> {
        if key.is_empty() || key.starts_with(MARK) {
            return Self::from_path(vec![Component::Key(key.as_bytes().into())]);
        }
        Self::checked(key.into(), None)
    }

    /// The name of any path.
    pub fn from_path(path: Vec<Component>) -> Result<Self, String> {
        if path.is_empty() {
            return Err("Invalid empty tensor path".to_owned());
        }
        if let [Component::Key(key)] = path.as_slice()
            && let Ok(text) = std::str::from_utf8(key)
            && !text.is_empty()
            && !text.starts_with(MARK)
        {
            return Self::checked(text.into(), None);
        }
        let split = |step: &Component| matches!(step, Component::Key(key) if has_split_pair(key));
        if path.iter().any(split) {
            return Err(format!(
                "a name with the two halves of a character beside each other, as surrogates, would \
                 come back as that character: {}",
                preview(encode(&path).as_bytes())
            ));
        }
        Self::checked(encode(&path).into(), Some(path.into()))
    }

    /// The name that is stored in these bytes.
    pub fn parse(stored: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(stored)
            .map_err(|_| format!("tensor name is not UTF-8: {}", preview(stored)))?;
        if text.is_empty() {
            return Err("Invalid empty tensor path".to_owned());
        }
        let Some(json) = text.strip_prefix(MARK) else {
            return Self::checked(text.into(), None);
        };
        let path = Parser { text: json, at: 0 }.array().map_err(|what| {
            format!("invalid structured tensor name {}: {what}", preview(stored))
        })?;
        Self::checked(text.into(), Some(path.into()))
    }

    /// Like [`Name::from_key`], but a string in the stored form of a structured name is one.
    pub fn from_stored_or_key(text: &str) -> Result<Self, String> {
        if text.starts_with(MARK) { Self::parse(text.as_bytes()) } else { Self::from_key(text) }
    }

    fn checked(stored: Box<str>, path: Option<Box<[Component]>>) -> Result<Self, String> {
        if stored.len() > MAX_NAME_LEN {
            return Err(format!(
                "tensor name is too long: expected at most {MAX_NAME_LEN} bytes, found {} ({})",
                stored.len(),
                preview(stored.as_bytes())
            ));
        }
        if let Some(depth) = path.as_ref().map(|path| path.len()).filter(|&len| len > MAX_DEPTH) {
            return Err(format!(
                "tensor name is nested too deeply: expected at most {MAX_DEPTH} levels, found {depth}"
            ));
        }
        Ok(Name { stored, path })
    }

    /// The name as the file holds it.
    pub fn stored(&self) -> &str {
        &self.stored
    }

    /// The path, where it is more than one plain string.
    pub fn path(&self) -> Option<&[Component]> {
        self.path.as_deref()
    }

    /// The path's steps; a plain name is one key.
    pub fn components(&self) -> impl Iterator<Item = Component> + '_ {
        let flat = self.path.is_none().then(|| Component::Key(self.stored.as_bytes().into()));
        flat.into_iter().chain(self.path.iter().flatten().cloned())
    }

    /// Whether two names stand for one path, however spelled.
    pub fn same_path(&self, other: &Name) -> bool {
        match (&self.path, &other.path) {
            (None, None) => self.stored == other.stored,
            _ => self.components().eq(other.components()),
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.stored.trim_start_matches(MARK))
    }
}

/// The start of some bytes, for messages.
fn preview(bytes: &[u8]) -> String {
    const SHOWN: usize = 60;
    match bytes.get(..SHOWN) {
        Some(start) => format!("{}…", start.escape_ascii()),
        None => bytes.escape_ascii().to_string(),
    }
}

/// Writes the marker and a JSON array in ASCII, without white space.
fn encode(path: &[Component]) -> String {
    let mut out = String::from(MARK);
    out.push('[');
    for (i, component) in path.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        match component {
            Component::Index(index) => out.push_str(&index.to_string()),
            Component::Key(key) => encode_key(key, &mut out),
        }
    }
    out.push(']');
    out
}

fn encode_key(key: &[u8], out: &mut String) {
    out.push('"');
    for unit in utf16_units(key) {
        match char::from_u32(u32::from(unit)) {
            Some('"') => out.push_str("\\\""),
            Some('\\') => out.push_str("\\\\"),
            Some('\u{8}') => out.push_str("\\b"),
            Some('\u{c}') => out.push_str("\\f"),
            Some('\n') => out.push_str("\\n"),
            Some('\r') => out.push_str("\\r"),
            Some('\t') => out.push_str("\\t"),
            Some(c @ ' '..='~') => out.push(c),
            // Writing to a String cannot fail.
            _ => drop(write!(out, "\\u{unit:04x}")),
        }
    }
    out.push('"');
}

/// The UTF-16 code units of UTF-8 that may hold surrogates.
fn utf16_units(bytes: &[u8]) -> Vec<u16> {
    let mut units = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((_, after)) = rest.split_first() {
        // UTF-8 proper has no such three bytes.
        if let [0xed, second @ 0xa0..=0xbf, third @ 0x80..=0xbf, tail @ ..] = rest {
            units.push(0xd000 | (u16::from(second & 0x3f) << 6) | u16::from(third & 0x3f));
            rest = tail;
            continue;
        }
        let valid = rest.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        units.extend(valid.encode_utf16());
        rest = if valid.is_empty() {
            units.push(0xfffd);
            after
        } else {
            rest.get(valid.len()..).unwrap_or(&[])
        };
    }
    units
}

/// Whether a key has two surrogates that would be read back as one character.
fn has_split_pair(key: &[u8]) -> bool {
    key.windows(6)
        .any(|six| matches!(six, [0xed, 0xa0..=0xaf, 0x80..=0xbf, 0xed, 0xb0..=0xbf, 0x80..=0xbf]))
}

/// Reads a JSON array of strings and non-negative integers.
struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t')) {
            self.at += 1;
        }
    }

    fn array(mut self) -> Result<Vec<Component>, String> {
        if self.text.bytes().any(|b| matches!(b, b'\n' | b'\r')) {
            return Err("line breaks are not allowed".to_owned());
        }
        if self.next() != Some(b'[') {
            return Err("expected `[`".to_owned());
        }
        let mut path = Vec::new();
        loop {
            self.space();
            path.push(match self.next() {
                Some(b'"') => Component::Key(self.string()?.into()),
                Some(digit @ b'0'..=b'9') => Component::Index(self.integer(digit)?),
                Some(b']') if path.is_empty() => return Err("Invalid empty tensor path".to_owned()),
                other => {
                    return Err(format!(
                        "expected a string or a non-negative integer, found {:?}",
                        other.map(char::from)
                    ));
                }
            });
            self.space();
            match self.next() {
                Some(b',') => {}
                Some(b']') if self.at == self.text.len() => return Ok(path),
                Some(b']') => return Err("expected nothing after `]`".to_owned()),
                other => {
                    return Err(format!("expected `,` or `]`, found {:?}", other.map(char::from)));
                }
            }
        }
    }

    fn integer(&mut self, first: u8) -> Result<u64, String> {
        let mut value = u64::from(first - b'0');
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            if first == b'0' {
                return Err("integers have no leading zeros".to_owned());
            }
            self.at += 1;
            value = value
                .checked_mul(10)
                .and_then(|v| v.checked_add(u64::from(digit - b'0')))
                .ok_or("index is beyond 64 bits")?;
        }
        if matches!(self.peek(), Some(b'.' | b'e' | b'E')) {
            return Err("expected an integer, found a float".to_owned());
        }
        Ok(value)
    }

    /// The rest of a string, up to its closing quote.
    fn string(&mut self) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        let mut pending: Option<u16> = None; // a high surrogate that waits for its low one
        loop {
            let byte = self.next().ok_or("the string does not end")?;
            let unit = match byte {
                b'"' => {
                    flush(&mut pending, &mut out);
                    return Ok(out);
                }
                b'\\' => match self.next() {
                    Some(c @ (b'"' | b'\\' | b'/')) => u16::from(c),
                    Some(b'b') => 8,
                    Some(b'f') => 12,
                    Some(b'n') => 10,
                    Some(b'r') => 13,
                    Some(b't') => 9,
                    Some(b'u') => self.hex()?,
                    other => return Err(format!("unknown escape {:?}", other.map(char::from))),
                },
                0..=0x1f => return Err(format!("control character {byte:#04x} is not escaped")),
                _ => {
                    flush(&mut pending, &mut out);
                    out.push(byte);
                    continue;
                }
            };
            match (pending.take(), unit) {
                (Some(high), 0xdc00..=0xdfff) => push_code_point(
                    0x10000 + ((u32::from(high) - 0xd800) << 10) + (u32::from(unit) - 0xdc00),
                    &mut out,
                ),
                (earlier, 0xd800..=0xdbff) => {
                    flush(&mut { earlier }, &mut out);
                    pending = Some(unit);
                }
                (earlier, _) => {
                    flush(&mut { earlier }, &mut out);
                    push_code_point(u32::from(unit), &mut out);
                }
            }
        }
    }

    fn hex(&mut self) -> Result<u16, String> {
        let digits = self.text.get(self.at..self.at + 4).ok_or("\\u needs four digits")?;
        if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(format!("\\u needs four hexadecimal digits, found {digits:?}"));
        }
        self.at += 4;
        u16::from_str_radix(digits, 16).map_err(|e| e.to_string())
    }
}

fn flush(pending: &mut Option<u16>, out: &mut Vec<u8>) {
    if let Some(unit) = pending.take() {
        push_code_point(u32::from(unit), out);
    }
}

/// Appends a code point, surrogates included, as UTF-8 would encode it.
fn push_code_point(point: u32, out: &mut Vec<u8>) {
    if let Some(c) = char::from_u32(point) {
        out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
    } else {
        let six = |shift: u32| 0x80 | u8::try_from((point >> shift) & 0x3f).unwrap_or(0);
        out.extend_from_slice(&[0xed, six(6), six(0)]);
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
    fn paths_come_back() {
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
    fn refused() {
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
