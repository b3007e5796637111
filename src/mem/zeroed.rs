//! Memory of a length that a file gives.

use crate::error::{Error, Result};

/// So many zeros, or an error that says what they are for.
pub fn zeroed(len: usize, what: impl FnOnce() -> String) -> Result<Box<[u8]>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        bytes: len as u64,
        what: what(),
        error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
    })?;
    bytes.resize(len, 0);
    Ok(bytes.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks for more memory than Miri has")]
    fn lengths_beyond_memory_are_errors() {
        let most = isize::MAX.unsigned_abs();
        let error = zeroed(most, || "a header".to_owned()).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("for a header")));
        assert_eq!(zeroed(3, String::new).ok().as_deref(), Some(&[0, 0, 0][..]));
    }
}
