//! Files that the device reads by itself, once that was found to give the right bytes.

use std::io::IoSliceMut;
use std::sync::Arc;

use super::Pass;
use super::reader::Reader;
use crate::api::load::Verify;
use crate::cancel::Cancel;
use crate::engine::fill::header_memory;
use crate::engine::plan::{Batch, SegmentKind, Target};
use crate::error::{Error, Result};
use crate::io::source::{ReadAt, read_exact_at};
use crate::mem::device::{DeviceFile, Streams};
use crate::stats::Stage;

/// Bytes that are read both ways before the device is trusted.
const TRIED: usize = 1 << 20;

/// The file as the device reads it; None where it cannot, or where it gave other bytes.
pub fn open(
    pass: &Pass<'_>,
    source: &dyn ReadAt,
    streams: &Streams,
    cancel: &dyn Cancel,
) -> Result<Option<Box<dyn DeviceFile>>> {
    let plain = pass.verify == Verify::Nothing && pass.file.decryption().is_none();
    let Some(file) = source.file().filter(|_| pass.to.direct_storage) else { return Ok(None) };
    if !plain {
        pass.counters.fallback("GPUDirect Storage neither verifies nor decrypts");
        return Ok(None);
    }
    let Some(found) = Arc::clone(pass.to.device).file(file) else {
        pass.counters.fallback("GPUDirect Storage is not there, or not for this file system");
        return Ok(None);
    };
    // It knows no streams: whatever the memory was used for before must have ended.
    streams.finish()?;
    if !gives_the_same(pass, source, streams, &*found, cancel)? {
        pass.counters.fallback("GPUDirect Storage gave other bytes than a plain read: not used");
        return Ok(None);
    }
    pass.counters.reading("GPUDirect Storage");
    Ok(Some(found))
}

fn gives_the_same(
    pass: &Pass<'_>,
    source: &dyn ReadAt,
    streams: &Streams,
    file: &dyn DeviceFile,
    cancel: &dyn Cancel,
) -> Result<bool> {
    let largest = pass.entries.iter().enumerate().max_by_key(|(_, entry)| entry.data_len);
    let Some((tensor, entry)) = largest.filter(|(_, entry)| entry.data_len > 0) else {
        return Ok(true);
    };
    let most = TRIED.min(pass.pool.unit_len());
    let len = usize::try_from(entry.data_len).unwrap_or(usize::MAX).min(most);
    let target = pass.to.targets.get(tensor).ok_or_else(|| Error::Bug("no target".to_owned()))?;
    let block = pass.block(target)?;
    if read_to(pass, file, target, len, entry.data_offset).is_err() {
        return Ok(false);
    }
    let mut lease = pass.pool.enter().lease(1, pass.to.device, cancel)?;
    lease.download(streams.next(), (0, 0, len), block, target.offset)?;
    lease.wait(cancel)?;
    let mut plain = vec![0; len];
    let what = || "tensors".to_owned();
    read_exact_at(source, entry.data_offset, &mut [IoSliceMut::new(&mut plain)], &what, cancel)?;
    Ok(lease.units().first().and_then(|unit| unit.get(..len)) == Some(plain.as_slice()))
}

/// Has the device read bytes of the file to a place in its memory.
fn read_to(
    pass: &Pass<'_>,
    file: &dyn DeviceFile,
    to: &Target,
    len: usize,
    position: u64,
) -> Result<()> {
    let block = pass.block(to)?;
    let mut done = 0;
    while done < len {
        let at = position + done as u64;
        let read = block.read_from(file, to.offset + done, len - done, at);
        match read.map_err(|error| Error::io("reading", pass.file.uri(), error))? {
            0 => {
                return Err(Error::Truncated {
                    uri: pass.file.uri().to_owned(),
                    what: "tensors".to_owned(),
                    start: position,
                    end: position + len as u64,
                    size: at,
                });
            }
            read => done += read.min(len - done),
        }
    }
    Ok(())
}

impl Reader<'_, '_> {
    /// Has the device read the data of a part; headers are read as ever.
    pub fn part_by_device(&mut self, part: &Batch, file: &dyn DeviceFile) -> Result<()> {
        let pass = self.pass;
        let mut position = part.offset;
        for piece in &part.segments {
            match piece.kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { tensor } => {
                    let len = usize::try_from(piece.len);
                    let len = len.map_err(|_| Error::Bug("a header's length".to_owned()))?;
                    let entry = pass.entry(pass.tensor(tensor)?)?;
                    let mut raw = header_memory(len, entry)?;
                    let mut buffers = [IoSliceMut::new(&mut raw)];
                    let what = || "tensors".to_owned();
                    read_exact_at(self.source, position, &mut buffers, &what, self.control)?;
                    self.header(pass.tensor(tensor)?, raw)?;
                }
                SegmentKind::Data { tensor, start } => {
                    let target = pass.target(tensor)?;
                    let size =
                        |n: u64| usize::try_from(n).map_err(|_| Error::Bug(format!("{n} bytes")));
                    let to = Target { offset: target.offset + size(start)?, ..target };
                    let len = size(piece.len)?;
                    let read = || read_to(pass, file, &to, len, position);
                    pass.counters.time(Stage::Read, read)?;
                    pass.counters.bytes(piece.len);
                }
            }
            position += piece.len;
        }
        Ok(())
    }
}
