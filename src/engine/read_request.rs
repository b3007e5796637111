//! The request of a read.

use super::completion::TensorReceiver;
use super::destination::direct_storage::DirectStorage;
use super::load_options::LoadOptions;
use super::plan::ReadPlan;
use crate::codec::TensorCodec;
use crate::io::ReadAt;

/// The request of a read.
#[derive(Clone, Copy)]
pub struct ReadRequest<'r> {
    /// The files that the bytes come from.
    pub files: &'r [&'r dyn ReadAt],
    /// Which of their bytes are read.
    pub plan: &'r ReadPlan<'r>,
    /// The work on them: decryption and hashes.
    pub codec: &'r TensorCodec<'r>,
    /// The options of the load.
    pub options: &'r LoadOptions,
    /// The receiver of complete tensors, if they are handed out one by one.
    pub receiver: Option<&'r dyn TensorReceiver>,
    /// The files that a device reads itself, without host memory.
    pub direct: Option<&'r DirectStorage<'r>>,
}
