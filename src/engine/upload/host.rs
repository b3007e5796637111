//! Bytes that had to be brought into host memory, on their way to a device.

use super::Destination;
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::mem::device::Streams;
use crate::mem::pinned::Pool;
use crate::stats::{Counters, Stage};

/// Copies bytes of host memory to a device, each to its target.
pub fn copy<'b>(
    from: impl Iterator<Item = &'b [u8]>,
    to: &Destination<'_>,
    pool: &Pool,
    counters: &Counters,
    cancel: &dyn Cancel,
) -> Result<()> {
    let streams = Streams::open(to.device, to.consumer)?;
    let stream = streams.next();
    for (bytes, target) in from.zip(to.targets) {
        let block = to.blocks.get(target.block);
        let block = block.ok_or_else(|| Error::Bug("no block".to_owned()))?;
        for (offset, now) in
            (target.offset..).step_by(pool.unit_len()).zip(bytes.chunks(pool.unit_len()))
        {
            cancel.check()?;
            let mut lease =
                counters.time(Stage::Memory, || pool.enter().lease(1, to.device, cancel))?;
            let mut units = lease.units();
            let unit = units.first_mut().and_then(|unit| unit.get_mut(..now.len()));
            unit.ok_or_else(|| Error::Bug("a short unit".to_owned()))?.copy_from_slice(now);
            lease.upload(stream, (0, 0, now.len()), block, offset)?;
            counters.bytes(now.len() as u64);
        }
    }
    streams.hand_over()
}
