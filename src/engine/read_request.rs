//! The request of a read, and the interface of a format to the engine.

use super::completion::TensorReceiver;
use super::plan::Extent;
use crate::cancel::Cancel;
use crate::codec::hash::{Digests, Verify};
use crate::error::Result;
use crate::io::ReadAt;
use crate::memory_limit::MemoryLimit;

/// The format of headers and data. Tensors are numbered as their extents are.
pub trait Codec: Sync {
    /// Parses and checks a tensor's header.
    fn header(&self, tensor: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<HeaderInfo>;

    /// Decrypts in place the data of a tensor from `start` on. Returns false if the data cannot be
    /// decrypted in chunks.
    fn decrypt(
        &self,
        tensor: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool>;

    /// Compares computed hashes of a tensor with the stored ones.
    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()>;
}

/// The facts in a header that the engine needs.
pub struct HeaderInfo {
    /// The header bytes that the hashes cover, if hashes are verified.
    pub covered: Vec<u8>,
    /// True if the tensor's data can be decrypted in chunks, or need not be.
    pub in_chunks: bool,
}

/// The request of a read.
pub struct ReadRequest<'r> {
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
    /// The number of readers, if the caller sets it.
    pub readers: Option<usize>,
    /// The limit on memory in use besides that of the tensors.
    pub memory: MemoryLimit,
    /// True if other processes of this machine load the same files at the same time.
    pub shares_cache: bool,
    /// The receiver of complete tensors, if they are handed out one by one, and for each extent the
    /// tensor that it is a part of.
    pub receiver: Option<(&'r dyn TensorReceiver, &'r [usize])>,
}
