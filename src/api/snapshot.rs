//! Copies of device memory in host memory.

use crate::cancel::Cancel;
use crate::engine::download::Downloader;
use crate::engine::workers;
use crate::error::{Error, Result};
use crate::mem::device::{DeviceBytes, StreamsByDevice};
use crate::mem::{ALIGNMENT, Arena, BufferToFill, Buffers, HostBuffer, SliceRemainder, fill_all};
use crate::stats::Counters;

/// Bytes of a job: large enough to keep several staging buffers busy, and small compared with a
/// model.
const JOB_LEN: usize = 64 << 20;

/// Copies device memory to host memory, after the work that is queued on the consumers' streams.
/// All copies have ended when it returns.
pub fn snapshot(sources: &[DeviceBytes], cancel: &dyn Cancel) -> Result<Vec<HostBuffer>> {
    // One after another, each aligned like torch's own allocations.
    let mut end = 0usize;
    let ranges = sources.iter().map(|bytes| {
        let (start, len) = (end.checked_next_multiple_of(ALIGNMENT)?, bytes.memory.size());
        end = start.checked_add(len)?;
        Some((start, len))
    });
    let ranges = ranges.collect::<Option<Vec<_>>>();
    let ranges = ranges.ok_or_else(|| Error::Bug("an endless snapshot".to_owned()))?;
    let mut arena = Arena::new(end)?;
    let mut jobs = Vec::new();
    let (bytes, filled) = arena.lend();
    let mut rest = SliceRemainder::new(bytes);
    for (source, &(start, len)) in sources.iter().zip(&ranges) {
        let destination = rest.cut(start, len)?;
        jobs.extend(
            (0..).step_by(JOB_LEN).zip(destination.chunks_mut(JOB_LEN)).map(|job| (source, job)),
        );
    }
    let streams = StreamsByDevice::open(sources.iter())?;
    let counters = Counters::default();
    workers::map(crate::cpu_count(), jobs, cancel, |(source, (from, to)), control| {
        let download = Downloader {
            counters: &counters,
            cancel: control,
            before_waiting: &|| Ok(()),
            share: None,
        };
        let (range, stream) = (from..from + to.len(), streams.next(source)?);
        let fill = |to: &mut Buffers<'_>| {
            download.each_chunk(source, range, stream, |_, chunk| {
                to.fill_from(chunk.as_ref());
                Ok(())
            })
        };
        fill_all(vec![BufferToFill::Lent(to, filled)], fill).map(drop)
    })?;
    arena.freeze(&ranges)
}
