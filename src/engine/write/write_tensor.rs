//! The tensors of a save.

use super::tensor_data::TensorData;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;

/// A tensor with its location in the file.
pub struct WriteTensor<'a> {
    /// Its metadata and location.
    pub entry: &'a Entry,
    /// Index of the module that owns it.
    pub module_index: u16,
    /// The origin of its bytes.
    pub data: TensorData<'a>,
}

impl WriteTensor<'_> {
    /// Checks that there are as many bytes as the entry says.
    pub fn check(&self) -> Result<()> {
        match self.data.size() {
            Some(found) if found != self.entry.data_len => Err(Error::InvalidArgument(format!(
                "tensor `{}` of {} {:?} needs {} bytes, but its data have {found}",
                self.entry.name, self.entry.dtype, self.entry.shape, self.entry.data_len
            ))),
            _ => Ok(()),
        }
    }
}
