//! Properties of the planner: pure functions, so that random input is all that it takes.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use proptest::prelude::*;
use tensorizer::engine::plan::{
    BatchLimits, BlockLocation, Extent, LargeTensors, MemoryLayout, Segment, SegmentKind,
    partition, plan_staging,
};
use tensorizer::numbers::ExtentNumber;

prop_compose! {
    fn extents(longest: u64)(
        shapes in prop::collection::vec((0u64..5000, 1u64..300, prop_oneof![Just(0u64), 1u64..100, 1u64..longest]), 0..60)
    ) -> Vec<Extent> {
        let mut end = 1000;
        shapes.into_iter().map(|(gap, header, data_len)| {
            let header_offset = end + gap;
            let data_offset = header_offset + header;
            end = data_offset + data_len;
            Extent { file: 0, header_offset, data_offset, data_len }
        }).collect()
    }
}

proptest! {
    #[test]
    fn batches_cover_every_wanted_byte_once_in_order(
        extents in extents(100_000),
        part_len in 1u64..50_000,
        merge_gap in prop_oneof![Just(0u64), 0u64..6000],
        max_pieces in 3usize..50,
        unit in prop_oneof![Just(1u64), 1u64..5000],
        tapers in any::<bool>(),
        separate_len in prop_oneof![Just(u64::MAX), 1u64..50_000],
        overhead in prop_oneof![Just(u64::MAX), 1u64..5000],
        block in prop_oneof![Just(1u64), Just(512u64)],
    ) {
        let limits =
            BatchLimits { len: part_len, tapers, merge_gap, segments: max_pieces, unit, block, separate_len, overhead };
        let parts = partition(&extents, &limits);
        let mut end = 0;
        let mut headers = Vec::new();
        let mut data = vec![0u64; extents.len()];
        for part in &parts {
            prop_assert!(!part.is_empty());
            prop_assert!(part.offset >= end, "parts do not overlap and rise");
            prop_assert!(part.segments.len() <= max_pieces);
            let mut at = part.offset;
            for piece in &part.segments {
                match piece.kind {
                    SegmentKind::Gap => prop_assert!(piece.len <= merge_gap),
                    SegmentKind::Header { extent: ExtentNumber(tensor) } => {
                        prop_assert_eq!(at, extents[tensor].header_offset);
                        prop_assert_eq!(at + piece.len, extents[tensor].data_offset);
                        headers.push(tensor);
                    }
                    SegmentKind::Data { extent: ExtentNumber(tensor), start } => {
                        prop_assert_eq!(at, extents[tensor].data_offset + start);
                        prop_assert_eq!(start, data[tensor], "without holes");
                        prop_assert_eq!(start % unit, 0, "cut at units");
                        let cut = start + piece.len < extents[tensor].data_len;
                        prop_assert!(unit > 1 || !cut || piece.len < block || (at + piece.len) % block == 0);
                        data[tensor] += piece.len;
                    }
                }
                at += piece.len;
            }
            end = at;
        }
        for part in &parts {
            let tensors: Vec<usize> = part.segments.iter().filter_map(|piece| match piece.kind {
                SegmentKind::Header { extent: ExtentNumber(tensor) } | SegmentKind::Data { extent: ExtentNumber(tensor), .. } => Some(tensor),
                SegmentKind::Gap => None,
            }).collect();
            let large = tensors.iter().find(|&&tensor| extents[tensor].data_len >= separate_len);
            prop_assert!(large.is_none_or(|large| tensors.iter().all(|tensor| tensor == large)));
            let no_data = |piece: &&Segment| !matches!(piece.kind, SegmentKind::Data { .. });
            let passes: u64 = part.segments.iter().filter(no_data).map(|piece| piece.len).sum();
            prop_assert!(passes <= overhead || tensors.iter().all(|tensor| tensor == &tensors[0]));
        }
        prop_assert_eq!(headers, (0..extents.len()).collect::<Vec<_>>());
        for (extent, covered) in extents.iter().zip(data) {
            prop_assert_eq!(extent.data_len, covered);
        }
    }

    /// Small tensors are hashed in one go, so they must lie in one part.
    #[test]
    fn tensors_up_to_an_eighth_of_a_batch_are_not_cut(extents in extents(100_000)) {
        for part in partition(&extents, &limits(800_000, 0)) {
            for piece in part.segments {
                if let SegmentKind::Data { extent: ExtentNumber(tensor), .. } = piece.kind {
                    prop_assert_eq!(piece.len, extents[tensor].data_len);
                }
            }
        }
    }

    #[test]
    fn batches_exceed_the_requested_length_by_at_most_half(len in 1u64..10_000_000, part_len in 1000u64..1_000_000) {
        let extents = [Extent { file: 0, header_offset: 0, data_offset: 100, data_len: len }];
        for part in partition(&extents, &limits(part_len, 0)) {
            prop_assert!(part.len() <= part_len + part_len / 2 + 100);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    /// Every byte of data has one place in a staging buffer, and one copy takes it to its place on
    /// the device, whatever else goes along.
    #[test]
    fn every_staged_byte_is_copied_once_to_its_location(
        extents in extents(20_000),
        aligned in any::<bool>(),
        batch_len in 1u64..10_000,
        buffer_len in 64usize..4_000,
        large in prop_oneof![Just(LargeTensors::OwnBlocks), Just(LargeTensors::OneBlock)],
    ) {
        let extents = if aligned { aligned_to_64(extents) } else { extents };
        let lens: Vec<(Extent, u64)> = extents.iter().map(|e| (*e, e.data_len)).collect();
        let layout = MemoryLayout::new(&lens, large).unwrap();
        let unit = buffer_len / 2;
        let mut there: Vec<Vec<Option<(usize, u64)>>> =
            layout.blocks.iter().map(|block| vec![None; block.len as usize]).collect();
        for batch in partition(&extents, &limits(batch_len, 100)) {
            let locate = |segment: &Segment, position: u64| Ok(match segment.kind {
                SegmentKind::Gap => None,
                SegmentKind::Header { extent: ExtentNumber(tensor) } => {
                    let block = layout.locations[tensor].block;
                    let fits = segment.len <= buffer_len as u64;
                    let found = layout.blocks[block].find(0, position, segment.len);
                    found.filter(|_| fits).map(|offset| BlockLocation { block, offset })
                }
                SegmentKind::Data { extent: ExtentNumber(tensor), start } => {
                    let BlockLocation { block, offset } = layout.locations[tensor];
                    Some(BlockLocation { block, offset: offset + start })
                }
            });
            let staging = plan_staging(&batch, buffer_len, unit, locate).unwrap();
            let total: usize = staging.staged.iter().map(|staged| staged.len).sum();
            prop_assert_eq!(total as u64, batch.len());
            let mut buffers = vec![vec![None; buffer_len]; staging.buffers];
            for staged in &staging.staged {
                let Some(buffer) = staged.buffer else { continue };
                let bytes = &mut buffers[buffer][staged.at..][..staged.len];
                for (byte, slot) in bytes.iter_mut().enumerate() {
                    let whose = match staged.kind {
                        SegmentKind::Data { extent: ExtentNumber(tensor), start } => (tensor, start + byte as u64),
                        _ => (usize::MAX, 0),
                    };
                    prop_assert!(slot.replace(whose).is_none());
                }
                if let SegmentKind::Data { start, .. } = staged.kind {
                    let last = start + staged.len as u64 - 1;
                    prop_assert_eq!(start / unit as u64, last / unit as u64);
                }
            }
            for copy in &staging.copies {
                let from = &buffers[copy.buffer][copy.at..][..copy.len];
                let to = &mut there[copy.block][copy.offset..][..copy.len];
                for (to, from) in to.iter_mut().zip(from) {
                    // Bytes between tensors belong to none.
                    if let Some(byte) = from {
                        prop_assert!(to.replace(*byte).is_none(), "copied twice");
                    }
                }
            }
        }
        for (tensor, (location, extent)) in layout.locations.iter().zip(&extents).enumerate() {
            prop_assert!(location.offset % 64 == 0);
            let mine = &there[location.block][location.offset as usize..][..extent.data_len as usize];
            for (byte, found) in mine.iter().enumerate() {
                prop_assert_eq!(*found, Some((tensor, byte as u64)));
            }
        }
    }

    /// Small tensors share blocks of bounded length; large ones share none with them.
    #[test]
    fn large_tensors_share_no_block_with_small_ones(
        lens in prop::collection::vec(prop_oneof![0u64..5000, 900_000u64..1_200_000], 0..300),
        gap in prop_oneof![Just(0u64), Just(8192)],
        large in prop_oneof![Just(LargeTensors::OwnBlocks), Just(LargeTensors::OneBlock)],
    ) {
        let mut end = 1000u64;
        let tensors: Vec<(Extent, u64)> = lens.iter().map(|&len| {
            let header_offset = end + gap;
            let data_offset = (header_offset + 200).next_multiple_of(64);
            end = data_offset + len;
            (Extent { file: 0, header_offset, data_offset, data_len: len }, len)
        }).collect();
        let layout = MemoryLayout::new(&tensors, large).unwrap();
        prop_assert_eq!(layout.locations.len(), lens.len());
        for (number, block) in layout.blocks.iter().enumerate() {
            let inside: Vec<u64> = layout.locations.iter().zip(&lens)
                .filter(|(location, _)| location.block == number).map(|(_, len)| *len).collect();
            let small = inside.iter().filter(|&&len| len < 1 << 20).count();
            prop_assert!(small == 0 || small == inside.len());
            prop_assert!(small == 0 || block.len <= 64 << 20);
            prop_assert!(block.image.is_none() || (gap == 0 && inside.len() > 1));
            prop_assert!(small > 0 || large == LargeTensors::OneBlock || inside.len() == 1);
        }
        // In host memory, bytes lie in blocks as in those of the disk, so that direct reads can go
        // there.
        let together = |_: &_| large == LargeTensors::OneBlock;
        for (location, (extent, len)) in layout.locations.iter().zip(&tensors).filter(together) {
            let block = layout.blocks[location.block];
            if *len >= 1 << 20 || (block.image.is_some() && block.len > (1 << 20) + 4096) {
                prop_assert_eq!(location.offset % 4096, extent.data_offset % 4096);
            }
        }
        for ((location, len), (extent, _)) in layout.locations.iter().zip(&lens).zip(&tensors) {
            let block = layout.blocks[location.block];
            prop_assert!(location.offset % 64 == 0 && location.offset + len <= block.len);
            if block.image.is_some() {
                prop_assert_eq!(block.find(0, extent.data_offset, *len), Some(location.offset));
            }
        }
    }

    /// Steps are the batch, cut in large data only.
    #[test]
    fn steps_cover_their_batch(extents in extents(100_000), step in 1u64..20_000, max_uncut in 0u64..50_000) {
        for batch in partition(&extents, &limits(100_000, 100)) {
            let steps = batch.clone().steps(step, max_uncut);
            let mut position = batch.offset;
            let mut joined: Vec<Segment> = Vec::new();
            for one in &steps {
                prop_assert_eq!((one.file, one.offset), (batch.file, position));
                position += one.len();
                for segment in &one.segments {
                    match (joined.last_mut(), segment.kind) {
                        (Some(last), SegmentKind::Data { extent: ExtentNumber(tensor), start }) if start > 0
                            && matches!(last.kind, SegmentKind::Data { extent: ExtentNumber(of), .. } if of == tensor) =>
                        {
                            prop_assert!(segment.len <= step);
                            last.len += segment.len;
                        }
                        _ => joined.push(*segment),
                    }
                }
            }
            prop_assert_eq!(joined, batch.segments);
        }
    }
}

fn limits(len: u64, merge_gap: u64) -> BatchLimits {
    BatchLimits {
        len,
        tapers: false,
        merge_gap,
        segments: 1000,
        unit: 1,
        block: 1,
        separate_len: u64::MAX,
        overhead: u64::MAX,
    }
}

/// The same tensors, with data that begin at multiples of 64.
fn aligned_to_64(extents: Vec<Extent>) -> Vec<Extent> {
    let mut moved = 0;
    let extents = extents.into_iter().map(|extent| {
        let header_offset = extent.header_offset + moved;
        let data_offset = (extent.data_offset + moved).next_multiple_of(64);
        moved = data_offset - extent.data_offset;
        Extent { header_offset, data_offset, ..extent }
    });
    extents.collect()
}
