//! An archive with deflated records, as if these were stored behind its end.

use std::io::{self, Read};
use std::sync::Arc;

use flate2::read::DeflateDecoder;

use super::{Capabilities, Facts, ReadAt, ServerFile};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::Buffers;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::to_usize;

/// The most compressed bytes that are read at once.
const STEP: u64 = 8 << 20;

/// A deflated record.
pub struct DeflatedRecord {
    /// The position that its data have in the source.
    pub at: u64,
    /// Bytes of its data.
    pub len: u64,
    /// The position of its compressed data in the archive.
    pub packed_at: u64,
    /// Bytes of these.
    pub packed: u64,
}

/// One reader takes the records in their order, and only the last one is in memory.
pub struct InflatedSource {
    archive: Arc<dyn ReadAt>,
    facts: Facts,
    records: Vec<DeflatedRecord>,
    /// The position of a record in this source, and its bytes.
    last: ForkSafeMutex<(u64, Vec<u8>)>,
}

impl InflatedSource {
    /// `records`: one after another, behind the archive. `end`: the position after the last.
    pub fn new(archive: Arc<dyn ReadAt>, end: u64, records: Vec<DeflatedRecord>) -> Self {
        let why = "some records of the archive are deflated, so that one thread reads it";
        // The checksum is that of the archive.
        let pin = None;
        let mut facts = Facts { len: Some(end), is_local: false, pin, ..archive.facts().clone() };
        let server = facts.server.take().unwrap_or_else(ServerFile::default);
        let fallback = Arc::new(ForkSafeMutex::new(Some(why.to_owned())));
        facts.server = Some(ServerFile { fallback, checksum: None, ..server });
        InflatedSource { archive, facts, records, last: ForkSafeMutex::default() }
    }

    fn inflate(&self, record: &DeflatedRecord, cancel: &dyn Cancel) -> Result<Vec<u8>> {
        let DeflatedRecord { len, packed_at, packed, .. } = *record;
        let end = packed_at.saturating_add(packed);
        let mut source =
            Packed { archive: &*self.archive, at: packed_at, end, cancel, error: None };
        let buffer = vec![0; to_usize(packed.clamp(1, STEP))];
        let mut bytes = Vec::new();
        let mut inflated = DeflateDecoder::new_with_buf(&mut source, buffer).take(len + 1);
        let mut step = || {
            cancel.check().map_err(io::Error::other)?;
            inflated.by_ref().take(STEP).read_to_end(&mut bytes)
        };
        let read = loop {
            match step() {
                Ok(0) => break Ok(bytes.len()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        match (source.error, read) {
            (Some(error), _) => Err(error),
            (None, Ok(found)) if found as u64 == len => Ok(bytes),
            (None, read) => {
                let found = read.map_or_else(|error| error.to_string(), |found| format!("{found}"));
                let what =
                    format!("a deflated record is damaged: expected {len} bytes, found {found}");
                Err(Error::Format { uri: self.archive.uri().to_owned(), offset: packed_at, what })
            }
        }
    }
}

impl ReadAt for InflatedSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        let (max_readers, initial_readers, max_auto_readers) = (1, 1, 1);
        let of_archive = self.archive.capabilities();
        Capabilities { max_readers, initial_readers, max_auto_readers, ..of_archive }
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let before = self.records.partition_point(|record| record.at <= offset);
        let Some(record) = before.checked_sub(1).and_then(|last| self.records.get(last)) else {
            return self.archive.read_at(offset, into, cancel);
        };
        // Taken out, so that nothing waits for the archive under the lock.
        let (mut at, mut bytes) = std::mem::take(&mut *self.last.lock());
        if at != record.at {
            // The memory of the last one is given back first.
            drop(std::mem::take(&mut bytes));
            (at, bytes) = (record.at, self.inflate(record, cancel)?);
        }
        let from = to_usize(offset - at);
        let read = into.fill_from(bytes.get(from..).unwrap_or(&[]));
        if from.saturating_add(read) < bytes.len() {
            *self.last.lock() = (at, bytes);
        }
        Ok(read)
    }
}

/// The compressed bytes of a record.
struct Packed<'a> {
    archive: &'a dyn ReadAt,
    at: u64,
    end: u64,
    cancel: &'a dyn Cancel,
    error: Option<Error>,
}

impl Read for Packed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = buffer.len().min(to_usize(self.end - self.at));
        let mut into = Buffers::from_slice(buffer.get_mut(..len).unwrap_or(&mut []));
        let read = self.archive.read_at(self.at, &mut into, self.cancel).map_err(|error| {
            self.error = Some(error);
            io::Error::other("the archive cannot be read")
        })?;
        self.at += read as u64;
        Ok(read)
    }
}
