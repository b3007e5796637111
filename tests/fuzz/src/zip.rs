//! Archives as `torch.save` writes them, without the library.

use crate::input::{Faults, Input, Out, damage};
use crate::tensors::crc32;

const NAMES: [&str; 9] = [
    "a/data.pkl",
    "a/data/0",
    "a/data/1",
    "a/version",
    "a/.data/serialization_id",
    "b/data/0",
    "a/code/x",
    "a/data/0",
    "a/ü",
];

/// An archive of up to five records.
pub fn file(input: &mut Input<'_>) -> Vec<u8> {
    let mut records = vec![("a/data.pkl", 3, true)];
    for _ in 0..input.below(5) {
        let name = *input.one_of(&NAMES);
        records.push((name, usize::from(input.u8()), input.once_in(2)));
    }
    let (large, comment) = (input.once_in(2), input.below(3));
    let mut faults = Faults::new(input);
    let mut out = Out { bytes: Vec::new(), faults: &mut faults };
    let mut places = Vec::new();
    for (name, len, described) in &records {
        places.push(out.bytes.len());
        let data: Vec<u8> = (0..*len).map(|at| at as u8).collect();
        let pad = (64 - (out.bytes.len() + 30 + name.len() + 4) % 64) % 64;
        let sizes = if *described { 0 } else { *len as u64 };
        out.raw(b"PK\x03\x04");
        out.int(0, 2);
        out.int(if *described { 8 } else { 0 }, 2);
        out.int(0, 2);
        out.int(0, 4);
        out.int(if *described { 0 } else { crc32(&data).into() }, 4);
        out.int(sizes, 4);
        out.int(sizes, 4);
        out.int(name.len() as u64, 2);
        out.int(4 + pad as u64, 2);
        out.raw(name.as_bytes());
        out.bytes.extend(b"FB");
        out.bytes.extend((pad as u16).to_le_bytes());
        out.bytes.extend(std::iter::repeat_n(b'Z', pad));
        out.bytes.extend(&data);
        if *described {
            out.bytes.extend(b"PK\x07\x08");
            out.bytes.extend(crc32(&data).to_le_bytes());
            out.bytes.extend((*len as u32).to_le_bytes().repeat(2));
        }
    }
    let start = out.bytes.len() as u64;
    for ((name, len, described), place) in records.iter().zip(places) {
        out.raw(b"PK\x01\x02");
        out.int(0, 4);
        out.int(if *described { 8 } else { 0 }, 2);
        out.int(0, 2);
        out.int(0, 4);
        out.int(0, 4);
        let wide = large && len % 2 == 1;
        for _ in 0..2 {
            out.int(if wide { u32::MAX.into() } else { *len as u64 }, 4);
        }
        out.int(name.len() as u64, 2);
        out.int(if wide { 20 } else { 0 }, 2);
        out.int(0, 2);
        out.int(0, 2);
        out.int(0, 6);
        out.int(place as u64, 4);
        out.raw(name.as_bytes());
        if wide {
            out.int(1, 2);
            out.int(16, 2);
            out.int(*len as u64, 8);
            out.int(*len as u64, 8);
        }
    }
    end(&mut out, records.len() as u64, start, large, comment);
    let mut bytes = out.bytes;
    damage(&mut bytes, faults.input());
    bytes
}

fn end(out: &mut Out<'_, '_, '_>, count: u64, start: u64, large: bool, comment: usize) {
    let end = out.bytes.len() as u64;
    if large {
        out.raw(b"PK\x06\x06");
        out.int(44, 8);
        out.int(0, 4);
        out.int(0, 4);
        out.int(0, 4);
        out.int(count, 8);
        out.int(count, 8);
        out.int(end - start, 8);
        out.int(start, 8);
        out.raw(b"PK\x06\x07");
        out.int(0, 4);
        out.int(end, 8);
        out.int(1, 4);
    }
    out.raw(b"PK\x05\x06");
    out.int(0, 2);
    out.int(0, 2);
    out.int(count, 2);
    out.int(count, 2);
    out.int(end - start, 4);
    out.int(start, 4);
    out.int(comment as u64, 2);
    out.bytes.extend(std::iter::repeat_n(b'c', comment));
}
