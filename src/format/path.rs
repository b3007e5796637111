//! Paths as JSON: encoding and parsing.

use std::fmt::Write as _;

/// The first character of a stored path.
pub(super) const MARK: char = '\u{1e}';

/// One step of a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Component {
    /// A mapping's key, in UTF-8. JSON can also spell lone surrogates, which are stored as UTF-8
    /// would encode them.
    Key(Box<[u8]>),
    /// A list's index.
    Index(u64),
}

/// Writes the marker and a JSON array in ASCII, without white space.
pub(super) fn encode(path: impl IntoIterator<Item = Component>) -> String {
    let mut out = String::from(MARK);
    out.push('[');
    for (i, component) in path.into_iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        match component {
            // Writing to a String cannot fail.
            Component::Index(index) => drop(write!(out, "{index}")),
            Component::Key(key) => encode_key(&key, &mut out),
        }
    }
    out.push(']');
    out
}

/// Writes a key as a JSON string in ASCII.
pub(super) fn encode_key(key: &[u8], out: &mut String) {
    out.push('"');
    let verbatim = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    if key.iter().all(verbatim)
        && let Ok(text) = std::str::from_utf8(key)
    {
        out.push_str(text);
    } else {
        escape(key, out);
    }
    out.push('"');
}

fn escape(key: &[u8], out: &mut String) {
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
            _ => drop(write!(out, "\\u{unit:04x}")),
        }
    }
}

/// True if a well-formed array, without the marker, certainly is in the form that [`encode`]
/// writes. False for arrays with escapes, and for those of one string, which may have a plain form.
pub(super) fn is_encoded(json: &str) -> bool {
    let (mut in_string, mut steps) = (false, 1);
    for byte in json.bytes() {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' => return false,
            b' ' if !in_string => return false,
            b' '..=b'~' => steps += usize::from(byte == b',' && !in_string),
            _ => return false,
        }
    }
    steps > 1 || !json.starts_with("[\"")
}

/// The UTF-16 code units of UTF-8 that may contain surrogates.
fn utf16_units(bytes: &[u8]) -> Vec<u16> {
    let mut units = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((_, after)) = rest.split_first() {
        // Three bytes that encode a surrogate, which valid UTF-8 never has.
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
            rest.split_at(valid.len()).1
        };
    }
    units
}

/// True if a key has two adjacent surrogates that would be read back as one character.
pub(super) fn has_split_pair(key: &[u8]) -> bool {
    key.windows(6)
        .any(|six| matches!(six, [0xed, 0xa0..=0xaf, 0x80..=0xbf, 0xed, 0xb0..=0xbf, 0x80..=0xbf]))
}

/// Parses a JSON array of strings and non-negative integers step by step, up to the first error.
pub(super) struct Steps<'a> {
    text: &'a str,
    at: usize,
    ended: bool,
}

impl Iterator for Steps<'_> {
    type Item = Result<Component, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let step = self.step();
        self.ended |= step.is_err();
        Some(step)
    }
}

impl<'a> Steps<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Steps { text, at: 0, ended: false }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t')) {
            self.at += 1;
        }
    }

    fn step(&mut self) -> Result<Component, String> {
        let first = self.at == 0;
        if first {
            if self.text.bytes().any(|b| matches!(b, b'\n' | b'\r')) {
                return Err("line breaks are not allowed".to_owned());
            }
            if self.byte() != Some(b'[') {
                return Err("expected `[`".to_owned());
            }
        }
        self.space();
        let step = match self.byte() {
            Some(b'"') => Component::Key(self.string()?.into()),
            Some(digit @ b'0'..=b'9') => Component::Index(self.integer(digit)?),
            Some(b']') if first => return Err("Invalid empty tensor path".to_owned()),
            other => {
                return Err(format!(
                    "expected a string or a non-negative integer, found {:?}",
                    other.map(char::from)
                ));
            }
        };
        self.space();
        match self.byte() {
            Some(b',') => {}
            Some(b']') if self.at == self.text.len() => self.ended = true,
            Some(b']') => return Err("expected nothing after `]`".to_owned()),
            other => {
                return Err(format!("expected `,` or `]`, found {:?}", other.map(char::from)));
            }
        }
        Ok(step)
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

    /// Parses the rest of a string, up to its closing quote.
    fn string(&mut self) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        let mut pending: Option<u16> = None; // a high surrogate that waits for its low one
        loop {
            let byte = self.byte().ok_or("the string does not end")?;
            let unit = match byte {
                b'"' => {
                    flush(&mut pending, &mut out);
                    return Ok(out);
                }
                b'\\' => match self.byte() {
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
                    let rest = self.text.as_bytes().split_at(self.at - 1).1;
                    let special = |b: &u8| matches!(b, b'"' | b'\\' | 0..=0x1f);
                    let verbatim = rest.split(special).next().unwrap_or(rest);
                    out.extend_from_slice(verbatim);
                    self.at += verbatim.len() - 1;
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
