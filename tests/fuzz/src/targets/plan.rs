//! Plans of reads: every wanted byte once, in order, within limits; and the copies through staging
//! buffers.
use crate::input::Input;
use tensorizer::engine::plan::{
    Batch, BatchLimits, BlockLocation, Extent, LargeTensors, MemoryLayout, Segment, SegmentKind,
    SliceRanges, partition, plan_staging,
};
use tensorizer::numbers::ExtentNumber;

const LENS: [u64; 12] = [0, 1, 7, 63, 64, 65, 1000, 4096, 5000, 65536, 1 << 20, 5 << 20];

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut limits = BatchLimits {
        len: 1 + *input.one_of(&LENS),
        tapers: input.once_in(2),
        merge_gap: *input.one_of(&LENS),
        segments: 3 + input.below(30),
        unit: 1 + *input.one_of(&[0, 0, 63, 1023, 4095]),
        block: *input.one_of(&[1, 512, 4096]),
        separate_len: *input.one_of(&[u64::MAX, 1, 1000, 1 << 20]),
        overhead: *input.one_of(&[u64::MAX, 1, 100, 5000]),
    };
    let (buffer_len, gap) = (64 << input.below(12), *input.one_of(&LENS));
    let large = *input.one_of(&[LargeTensors::OwnBlocks, LargeTensors::OneBlock]);
    ranges(&mut input, gap);
    let extents = extents(&mut input);
    // Some thousand batches are enough.
    let total: u64 = extents.iter().map(|extent| extent.end() - extent.header_offset).sum();
    limits.len = limits.len.max(total / 1000);
    let buffer_len = buffer_len.max((total / 1000) as usize);
    let batches = partition(&extents, &limits);
    check(&extents, &batches, &limits);
    let lens: Vec<(Extent, u64)> =
        extents.iter().map(|extent| (*extent, extent.data_len)).collect();
    if let Some(layout) = MemoryLayout::new(&lens, large) {
        staged(&extents, &batches, &layout, buffer_len);
    }
    let steps: Vec<Batch> =
        batches.into_iter().flat_map(|batch| batch.steps(limits.len, limits.merge_gap)).collect();
    covers(&extents, &steps);
}

fn extents(input: &mut Input<'_>) -> Vec<Extent> {
    let mut end = *input.one_of(&[0, 73, 1 << 40, (1 << 62) - 5]);
    let mut file = 0;
    let mut extents = Vec::new();
    while !input.is_empty() && extents.len() < 60 {
        if input.once_in(16) {
            (file, end) = (file + 1, 0);
        }
        let header_offset = end + *input.one_of(&LENS);
        let data_offset = header_offset + *input.one_of(&[0, 1, 60, 64, 100, 70_000]);
        let data_len = *input.one_of(&LENS) + u64::from(input.u8());
        end = data_offset + data_len;
        extents.push(Extent { file, header_offset, data_offset, data_len });
    }
    extents
}

/// Every byte of headers and data once, and in order.
fn covers(extents: &[Extent], batches: &[Batch]) {
    let (mut headers, mut data) = (vec![0; extents.len()], vec![0; extents.len()]);
    let mut end = (0, 0);
    for batch in batches {
        assert!(!batch.is_empty() && (batch.file, batch.offset) >= end);
        let mut at = batch.offset;
        for segment in &batch.segments {
            match segment.kind {
                SegmentKind::Gap => {}
                SegmentKind::Header { extent: ExtentNumber(tensor) } => {
                    assert_eq!(
                        (batch.file, at),
                        (extents[tensor].file, extents[tensor].header_offset)
                    );
                    headers[tensor] += segment.len;
                }
                SegmentKind::Data { extent: ExtentNumber(tensor), start } => {
                    assert_eq!(
                        (batch.file, at),
                        (extents[tensor].file, extents[tensor].data_offset + start)
                    );
                    assert_eq!(start, data[tensor]);
                    data[tensor] += segment.len;
                }
            }
            at += segment.len;
        }
        end = (batch.file, at);
    }
    for (extent, (header, data)) in extents.iter().zip(headers.into_iter().zip(data)) {
        assert_eq!((header, data), (extent.data_offset - extent.header_offset, extent.data_len));
    }
}

fn check(extents: &[Extent], batches: &[Batch], limits: &BatchLimits) {
    covers(extents, batches);
    for batch in batches {
        assert!(batch.segments.len() <= limits.segments);
        let tensors: Vec<usize> = batch
            .segments
            .iter()
            .filter_map(|segment| match segment.kind {
                SegmentKind::Header { extent: ExtentNumber(tensor) }
                | SegmentKind::Data { extent: ExtentNumber(tensor), .. } => Some(tensor),
                SegmentKind::Gap => {
                    assert!(segment.len <= limits.merge_gap);
                    None
                }
            })
            .collect();
        let separate =
            tensors.iter().find(|&&tensor| extents[tensor].data_len >= limits.separate_len);
        assert!(separate.is_none_or(|separate| tensors.iter().all(|tensor| tensor == separate)));
        let no_data = |segment: &&Segment| !matches!(segment.kind, SegmentKind::Data { .. });
        let passes: u64 = batch.segments.iter().filter(no_data).map(|segment| segment.len).sum();
        let one = tensors.iter().all(|tensor| Some(tensor) == tensors.first());
        assert!(passes <= limits.overhead || one);
    }
}

/// Copies lie within their buffers and blocks, and bring as many bytes as the tensors have.
fn staged(extents: &[Extent], batches: &[Batch], layout: &MemoryLayout, buffer_len: usize) {
    let ends: Vec<u64> = layout.blocks.iter().map(|block| block.len).collect();
    for (extent, place) in extents.iter().zip(&layout.locations) {
        assert!(place.offset + extent.data_len <= ends[place.block]);
    }
    for batch in batches {
        let place = |segment: &Segment, _: u64| {
            Ok(match segment.kind {
                SegmentKind::Data { extent: ExtentNumber(tensor), start } => {
                    let BlockLocation { block, offset } = layout.locations[tensor];
                    Some(BlockLocation { block, offset: offset + start })
                }
                _ => None,
            })
        };
        let staging = plan_staging(batch, buffer_len, buffer_len / 2, place).unwrap();
        let wanted: u64 = batch
            .segments
            .iter()
            .filter(|segment| matches!(segment.kind, SegmentKind::Data { .. }))
            .map(|segment| segment.len)
            .sum();
        let staged: usize =
            staging.staged.iter().filter(|one| one.buffer.is_some()).map(|one| one.len).sum();
        assert_eq!(staged as u64, wanted);
        for copy in &staging.copies {
            assert!(copy.buffer < staging.buffers && copy.at + copy.len <= buffer_len);
            assert!((copy.offset + copy.len) as u64 <= ends[copy.block]);
        }
        assert!(staging.copies.iter().map(|copy| copy.len).sum::<usize>() as u64 >= wanted);
    }
}

/// Contiguous ranges of a slice: as many bytes as the slice has, rising, within the tensor.
/// Coalesced reads hold all of them.
fn ranges(input: &mut Input<'_>, gap: u64) {
    let size = *input.one_of(&[1, 2, 4, 8, 16]);
    let (mut shape, mut slice) = (Vec::new(), Vec::new());
    for _ in 0..input.below(5) {
        let dim = *input.one_of(&[1, 2, 3, 5, 17, 0, 1 << 32, u64::MAX]);
        let (a, b) = (u64::from(input.u8()), u64::from(input.u8()));
        let (a, b) = if input.once_in(8) { (dim.wrapping_sub(a), dim) } else { (a % 7, b % 7) };
        shape.push(dim);
        slice.push(a.min(b)..a.max(b));
    }
    let Some(ranges) = SliceRanges::new(size, &shape, &slice) else { return };
    let wanted = slice.iter().fold(size, |len, range| len * (range.end - range.start));
    assert_eq!(ranges.total(), wanted);
    let all = shape.iter().fold(size, |len, &dim| len * dim);
    let mut end = 0;
    for start in ranges.starts().take(2000) {
        assert!(start >= end && start + ranges.range_len() <= all);
        end = start + ranges.range_len();
    }
    let (mut end, mut held) = (0, 0);
    let mut spans = 0;
    for span in ranges.coalesced(gap).take(2000) {
        assert!(span.start >= end && span.end <= all && span.start < span.end);
        held += ranges.before(span.end) - ranges.before(span.start);
        end = span.end;
        spans += 1;
    }
    assert!(spans == 2000 || held == wanted);
}
