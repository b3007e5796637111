//! A bounds-checked cursor over bytes of a file, which knows their file position for error
//! messages.

use crate::error::Malformed;

/// Reads little-endian fields front to back.
#[derive(Clone)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    base: u64,
    what: &'static str,
}

impl<'a> Cursor<'a> {
    /// Creates a cursor. `base` is the file position of `bytes[0]`; `what` names the record in
    /// messages.
    pub fn new(bytes: &'a [u8], base: u64, what: &'static str) -> Self {
        Cursor { bytes, position: 0, base, what }
    }

    /// Bytes consumed so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// File position of the next byte.
    pub fn offset(&self) -> u64 {
        self.base.saturating_add(u64::try_from(self.position).unwrap_or(u64::MAX))
    }

    /// Bytes not yet consumed.
    pub fn remaining(&self) -> &'a [u8] {
        self.bytes.split_at(self.position).1
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], Malformed> {
        let rest = self.remaining();
        let field = rest.get(..len).ok_or_else(|| {
            self.error(format!(
                "the {} ends inside its {field}: expected {len} bytes, found {}",
                self.what,
                rest.len()
            ))
        })?;
        self.position += len;
        Ok(field)
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Malformed> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, field)?);
        Ok(out)
    }

    /// One byte.
    pub fn u8(&mut self, field: &str) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    /// Two bytes.
    pub fn u16(&mut self, field: &str) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    /// Four bytes.
    pub fn u32(&mut self, field: &str) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    /// Four bytes, signed.
    pub fn i32(&mut self, field: &str) -> Result<i32, Malformed> {
        Ok(i32::from_le_bytes(self.array(field)?))
    }

    /// Eight bytes.
    pub fn u64(&mut self, field: &str) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A byte string of fixed size.
    pub fn fixed<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Malformed> {
        self.array(field)
    }

    /// Creates an error at the position of the next byte.
    pub fn error(&self, what: impl Into<String>) -> Malformed {
        Malformed::new(self.offset(), what)
    }
}
