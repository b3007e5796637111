//! Files of `torch.save` before torch 1.6, or with `_use_new_zipfile_serialization=False`: pickles
//! one after another, then the storages.
//!
//! The pickles are a magic number, a version, facts of the machine, the object, and the keys of its
//! storages. For each key, in that order, there is the number of the storage's elements in eight
//! bytes, and the bytes of these. The length of a pickle is stated nowhere: its opcodes tell it.

use std::ops::Range;

use crate::error::Malformed;

/// The number in the first pickle, as the opcode `LONG1` has it, and the end of that pickle.
const MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
/// The number in the second pickle, as the opcode `BININT2` has it, and the end of that pickle.
const VERSION: &[u8] = b"M\xe9\x03.";
/// The number of pickles before the storages.
const PICKLES: usize = 5;
/// The most bytes of them all: those of ten million tensors.
pub const MAX_PICKLES: u64 = 1 << 30;

/// True if a file with these first bytes is of this kind.
pub fn recognises(bytes: &[u8]) -> bool {
    // From protocol 4 on, pickles have frames.
    let rest = match bytes {
        [0x80, _, 0x95, rest @ ..] => rest.get(8..),
        [0x80, _, rest @ ..] => Some(rest),
        _ => None,
    };
    rest.is_some_and(|rest| rest.starts_with(MAGIC))
}

/// The pickles that matter to a load.
#[derive(Debug, PartialEq, Eq)]
pub struct Pickles {
    /// The facts of the machine, among them its byte order.
    pub machine: Range<usize>,
    /// The object.
    pub object: Range<usize>,
    /// The keys of the storages, which follow this pickle.
    pub keys: Range<usize>,
}

/// Finds the pickles in the first bytes of a file; None if they are not all in these. `base` is the
/// position of the first byte, for errors.
pub fn pickles(bytes: &[u8], base: u64) -> Result<Option<Pickles>, Malformed> {
    let mut found: [Range<usize>; PICKLES] = Default::default();
    let mut start = 0;
    for place in &mut found {
        let at = base.saturating_add(start as u64);
        let Some(len) = pickle_len(bytes.split_at(start).1, at)? else { return Ok(None) };
        *place = start..start + len;
        start = place.end;
    }
    let [_, version, machine, object, keys] = found;
    if !bytes.get(version.clone()).is_some_and(|pickle| pickle.ends_with(VERSION)) {
        let what = "expected version 1001 of the files of torch.save before torch 1.6";
        return Err(Malformed::new(base.saturating_add(version.start as u64), what));
    }
    Ok(Some(Pickles { machine, object, keys }))
}

/// The length of the pickle with which these bytes begin; None if it does not end in them.
fn pickle_len(bytes: &[u8], at: u64) -> Result<Option<usize>, Malformed> {
    let mut next = 0;
    while let Some((&opcode, rest)) = bytes.get(next..).and_then(<[u8]>::split_first) {
        let argument = argument(opcode).ok_or_else(|| {
            let what = format!("expected an opcode of a pickle, found byte {opcode:#04x}");
            Malformed::new(at.saturating_add(next as u64), what)
        })?;
        let len = match argument {
            Argument::Bytes(len) => Some(len),
            Argument::Counted(width) => rest.get(..width).map(|count| {
                let count = count.iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
                width.saturating_add(count)
            }),
            Argument::Lines(count) => {
                let mut ends = rest.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
                ends.nth(count - 1).map(|(end, _)| end + 1)
            }
        };
        let Some(len) = len else { return Ok(None) };
        next = next.saturating_add(1).saturating_add(len);
        if opcode == b'.' {
            return Ok(Some(next));
        }
    }
    Ok(None)
}

/// The bytes that follow an opcode.
enum Argument {
    /// So many bytes.
    Bytes(usize),
    /// A number of so many bytes, and as many bytes as it says.
    Counted(usize),
    /// So many lines.
    Lines(usize),
}

/// The argument of an opcode of protocol 2 or before, and of those of later ones that older versions
/// of torch could write; None for others, which torch's unpickler refuses, too.
fn argument(opcode: u8) -> Option<Argument> {
    Some(match opcode {
        0x81 | 0x85..=0x89 | 0x8f..=0x94 => Argument::Bytes(0),
        _ if b"().012]}NQRabdelostu".contains(&opcode) => Argument::Bytes(0),
        b'K' | b'h' | b'q' | 0x80 => Argument::Bytes(1),
        b'M' => Argument::Bytes(2),
        b'J' | b'j' | b'r' => Argument::Bytes(4),
        b'G' | 0x95 => Argument::Bytes(8),
        b'C' | b'U' | 0x8a | 0x8c => Argument::Counted(1),
        b'B' | b'T' | b'X' | 0x8b => Argument::Counted(4),
        b'F' | b'I' | b'L' | b'P' | b'S' | b'V' | b'g' | b'p' => Argument::Lines(1),
        b'c' | b'i' => Argument::Lines(2),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pickles_end_at_their_last_opcode() {
        let first = [&[0x80, 2][..], MAGIC].concat();
        let rest: [&[u8]; 4] = [
            b"\x80\x02M\xe9\x03.",
            b"\x80\x02}q\x00X\x03\x00\x00\x00..\n\x88s.",
            b"\x80\x02cmodule\nname.\nU\x02..T\x01\x00\x00\x00.G........J....\x85R.",
            b"\x80\x02]q\x00(I1\n\x8a\x01.e.",
        ];
        let mut file = [&first[..], &rest.concat()].concat();
        let end = file.len();
        file.extend(b"\x01\x00\x00\x00");
        assert!(recognises(&file));
        let found = pickles(&file, 0).unwrap().unwrap();
        assert_eq!(&file[found.machine], rest[1]);
        assert_eq!(&file[found.object], rest[2]);
        assert_eq!(found.keys.end, end);
        for len in 0..end {
            assert_eq!(pickles(&file[..len], 0), Ok(None), "{len}");
        }
        let error = pickles(&[&first[..], b"\x80\x02\xff."].concat(), 100).unwrap_err();
        assert!(error.what.contains("found byte 0xff"), "{}", error.what);
    }
}
