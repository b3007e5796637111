//! Properties of the planner: pure functions, so that random input is all that it takes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use proptest::prelude::*;
use tensorizer::engine::plan::{Extent, SegmentKind, Target, blocks, pack, partition, stage};

prop_compose! {
    fn extents()(
        shapes in prop::collection::vec((0u64..5000, 1u64..300, prop_oneof![Just(0u64), 1u64..100, 1u64..100_000]), 0..60)
    ) -> Vec<Extent> {
        let mut end = 1000;
        shapes.into_iter().map(|(gap, header, data_len)| {
            let header_offset = end + gap;
            let data_offset = header_offset + header;
            end = data_offset + data_len;
            Extent { header_offset, data_offset, data_len }
        }).collect()
    }
}

proptest! {
    #[test]
    fn every_wanted_byte_is_covered_once_and_in_order(
        extents in extents(),
        part_len in 1u64..50_000,
        merge_gap in prop_oneof![Just(0u64), 0u64..6000],
        max_pieces in 3usize..50,
        unit in prop_oneof![Just(1u64), 1u64..5000],
    ) {
        let parts = partition(&extents, part_len, merge_gap, max_pieces, unit);
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
                    SegmentKind::Header { tensor } => {
                        prop_assert_eq!(at, extents[tensor].header_offset);
                        prop_assert_eq!(at + piece.len, extents[tensor].data_offset);
                        headers.push(tensor);
                    }
                    SegmentKind::Data { tensor, start } => {
                        prop_assert_eq!(at, extents[tensor].data_offset + start);
                        prop_assert_eq!(start, data[tensor], "without holes");
                        prop_assert_eq!(start % unit, 0, "cut at units");
                        data[tensor] += piece.len;
                    }
                }
                at += piece.len;
            }
            end = at;
        }
        prop_assert_eq!(headers, (0..extents.len()).collect::<Vec<_>>());
        for (extent, covered) in extents.iter().zip(data) {
            prop_assert_eq!(extent.data_len, covered);
        }
    }

    /// Small tensors are hashed in one go, so they must lie in one part.
    #[test]
    fn tensors_of_an_eighth_of_a_part_are_not_cut(extents in extents()) {
        for part in partition(&extents, 800_000, 0, 1024, 1) {
            for piece in part.segments {
                if let SegmentKind::Data { tensor, .. } = piece.kind {
                    prop_assert_eq!(piece.len, extents[tensor].data_len);
                }
            }
        }
    }

    #[test]
    fn parts_are_about_as_long_as_asked_for(len in 1u64..10_000_000, part_len in 1000u64..1_000_000) {
        let extents = [Extent { header_offset: 0, data_offset: 100, data_len: len }];
        for part in partition(&extents, part_len, 0, 10, 1) {
            prop_assert!(part.len() <= part_len + part_len / 2 + 100);
        }
    }

    #[test]
    fn packed_buffers_are_aligned_and_disjoint(lens in prop::collection::vec(0u64..10_000, 0..50)) {
        let (ranges, total) = pack(lens.iter().map(|&len| Some(len))).expect("fits");
        let mut end = 0;
        for (&(start, len), &wanted) in ranges.iter().zip(&lens) {
            prop_assert!(start >= end && start % 64 == 0 && start < end + 64);
            prop_assert_eq!(len as u64, wanted);
            end = start + len;
        }
        prop_assert_eq!(end, total);
    }
}

#[test]
fn sizes_beyond_the_address_space_do_not_fit() {
    assert!(pack([Some(u64::MAX - 1), Some(100)].into_iter()).is_none());
    assert!(pack([Some(1), None].into_iter()).is_none());
}

proptest! {
    /// Every byte of data has one place in a unit, and one copy takes it to its place on the device.
    #[test]
    fn staged_data_arrive_where_they_belong(
        extents in extents(),
        part_len in 1u64..50_000,
        unit_len in 64usize..20_000,
        apart in any::<bool>(),
    ) {
        let grain = unit_len / 2;
        let lens: Vec<u64> = extents.iter().map(|extent| extent.data_len).collect();
        let (block_lens, places) = blocks(&lens, apart);
        let mut there: Vec<Vec<Option<(usize, u64)>>> =
            block_lens.iter().map(|&len| vec![None; len as usize]).collect();
        for part in partition(&extents, part_len, 100, 1000, 1) {
            let target = |tensor: usize| {
                let (block, offset) = places[tensor];
                Ok(Target { block, offset: offset as usize })
            };
            let staging = stage(&part, unit_len, grain, target).unwrap();
            let mut units = vec![vec![None; unit_len]; staging.units];
            for found in &staging.grains {
                prop_assert!(found.len <= grain);
                prop_assert_eq!(found.start / grain as u64, (found.start + found.len as u64 - 1) / grain as u64);
                for (byte, slot) in units[found.unit][found.at..][..found.len].iter_mut().enumerate() {
                    prop_assert!(slot.replace((found.tensor, found.start + byte as u64)).is_none());
                }
            }
            for step in &staging.moves {
                let from = &units[step.unit][step.at..][..step.len];
                let to = &mut there[step.target.block][step.target.offset..][..step.len];
                for (to, from) in to.iter_mut().zip(from) {
                    // Between tensors there are bytes of nobody.
                    if let Some(byte) = from {
                        prop_assert!(to.replace(*byte).is_none(), "copied twice");
                    }
                }
            }
        }
        for (tensor, &(block, offset)) in places.iter().enumerate() {
            prop_assert!(offset % 64 == 0);
            for (byte, found) in there[block][offset as usize..][..lens[tensor] as usize].iter().enumerate() {
                prop_assert_eq!(*found, Some((tensor, byte as u64)));
            }
        }
        prop_assert!(!apart || block_lens.len() == lens.len());
    }
}
