//! The request of a read, and the interface of a format to the engine.

use super::landing::Receiver;
use super::plan::Extent;
use crate::cancel::Cancel;
use crate::codec::hash::{Digests, Verify};
use crate::error::Result;
use crate::io::ReadAt;
use crate::memory_limit::MemoryLimit;

/// The format of headers and data. Tensors are numbered as their extents are.
pub trait Codec: Sync {
    /// Takes a tensor's header, which it checks.
    fn header(&self, tensor: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<Begun>;

    /// Decrypts data from `start` on where they lie. False if that is not possible in chunks.
    fn decrypt(
        &self,
        tensor: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool>;

    /// Compares the hashes of a tensor.
    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()>;
}

/// The facts in a header that the engine needs.
pub struct Begun {
    /// The bytes of it that hashes cover, if they are to be verified.
    pub covered: Vec<u8>,
    /// True if the tensor's data can be decrypted in chunks, or need not be.
    pub in_chunks: bool,
}

/// The request of a read.
pub struct Reading<'r> {
    /// The files that the bytes come from.
    pub files: &'r [&'r dyn ReadAt],
    /// The data of each tensor, in rising order of files and positions.
    pub extents: &'r [Extent],
    /// The format of headers and data.
    pub codec: &'r dyn Codec,
    /// The hashes that are verified.
    pub verify: Verify,
    /// True if data are decrypted.
    pub decrypts: bool,
    /// Readers at once, if the caller wants so many.
    pub readers: Option<usize>,
    /// The limit of bytes in flight beside the memory of the tensors.
    pub memory: MemoryLimit,
    /// True if other processes of this machine load the same files at the same time.
    pub shares_cache: bool,
    /// The receiver of tensors as they land, if they are handed out one by one, and for each extent the
    /// tensor that it is a part of.
    pub receiver: Option<(&'r dyn Receiver, &'r [usize])>,
}
