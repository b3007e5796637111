//! Headers, decryption and hashes of the tensors of one call.

use std::sync::OnceLock;

use super::CompactHeader;
use super::decrypt::Decryptor;
use super::hash::{Digests, Verify};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::format::tensors::header::TensorHeader;
use crate::numbers::TensorNumber;

/// A callback for whole headers. They come in any order.
pub type HeaderCallback<'s> = &'s (dyn Fn(TensorNumber, &TensorHeader<'_>) -> Result<()> + Sync);

/// A check of the bytes of a header.
pub type HeaderCheck<'s> = Box<dyn Fn(&Entry, &[u8]) -> Result<()> + Sync + 's>;

/// The codec of a read: what is done with headers and data between the source and the destination.
pub struct TensorCodec<'s> {
    tensors: CodecTensors<'s>,
    compact_headers: Vec<OnceLock<CompactHeader>>,
}

/// The tensors of a codec, and what is done with them.
pub struct CodecTensors<'s> {
    /// The path or address of their file, for messages.
    pub uri: &'s str,
    /// Their entries.
    pub entries: &'s [&'s Entry],
    /// The hashes that are verified.
    pub verify: Verify,
    /// True if they are encrypted in the file.
    pub encrypted: bool,
    /// Decrypts them; None if they are left as they are.
    pub decryptor: Option<Decryptor<'s>>,
    /// Refuses the bytes of a header that its file must not have.
    pub check: HeaderCheck<'s>,
    /// Called with each header.
    pub on_header: HeaderCallback<'s>,
}

impl<'s> TensorCodec<'s> {
    /// Makes the codec.
    pub fn new(tensors: CodecTensors<'s>) -> Self {
        let compact_headers = tensors.entries.iter().map(|entry| {
            if entry.header_offset == entry.data_offset {
                OnceLock::from(CompactHeader::none())
            } else {
                OnceLock::new()
            }
        });
        TensorCodec { compact_headers: compact_headers.collect(), tensors }
    }

    /// The codec of bytes that are only read.
    pub fn none(uri: &'s str) -> Self {
        TensorCodec::new(CodecTensors {
            uri,
            entries: &[],
            verify: Verify::Nothing,
            encrypted: false,
            decryptor: None,
            check: Box::new(|_, _| Ok(())),
            on_header: &|_, _| Ok(()),
        })
    }

    /// True if data are decrypted.
    pub fn decrypts(&self) -> bool {
        self.tensors.decryptor.is_some()
    }

    /// Parses and checks the header of a tensor. Returns the bytes of it that hashes cover, if
    /// hashes are verified.
    pub fn header(&self, tensor: TensorNumber, raw: &[u8], cancel: &dyn Cancel) -> Result<Vec<u8>> {
        let CodecTensors { uri, verify, encrypted, decryptor, check, on_header, .. } =
            &self.tensors;
        let entry = tensor.of(self.tensors.entries)?;
        check(entry, raw)?;
        let header =
            TensorHeader::parse(raw, entry, *encrypted).map_err(|error| error.in_file(uri))?;
        on_header(tensor, &header)?;
        if let Some(decryptor) = decryptor {
            decryptor.add_header(tensor, &header, cancel)?;
        }
        let (compact, covered) = CompactHeader::of(&header, *verify != Verify::Nothing);
        tensor.of(&self.compact_headers)?.get_or_init(|| compact);
        Ok(covered)
    }

    /// Decrypts in place the data of a tensor from `start` on, which are whole pieces.
    pub fn decrypt(
        &self,
        tensor: TensorNumber,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let decryptor = self.tensors.decryptor.as_ref();
        decryptor.map_or(Ok(()), |decryptor| decryptor.decrypt(tensor, start, bytes, cancel))
    }

    /// Compares computed hashes of a tensor with those of its header.
    pub fn compare(&self, tensor: TensorNumber, digests: &Digests) -> Result<()> {
        let header = tensor.of(&self.compact_headers)?.get();
        let header = header.ok_or_else(|| Error::Bug(format!("no header of {tensor:?}")))?;
        let CodecTensors { entries, uri, verify, .. } = &self.tensors;
        header.verify(digests, tensor.of(entries)?, uri, *verify)
    }

    /// Returns the retained part of each header; that of a slice is empty.
    pub fn into_headers(self) -> Result<Vec<CompactHeader>> {
        let headers = self.compact_headers.into_iter().zip(self.tensors.entries);
        let headers = headers.map(|(header, entry)| match header.into_inner() {
            _ if entry.whole.is_some() => Ok(CompactHeader::none()),
            Some(header) => Ok(header),
            None => Err(Error::Bug(format!("tensor `{}` was not read", entry.name))),
        });
        headers.collect()
    }
}
