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

    /// A byte string of fixed size.
    pub fn fixed<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Malformed> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, field)?);
        Ok(out)
    }

    /// Creates an error at the position of the next byte.
    pub fn error(&self, what: impl Into<String>) -> Malformed {
        Malformed::new(self.offset(), what)
    }
}

macro_rules! integers {
    ($($integer:ident),+) => {
        impl Cursor<'_> {
            $(
                #[doc = concat!("A little-endian `", stringify!($integer), "`.")]
                pub fn $integer(&mut self, field: &str) -> Result<$integer, Malformed> {
                    Ok($integer::from_le_bytes(self.fixed(field)?))
                }
            )+
        }
    };
}

integers!(u8, u16, u32, i32, u64);
