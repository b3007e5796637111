//! `.safetensors` files: eight bytes with the length of a header, the header in JSON, data.
//!
//! Files that the safetensors library refuses are refused here too: the data of tensors must be
//! contiguous, without holes or overlaps, and fill the file.

mod header;
mod layout;

pub(super) use header::StringMap;
pub use header::{SafetensorsHeader, parse};
pub use layout::{SafetensorsLayout, SafetensorsTensor};

use crate::error::Malformed;

/// Bytes of the length in front of the header.
pub const LENGTH_LEN: u64 = size_of::<u64>() as u64;
/// Maximum bytes of a header that is read, as in the library.
pub const MAX_HEADER_LEN: u64 = 100_000_000;
/// The member of a header that holds strings instead of a tensor.
const METADATA: &str = "__metadata__";

/// True if a file with these first bytes is a safetensors file, whatever the length of its header.
pub fn recognises(bytes: &[u8]) -> bool {
    // No header is as long as 2⁴⁰ bytes. A GGUF file of so many tensors looks the same.
    matches!(bytes, [_, _, _, _, _, 0, 0, 0, b'{', ..]) && !bytes.starts_with(b"GGUF")
}

/// The length of the header, from the first bytes of a file at `base`.
pub fn header_len(bytes: &[u8], base: u64) -> Result<u64, Malformed> {
    let short = || Malformed::new(base, "a safetensors file begins with the length of its header");
    let len = u64::from_le_bytes(*bytes.first_chunk().ok_or_else(short)?);
    if len > MAX_HEADER_LEN {
        let what = format!(
            "expected a safetensors header of at most {MAX_HEADER_LEN} bytes, found one of {len}"
        );
        return Err(Malformed::new(base, what));
    }
    Ok(len)
}
