//! Bytes that had to be brought into host memory, on their way to a device.

use super::Destination;
use crate::buffer::pinned::Pool;
use crate::device::Streams;
use crate::error::{Error, Result};
use crate::stats::{Counters, Stage};
use crate::workers::Interrupt;

/// Copies bytes of host memory to a device, each to its target.
pub fn copy<'b>(
    from: impl Iterator<Item = &'b [u8]>,
    to: &Destination<'_>,
    pool: &Pool,
    counters: &Counters,
    interrupt: Interrupt<'_>,
) -> Result<Vec<usize>> {
    let streams = Streams::open(to.device, to.consumer)?;
    let stream = streams.next();
    for (bytes, target) in from.zip(to.targets) {
        let block = to.blocks.get(target.block);
        let block = block.ok_or_else(|| Error::Bug("no block".to_owned()))?;
        for (offset, now) in
            (target.offset..).step_by(pool.unit_len()).zip(bytes.chunks(pool.unit_len()))
        {
            interrupt()?;
            let lease = counters
                .time(Stage::Memory, || pool.enter().lease(1, to.device, &|| true))?
                .as_mut()
                .map(|lease| {
                    if let Some(unit) =
                        lease.units().first_mut().and_then(|u| u.get_mut(..now.len()))
                    {
                        unit.copy_from_slice(now);
                    }
                    lease.upload(stream, (0, 0, now.len()), block, offset)
                });
            lease.unwrap_or(Err(Error::Cancelled))?;
            counters.bytes(now.len() as u64);
        }
    }
    streams.hand_over()
}
