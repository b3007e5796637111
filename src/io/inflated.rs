//! An archive with deflated records, as if these were stored behind its end.

use std::io::{self, Read};
use std::sync::Arc;

use flate2::read::DeflateDecoder;

use super::{Capabilities, Facts, ReadAt, ServerFile};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::fallible::out_of_memory;
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

/// The archive, and behind its end the data of its deflated records. One reader takes these in their
/// order: only the last one is in memory.
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
        // The checksum is that of the archive, and has been compared.
        let of_archive = archive.facts().clone();
        let mut facts = Facts { len: Some(end), is_local: false, pin: None, ..of_archive };
        let server = facts.server.take().unwrap_or_else(ServerFile::default);
        let fallback = Arc::new(ForkSafeMutex::new(Some(why.to_owned())));
        facts.server = Some(ServerFile { fallback, checksum: None, ..server });
        InflatedSource { archive, facts, records, last: ForkSafeMutex::default() }
    }

    fn inflate(&self, record: &DeflatedRecord, cancel: &dyn Cancel) -> Result<Vec<u8>> {
        let DeflatedRecord { len, packed_at, packed, .. } = *record;
        let end = packed_at.saturating_add(packed);
        let mut source = Packed { archive: &*self.archive, at: packed_at, end, cancel };
        let buffer = vec![0; to_usize(packed.clamp(1, STEP))];
        let mut bytes = Vec::new();
        let mut inflated =
            DeflateDecoder::new_with_buf(&mut source, buffer).take(len.saturating_add(1));
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
        let uri = self.archive.uri();
        let found = match read {
            Ok(found) if found as u64 == len => return Ok(bytes),
            Ok(found) => found.to_string(),
            Err(error) => match error.downcast::<Error>() {
                Ok(error) => return Err(error),
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                    return Err(out_of_memory(len, format!("a deflated record of `{uri}`")));
                }
                Err(error) => error.to_string(),
            },
        };
        let what = format!("a deflated record is damaged: expected {len} bytes, found {found}");
        Err(Error::Format { uri: uri.to_owned(), offset: packed_at, what })
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
}

impl Read for Packed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = buffer.len().min(to_usize(self.end - self.at));
        let mut into = Buffers::from_slice(buffer.get_mut(..len).unwrap_or(&mut []));
        let read = self.archive.read_at(self.at, &mut into, self.cancel);
        let read = read.map_err(io::Error::other)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::DeflateEncoder;

    use super::*;
    use crate::cancel::Never;
    use crate::io::MemorySource;

    #[test]
    fn a_cancelled_call_is_no_damage() {
        let data = vec![7; 1000];
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&data).unwrap();
        let archive = encoder.finish().unwrap();
        let packed = archive.len() as u64;
        let read = |len: u64, cancel: &dyn Cancel| {
            let archive = Arc::new(MemorySource::new(archive.clone(), "archive"));
            let record = DeflatedRecord { at: packed, len, packed_at: 0, packed };
            let source = InflatedSource::new(archive, packed + len, vec![record]);
            let mut found = vec![0; 1000];
            source.read_at(packed, &mut Buffers::from_slice(&mut found), cancel).map(|_| found)
        };
        assert_eq!(read(1000, &Never).unwrap(), data);
        let stopped = || Err(Error::Cancelled);
        assert!(matches!(read(1000, &stopped), Err(Error::Cancelled)));
        let damaged = read(999, &Never).unwrap_err().to_string();
        assert!(damaged.contains("expected 999 bytes, found 1000"), "{damaged}");
    }
}
