//! Headers of tensors, which the read engine passes to the codec of their format.

use std::sync::OnceLock;

use super::file::TensorFile;
use super::selection::Selection;
use crate::cancel::Cancel;
use crate::codec::CompactHeader;
use crate::codec::crypt::PIECE_LEN;
use crate::codec::decrypt::{Decryptor, cipher, decryption_failed};
use crate::codec::hash::{Digests, Verify};
use crate::engine::read::{Codec, HeaderInfo, ReadRequest, read};
use crate::engine::target::host::HostTarget;
use crate::error::{Error, Result};
use crate::fallible::{LISTS, try_collect, try_collect_results, try_zeroed};
use crate::format::catalog::Entry;
use crate::format::tensors::header::TensorHeader;
use crate::io::{ReadAt, as_refs, read_exact_at};
use crate::mem::Buffers;
use crate::memory_limit::MemoryLimit;
use crate::stats::Counters;

/// A callback for whole headers, each with the position of its tensor in the caller's order. They
/// come in any order.
pub type HeaderCallback<'s> = &'s (dyn Fn(usize, &TensorHeader<'_>) -> Result<()> + Sync);

/// The codec of a `.tensors` file, for the tensors of one call.
pub struct HeaderCodec<'s> {
    selection: &'s Selection<'s>,
    verify: Verify,
    decryptor: Option<Decryptor<'s>>,
    compact_headers: Vec<OnceLock<CompactHeader>>,
    on_header: HeaderCallback<'s>,
}

impl<'s> HeaderCodec<'s> {
    /// Makes the codec of a load. `on_header` is called with each header.
    pub fn new(
        selection: &'s Selection<'s>,
        verify: Verify,
        on_header: HeaderCallback<'s>,
    ) -> Result<Self> {
        let file = selection.file;
        let decryptor = file
            .decryption()
            .map(|options| Decryptor::new(options, file.uri(), &selection.entries))
            .transpose()?;
        let compact_headers = selection.entries.iter().map(|entry| match entry.header_offset {
            at if at == entry.data_offset => OnceLock::from(CompactHeader::none()),
            _ => OnceLock::new(),
        });
        let compact_headers = try_collect(compact_headers, LISTS)?;
        Ok(HeaderCodec { selection, verify, decryptor, compact_headers, on_header })
    }

    /// True if data are decrypted.
    pub fn decrypts(&self) -> bool {
        self.decryptor.is_some()
    }

    fn entry(&self, tensor: usize) -> Result<&'s Entry> {
        let entry = self.selection.entries.get(tensor).copied();
        entry.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    fn compact_header(&self, tensor: usize) -> Result<&CompactHeader> {
        let compact = self.compact_headers.get(tensor).and_then(OnceLock::get);
        compact.ok_or_else(|| Error::Bug(format!("no header {tensor}")))
    }

    /// Decrypts and verifies all data of a tensor whose header has arrived.
    pub fn decrypt_and_verify(
        &self,
        tensor: usize,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<()> {
        if let Some(decryptor) = &self.decryptor {
            decryptor.decrypt_whole(tensor, bytes, cancel)?;
        }
        if self.verify == Verify::Nothing {
            return Ok(());
        }
        let mut hash = self.compact_header(tensor)?.start_hash();
        hash.update_large(bytes, cancel)?;
        self.compare(tensor, &hash.finish())
    }

    /// Returns the retained part of each header, in the caller's order.
    pub fn into_headers(self) -> Result<Vec<CompactHeader>> {
        let compact = self.compact_headers.into_iter().zip(&self.selection.entries).map(
            |(compact, entry)| {
                let compact = compact.into_inner();
                compact.ok_or_else(|| Error::Bug(format!("tensor `{}` was not read", entry.name)))
            },
        );
        self.selection.to_caller_order(try_collect_results(compact, LISTS)?)
    }
}

impl Codec for HeaderCodec<'_> {
    fn header(&self, tensor: usize, raw: &[u8], cancel: &dyn Cancel) -> Result<HeaderInfo> {
        let (file, entry) = (self.selection.file, self.entry(tensor)?);
        file.check_header(entry, raw)?;
        let header = TensorHeader::parse(raw, entry, file.is_encrypted())
            .map_err(|e| e.in_file(file.uri()))?;
        let position = self.selection.order().get(tensor);
        (self.on_header)(
            *position.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?,
            &header,
        )?;
        let in_chunks = match &self.decryptor {
            Some(decryptor) => decryptor.add_header(tensor, &header, cancel)?,
            None => true,
        };
        let (compact, covered) = CompactHeader::of(&header, self.verify != Verify::Nothing);
        let slot = self.compact_headers.get(tensor);
        slot.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?.get_or_init(|| compact);
        Ok(HeaderInfo { covered, in_chunks })
    }

    fn decrypt(
        &self,
        tensor: usize,
        start: u64,
        bytes: &mut [u8],
        cancel: &dyn Cancel,
    ) -> Result<bool> {
        match &self.decryptor {
            Some(decryptor) => decryptor.decrypt_chunk(tensor, start, bytes, cancel),
            None => Ok(true),
        }
    }

    fn compare(&self, tensor: usize, digests: &Digests) -> Result<()> {
        let entry = self.entry(tensor)?;
        self.compact_header(tensor)?.verify(digests, entry, self.selection.file.uri(), self.verify)
    }
}

/// Reads only the headers of tensors, given by number.
pub fn read_headers(
    file: &TensorFile,
    numbers: &[usize],
    cancel: &dyn Cancel,
) -> Result<Vec<CompactHeader>> {
    visit_headers(file, numbers, cancel, &|_, _| Ok(()))
}

/// Reads headers as [`read_headers`] does, and passes each to `on_header` as a whole while it is in
/// memory. If a local copy of the file is damaged, headers are passed once more.
pub fn visit_headers(
    file: &TensorFile,
    numbers: &[usize],
    cancel: &dyn Cancel,
    on_header: HeaderCallback<'_>,
) -> Result<Vec<CompactHeader>> {
    file.with_intact_copies(cancel, || visit_headers_once(file, numbers, cancel, on_header))
}

/// The same for a caller that handles damaged copies itself: each header is passed once.
pub fn visit_headers_once(
    file: &TensorFile,
    numbers: &[usize],
    cancel: &dyn Cancel,
    on_header: HeaderCallback<'_>,
) -> Result<Vec<CompactHeader>> {
    let selection = Selection::new(file, numbers)?;
    let mut extents = selection.extents()?;
    extents.iter_mut().for_each(|extent| extent.data_len = 0);
    let (sources, headers) =
        (file.sources(), HeaderCodec::new(&selection, Verify::Nothing, on_header)?);
    let reading = ReadRequest {
        files: &as_refs(&sources),
        extents: &extents,
        codec: &headers,
        verify: Verify::Nothing,
        decrypts: false,
        readers: None,
        memory: MemoryLimit::default(),
        shares_cache: false,
        receiver: None,
    };
    read(&reading, &mut HostTarget::new(Vec::new(), Vec::new()), &Counters::default(), cancel)?;
    headers.into_headers()
}

/// Decrypts the first piece of the smallest tensor, so that a wrong key is found before everything
/// has been read. A key that has worked once is not tried again.
pub fn try_key(selection: &Selection<'_>, cancel: &dyn Cancel) -> Result<()> {
    let file = selection.file;
    let Some(options) = file.decryption().filter(|_| !file.key_fits()) else { return Ok(()) };
    let source = file.source(0)?;
    if source.capabilities().len.is_none() {
        // The source can be read only once.
        return Ok(());
    }
    // Slices are left out: their entries have the slice's shape, and their headers that of the
    // whole tensor.
    let sealed = selection.entries.iter();
    let sealed = sealed.filter(|entry| entry.data_len > 0 && entry.whole.is_none());
    let Some(entry) = sealed.min_by_key(|entry| entry.data_len) else { return Ok(()) };
    let uri = file.uri();
    let raw = read_range(&*source, entry.header_offset, entry.data_offset, cancel)?;
    file.check_header(entry, &raw)?;
    let header = TensorHeader::parse(&raw, entry, true).map_err(|e| e.in_file(uri))?;
    let Some((pieces, key)) = cipher(&header, entry, options, uri, cancel)? else { return Ok(()) };
    let (_, _, end) = pieces.piece(0);
    if end > PIECE_LEN {
        // The piece is too long to be read twice.
        return Ok(());
    }
    let mut bytes =
        read_range(&*source, entry.data_offset, entry.data_offset.saturating_add(end), cancel)?;
    if !pieces.decrypt(0, &mut bytes, &key) {
        return Err(decryption_failed(entry, uri));
    }
    file.set_key_fits();
    Ok(())
}

fn read_range(source: &dyn ReadAt, start: u64, end: u64, cancel: &dyn Cancel) -> Result<Box<[u8]>> {
    let len = usize::try_from(end.saturating_sub(start)).unwrap_or(usize::MAX);
    let what = || "tensors".to_owned();
    let mut bytes = try_zeroed(len, what)?;
    read_exact_at(source, start, &mut Buffers::from_slice(&mut bytes), &what, cancel)?;
    Ok(bytes)
}
