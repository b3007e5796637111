//! Batches for several devices, in an order that keeps all devices busy.

use super::partition::{Batch, BatchLimits, Extent, Segment, SegmentKind, partition_by_class};
use crate::error::Result;
use crate::numbers::ExtentNumber;

/// Cuts extents into batches as [`partition_by_class`] does, each of them for one of several
/// devices. The next batch is always for the device with the smallest planned fraction of its
/// bytes.
pub fn partition_by_device(
    extents: &[Extent],
    limits: &BatchLimits,
    (devices, device_of): (usize, &dyn Fn(ExtentNumber) -> usize),
    class_of: &dyn Fn(ExtentNumber) -> usize,
) -> Result<Vec<Batch>> {
    if devices <= 1 {
        return Ok(partition_by_class(extents, limits, class_of));
    }
    // Each batch with the fraction of its device's bytes that comes before it, in units of 2⁻³².
    let mut all: Vec<(u128, Batch)> = Vec::new();
    for device in 0..devices {
        let own = (0..).map(ExtentNumber).zip(extents);
        let own = own.filter(|&(number, _)| device_of(number) == device);
        let (numbers, own): (Vec<ExtentNumber>, Vec<Extent>) = own.unzip();
        let class = |at: ExtentNumber| at.of(&numbers).map_or(0, |&number| class_of(number));
        let batches = partition_by_class(&own, limits, class);
        let total = batches.iter().map(Batch::len).fold(0, u64::saturating_add);
        let mut before = 0u64;
        for mut batch in batches {
            let share = (u128::from(before) << 32) / u128::from(total.max(1));
            before = before.saturating_add(batch.len());
            for Segment { kind, .. } in &mut batch.segments {
                // The number so far is an index into `own`.
                if let SegmentKind::Header { extent } | SegmentKind::Data { extent, .. } = kind {
                    *extent = *extent.of(&numbers)?;
                }
            }
            all.push((share, batch));
        }
    }
    // Stable: batches of one device stay in their order.
    all.sort_by_key(|(share, _)| *share);
    Ok(all.into_iter().map(|(_, batch)| batch).collect())
}

#[cfg(all(test, not(feature = "models")))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::super::partition::partition;
    use super::*;
    use proptest::prelude::*;

    const LIMITS: BatchLimits = BatchLimits {
        len: 1000,
        tapers: false,
        merge_gap: 100,
        segments: 100,
        unit: 1,
        block: 1,
        separate_len: u64::MAX,
        overhead: u64::MAX,
    };

    fn extents(lens: &[(u64, u64)]) -> Vec<Extent> {
        let mut position = 0;
        let extent = |&(header_len, data_len): &(u64, u64)| {
            let header_offset = position;
            let data_offset = header_offset + header_len;
            position = data_offset + data_len;
            Extent { file: 0, header_offset, data_offset, data_len }
        };
        lens.iter().map(extent).collect()
    }

    /// Returns tensor, position in it, length and file position of all data, in the order of
    /// batches.
    fn pieces(batches: &[Batch]) -> Vec<(usize, u64, u64, u64)> {
        let mut found = Vec::new();
        for batch in batches {
            let mut position = batch.offset;
            for segment in &batch.segments {
                if let SegmentKind::Data { extent, start } = segment.kind {
                    found.push((extent.0, start, segment.len, position));
                }
                position += segment.len;
            }
        }
        found
    }

    proptest! {
        #[test]
        fn every_byte_comes_once_in_a_batch_of_its_device(
            lens in proptest::collection::vec((0u64..50, 0u64..3000), 0..40),
            devices in 1usize..5,
            shift in 0usize..5,
        ) {
            let extents = extents(&lens);
            let device_of = |extent: ExtentNumber| (extent.0 / 3 + shift) % devices;
            let batches = partition_by_device(&extents, &LIMITS, (devices, &device_of), &|_| 0).unwrap();
            for batch in &batches {
                let extents = batch.segments.iter().filter_map(Segment::extent);
                let mut of: Vec<usize> = extents.map(device_of).collect();
                of.dedup();
                prop_assert_eq!(of.len(), 1);
            }
            let mut next = vec![0u64; extents.len()];
            for (tensor, start, len, position) in pieces(&batches) {
                prop_assert_eq!(start, next[tensor]);
                prop_assert_eq!(position, extents[tensor].data_offset + start);
                next[tensor] += len;
            }
            let lens: Vec<u64> = extents.iter().map(|extent| extent.data_len).collect();
            prop_assert_eq!(next, lens);
        }

        #[test]
        fn no_device_gets_a_batch_ahead_of_the_others(
            first in 20usize..60, second in 20usize..60, len in 500u64..1000,
        ) {
            // The first tensors of the file are for one device, and the last for the other.
            let extents = extents(&vec![(0, len); first + second]);
            let device_of = |extent: ExtentNumber| usize::from(extent.0 >= first);
            let batches = partition_by_device(&extents, &LIMITS, (2, &device_of), &|_| 0).unwrap();
            let mut done = [0.0f64; 2];
            for (tensor, _, len, _) in pieces(&batches) {
                let device = device_of(ExtentNumber(tensor));
                #[allow(clippy::cast_precision_loss)]
                let part = len as f64 / ([first, second][device] as f64 * tensor_len(&extents));
                done[device] += part;
                // The fractions differ by less than one batch.
                prop_assert!((done[0] - done[1]).abs() < 0.11);
            }
        }
    }

    #[allow(clippy::cast_precision_loss)]
    fn tensor_len(extents: &[Extent]) -> f64 {
        extents[0].data_len as f64
    }

    #[test]
    fn one_device_gets_the_plain_partition() {
        let extents = extents(&[(10, 400), (10, 400), (10, 400), (10, 5000)]);
        let batches = partition_by_device(&extents, &LIMITS, (1, &|_| 0), &|_| 0).unwrap();
        assert_eq!(batches, partition(&extents, &LIMITS));
    }
}
