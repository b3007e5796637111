//! Archives of `torch.save`: their records are found, and no field of them is trusted.
#![allow(clippy::cast_possible_truncation)]

use std::sync::Arc;

use proptest::prelude::*;
use tensorizer::format::torch_zip::{Directory, Record, TAIL_LEN, find_directory, records};
use tensorizer::io::{MemorySource, ReadAt};
use tensorizer::{Error, LoadOptions, Never, Opening, TensorFile, load};

/// An archive, and where the data of each record begin.
#[derive(Debug, Clone)]
struct Archive {
    bytes: Vec<u8>,
    records: Vec<(String, usize, Vec<u8>)>,
}

/// A record to be written, and its form.
#[derive(Debug, Clone)]
struct Plan {
    data: Vec<u8>,
    padding: u16,
    described: bool,
    /// Sizes and position are in an extra field, as those beyond 4 GiB are.
    large: bool,
}

fn archive(plans: &[Plan], large: bool, comment: &[u8]) -> Archive {
    let (mut out, mut directory, mut found) = (Vec::new(), Vec::new(), Vec::new());
    for (number, plan) in plans.iter().enumerate() {
        let name =
            if number == 0 { "x/data.pkl".to_owned() } else { format!("x/data/{}", number - 1) };
        let (flags, at) = (if plan.described { 0x808u16 } else { 0x800 }, out.len());
        let len = plan.data.len() as u32;
        let told = if plan.described { 0 } else { len };
        let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
        put(b"PK\x03\x04\0\0");
        put(&flags.to_le_bytes());
        put(&[0; 10]);
        put(&told.to_le_bytes());
        put(&told.to_le_bytes());
        put(&(name.len() as u16).to_le_bytes());
        put(&plan.padding.to_le_bytes());
        put(name.as_bytes());
        put(&vec![b'Z'; plan.padding.into()]);
        let data_at = at + 30 + name.len() + usize::from(plan.padding);
        put(&plan.data);
        if plan.described {
            put(b"PK\x07\x08\0\0\0\0");
            put(&len.to_le_bytes());
            put(&len.to_le_bytes());
        }
        let mut put = |bytes: &[u8]| directory.extend_from_slice(bytes);
        put(b"PK\x01\x02\0\0\0\0");
        put(&flags.to_le_bytes());
        put(&[0; 10]);
        let short = |value: u32| if plan.large { u32::MAX } else { value }.to_le_bytes();
        put(&short(len));
        put(&short(len));
        put(&(name.len() as u16).to_le_bytes());
        put(&(if plan.large { 28u16 } else { 0 }).to_le_bytes());
        put(&[0; 10]);
        put(&short(at as u32));
        put(name.as_bytes());
        if plan.large {
            put(&[1, 0, 24, 0]);
            for value in [plan.data.len(), plan.data.len(), at] {
                put(&(value as u64).to_le_bytes());
            }
        }
        found.push((name, data_at, plan.data.clone()));
    }
    let (start, len, count) = (out.len(), directory.len(), plans.len());
    out.extend(directory);
    if large {
        let at = out.len() as u64;
        out.extend(b"PK\x06\x06");
        out.extend(44u64.to_le_bytes());
        out.extend([0; 12]);
        for value in [count, count, len, start] {
            out.extend((value as u64).to_le_bytes());
        }
        out.extend(b"PK\x06\x07\0\0\0\0");
        out.extend(at.to_le_bytes());
        out.extend(1u32.to_le_bytes());
    }
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend([(count as u16).to_le_bytes(); 2].concat());
    out.extend((len as u32).to_le_bytes());
    out.extend((start as u32).to_le_bytes());
    out.extend((comment.len() as u16).to_le_bytes());
    out.extend(comment);
    Archive { bytes: out, records: found }
}

prop_compose! {
    fn plan()(
        data in prop::collection::vec(any::<u8>(), 0..60),
        padding in prop_oneof![Just(0u16), 0u16..100],
        described in any::<bool>(),
        large in any::<bool>(),
    ) -> Plan {
        Plan { data, padding, described, large }
    }
}

prop_compose! {
    fn archives()(
        plans in prop::collection::vec(plan(), 1..12),
        large in any::<bool>(),
        comment in prop_oneof![Just(Vec::new()), prop::collection::vec(any::<u8>(), 0..50)],
    ) -> Archive {
        archive(&plans, large, &comment)
    }
}

fn open(bytes: Vec<u8>, base: u64, storages: bool) -> tensorizer::Result<TensorFile> {
    let source: Arc<dyn ReadAt> = Arc::new(MemorySource::new(bytes, "archive"));
    Opening { storages, ..Opening::new(&Never) }.source(source, base)
}

/// Directory and records, as far as the bytes of an archive are right.
fn parse(bytes: &[u8]) -> Option<(Directory, Vec<Record>)> {
    let tail = &bytes[bytes.len().saturating_sub(TAIL_LEN as usize)..];
    let found = find_directory(tail, bytes.len() as u64, 0).ok()?;
    let directory = &bytes[found.start as usize..(found.start + found.len) as usize];
    Some((found, records(directory, &found, 0).ok()?))
}

proptest! {
    #[test]
    fn records_are_found_at_their_positions(archive in archives(), base in 0usize..70) {
        let mut bytes = vec![7; base];
        bytes.extend(&archive.bytes);
        let file = open(bytes, base as u64, true).unwrap();
        prop_assert_eq!(file.format().name(), "torch");
        let numbers: Vec<usize> = (0..file.entries().len()).collect();
        let loaded = load(&file, &numbers, &LoadOptions::default(), &Never).unwrap();
        prop_assert_eq!(loaded.len(), archive.records.len());
        for (name, at, data) in &archive.records {
            let number = file.find(&name.replacen("x/", "0/", 1)).unwrap();
            prop_assert_eq!(file.entries()[number].data_offset, (base + at) as u64);
            prop_assert_eq!(loaded[number].bytes(), &data[..]);
        }
    }

    #[test]
    fn damaged_archives_are_refused_or_stay_within_bounds(
        archive in archives(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop_oneof![4 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let mut bytes = archive.bytes;
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let size = bytes.len() as u64;
        if let Some((directory, records)) = parse(&bytes) {
            let mut end = 0;
            for record in &records {
                prop_assert!(record.header_at >= end);
                end = record.header_at + record.header_len() + record.len;
            }
            prop_assert!(end <= directory.start);
        }
        match open(bytes, 0, true) {
            Ok(file) => {
                let mut ranges: Vec<(u64, u64)> =
                    file.entries().iter().map(|entry| (entry.data_offset, entry.end())).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                prop_assert!(ranges.iter().all(|range| range.1 <= size));
            }
            Err(Error::Format { .. } | Error::Truncated { .. } | Error::Version { .. }) => {}
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn torch_archives_are_refused_without_an_unpickler() {
    let plan = Plan { data: vec![1], padding: 0, described: true, large: false };
    let error = open(archive(&[plan], true, b"").bytes, 0, false).err().unwrap();
    assert!(matches!(&error, Error::Unsupported(what) if what.contains("tensorizer.load")));
}
