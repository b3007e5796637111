//! A helper for the tests of several modules.

/// Bytes that differ by seed, and that begin again where no buffer and no batch does.
pub fn pattern(len: usize, seed: usize) -> Vec<u8> {
    let once: Vec<u8> =
        (0..4099).map(|at| (at * 31 + at / 255 + seed * 7).to_le_bytes()[0]).collect();
    let mut bytes = once.repeat(len / once.len() + 1);
    bytes.truncate(len);
    bytes
}
