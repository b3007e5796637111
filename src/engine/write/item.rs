//! What is to be written.

use super::origin::Origin;
use crate::codec::hash::SMALL;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;

/// A tensor with its place in the file.
pub struct Item<'a> {
    /// Its place.
    pub entry: &'a Entry,
    /// Number of the owning module.
    pub module_index: u16,
    /// Its bytes.
    pub origin: Origin<'a>,
}

impl Item<'_> {
    /// Whether the data are hashed chunk by chunk, and the header is written after them; else
    /// they are hashed at once, and written together with the header.
    pub fn is_large(&self) -> bool {
        self.entry.data_len > SMALL
    }

    /// Checks that there are as many bytes as the entry says.
    pub fn check(&self) -> Result<()> {
        match self.origin.size() {
            Some(found) if found != self.entry.data_len => Err(Error::InvalidArgument(format!(
                "tensor `{}` of {} {:?} has {} bytes, found {found}",
                self.entry.name, self.entry.dtype, self.entry.shape, self.entry.data_len
            ))),
            _ => Ok(()),
        }
    }
}
