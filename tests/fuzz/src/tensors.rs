//! `.tensors` files as the reference of the format has them, written without the library.

use sha2::{Digest, Sha256};
use tensorizer::codec::crypt::{Key, seal};
use tensorizer::format::dtype::DType;

use crate::input::{Faults, Input, Out, damage};

/// The key of all encrypted files.
pub const KEY: [u8; 32] = [7; 32];
const NAMES: [&[u8]; 12] = [
    b"a",
    b"b",
    b".weight",
    b"layer.0.weight",
    b"\x1e[0]",
    b"\x1e[1]",
    b"\x1e[\"a\",0]",
    b"\x1e[\"a\",\"b\"]",
    b"\x1e[ \"a\" , 0 ]",
    b"\xc3\xbc",
    b"",
    b"\x1e[\"\\ud800\"]",
];

/// A tensor of a file.
pub struct Made {
    pub name: Vec<u8>,
    pub kind: u8,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
    pad: usize,
    gap: usize,
    nonce: [u8; 24],
    /// Bytes of a piece; 0 for the sequential cipher.
    piece: u64,
    hashes: usize,
}

/// A file.
pub struct File {
    pub bytes: Vec<u8>,
    pub tensors: Vec<Made>,
    pub encrypted: bool,
    /// True if no field has a wrong value on purpose.
    pub sound: bool,
}

fn made(input: &mut Input<'_>) -> Made {
    let name = match input.below(4) {
        0 => input.take(6).to_vec(),
        _ => input.one_of(&NAMES).to_vec(),
    };
    let types: Vec<DType> = DType::all().collect();
    let dtype = *input.one_of(&types);
    let mut shape: Vec<u64> = Vec::new();
    for _ in 0..input.below(4) {
        let dim = *input.one_of(&[1, 2, 3, 7, 16, 0, 300, 1 << 32]);
        let most = shape.iter().product::<u64>().saturating_mul(dim);
        shape.push(if most > 4096 { 0 } else { dim });
    }
    let meta = input.once_in(16);
    let len = if meta { 0 } else { shape.iter().product::<u64>() * dtype.size() };
    let first = input.u8();
    let data = (0..len).map(|at| first.wrapping_add(at as u8) & 1).collect();
    let (pad, gap) = (*input.one_of(&[0, 0, 0, 8, 64, 300]), *input.one_of(&[0, 0, 0, 1, 5000]));
    Made {
        kind: if name.starts_with(b"\x1e") { 2 } else { input.below(3) as u8 },
        name,
        dtype: dtype.stored(),
        shape,
        data,
        pad,
        gap,
        nonce: [input.u8(); 24],
        piece: *input.one_of(&[1024, 2048, 0, 2 << 20]),
        hashes: input.below(5),
    }
}

impl Made {
    fn is_long(&self) -> bool {
        self.shape.iter().any(|&dim| dim > u64::from(u32::MAX))
    }

    fn dims_len(&self) -> usize {
        self.shape.len() * if self.is_long() { 8 } else { 4 }
    }

    fn entry_len(&self, tagged: bool) -> usize {
        let tag = if tagged { 4 } else { 0 };
        tag + 2 + self.name.len() + 1 + 1 + self.dtype.len() + 1 + self.dims_len() + 24
    }

    fn pieces(&self) -> usize {
        let len = self.data.len();
        if self.piece == 0 { usize::from(len > 0) } else { len.div_ceil(self.piece as usize) }
    }

    fn crypt_len(&self) -> usize {
        match (self.pieces(), self.piece) {
            (0, _) => 2,
            (_, 0) => 2 + 8 + 42,
            (count, _) => 2 + 8 + 42 + 16 * count,
        }
    }

    /// Which hashes: both, one of them, both in another order, none.
    fn algorithms(&self) -> &'static [u8] {
        [&[0, 1][..], &[1], &[0], &[1, 0], &[]][self.hashes]
    }

    fn hashes_len(&self) -> usize {
        let sizes = self.algorithms().iter().map(|&code| 2 + if code == 0 { 4 } else { 32 });
        1 + sizes.sum::<usize>()
    }

    pub fn header_len(&self, encrypted: bool) -> usize {
        let crypt = if encrypted { 8 + self.crypt_len() } else { 0 };
        let named = 8 + 2 + 1 + 2 + self.name.len() + 1 + self.dtype.len() + 1 + self.dims_len();
        named + 2 + self.hashes_len() + crypt + self.pad + 8
    }

    fn dtype_and_shape(&self, out: &mut Out<'_, '_, '_>) {
        out.int(self.dtype.len() as u64, 1);
        out.raw(self.dtype.as_bytes());
        out.int(self.shape.len() as u64, 1);
        for &dim in &self.shape {
            out.int(dim, if self.is_long() { 8 } else { 4 });
        }
    }

    /// Header, and data as they are in the file. Hashes fit what is in the header, wrong or not.
    pub fn body(&self, encrypted: bool, out: &mut Out<'_, '_, '_>) {
        let at = out.bytes.len();
        let mut data = self.data.clone();
        let key = Key::new(&KEY).expect("32 bytes");
        let step = if self.piece == 0 { data.len().max(1) } else { self.piece as usize };
        let mut macs: Vec<[u8; 16]> = Vec::new();
        if encrypted {
            let pieces = data.chunks_mut(step).enumerate();
            macs.extend(pieces.map(|(n, piece)| seal(piece, &self.nonce, n as u64, &key)));
        }
        out.int(self.header_len(encrypted) as u64, 8);
        out.int(0, 2);
        out.int(self.kind.into(), 1);
        out.int(self.name.len() as u64, 2);
        out.raw(&self.name);
        self.dtype_and_shape(out);
        out.int(self.hashes_len() as u64, 2);
        out.int(self.algorithms().len() as u64, 1);
        let mut values = Vec::new();
        for &code in self.algorithms() {
            let size = if code == 0 { 4 } else { 32 };
            out.int(code.into(), 1);
            out.int(size as u64, 1);
            values.push((code, out.bytes.len()));
            out.bytes.extend(std::iter::repeat_n(0, size));
        }
        let crypt_at = out.bytes.len();
        if encrypted {
            self.crypt_block(&macs, out);
        }
        let crypt_end = out.bytes.len();
        out.bytes.extend(std::iter::repeat_n(0, self.pad));
        out.int(self.data.len() as u64, 8);
        let covered = [&out.bytes[at..crypt_at], &out.bytes[crypt_end..], &self.data[..]].concat();
        for (code, place) in values {
            if code == 0 {
                let crc = crc32(&covered).to_le_bytes();
                out.bytes[place..place + 4].copy_from_slice(&crc);
            } else {
                out.bytes[place..place + 32].copy_from_slice(&Sha256::digest(&covered));
            }
        }
        out.bytes.extend(data);
    }

    fn crypt_block(&self, macs: &[[u8; 16]], out: &mut Out<'_, '_, '_>) {
        out.int(self.crypt_len() as u64, 8);
        out.int(u64::from(!macs.is_empty()), 2);
        if macs.is_empty() {
            return;
        }
        out.int(self.crypt_len() as u64 - 10, 8);
        if self.piece == 0 {
            out.int(3, 2);
            out.raw(&self.nonce);
        } else {
            out.int(2, 2);
            out.int(self.piece, 8);
            out.raw(&self.nonce);
            out.int(macs.len() as u64, 8);
        }
        for mac in macs {
            out.raw(mac);
        }
    }
}

/// CRC-32 of zlib, bit by bit.
pub fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            crc >> 1 ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

/// A file of up to four tensors.
pub fn file(input: &mut Input<'_>) -> File {
    let encrypted = input.once_in(3);
    let tagged = input.once_in(4);
    let mut tensors: Vec<Made> = (0..1 + input.below(4)).map(|_| made(input)).collect();
    let tagged = tagged || tensors.iter().any(Made::is_long);
    let version = match (tagged, encrypted) {
        (true, _) => 5,
        (_, true) => *input.one_of(&[3, 4]),
        _ => *input.one_of(&[4, 1, 2]),
    };
    let space = *input.one_of(&[0, 0, 16, 100]);
    let used: usize = tensors.iter().map(|made| made.entry_len(tagged)).sum();
    let index_len = used + space;
    let mut offsets = Vec::new();
    let mut at = 73 + index_len;
    for made in &mut tensors {
        at += made.gap;
        let data_at = at + made.header_len(encrypted);
        offsets.push((at, data_at));
        at = data_at + made.data.len();
    }
    let mut faults = Faults::new(input);
    let none = faults.are_none();
    let mut out = Out { bytes: Vec::new(), faults: &mut faults };
    out.raw(b"|TZR|");
    out.int(version, 4);
    out.int(u64::from(encrypted && version > 3) | if tagged { 2 } else { 0 }, 8);
    for _ in 0..3 {
        out.int(0, 8);
    }
    out.int(tensors.iter().map(|made| made.data.len() as u64).sum(), 8);
    out.int(0, 8);
    out.int(tensors.len() as u64, 8);
    out.int(index_len as u64, 8);
    for (made, &(header_at, data_at)) in tensors.iter().zip(&offsets) {
        if tagged {
            out.int(if made.is_long() { 5 } else { 1 }, 4);
        }
        out.int(made.name.len() as u64, 2);
        out.raw(&made.name);
        out.int(made.kind.into(), 1);
        made.dtype_and_shape(&mut out);
        out.int(header_at as u64, 8);
        out.int(data_at as u64, 8);
        out.int(made.data.len() as u64, 8);
    }
    out.bytes.extend(std::iter::repeat_n(0, space));
    for made in &tensors {
        out.bytes.extend(std::iter::repeat_n(0, made.gap));
        made.body(encrypted, &mut out);
    }
    out.int(0, 8);
    let mut bytes = out.bytes;
    let before = bytes.clone();
    damage(&mut bytes, faults.input());
    let sound = none && bytes == before;
    File { bytes, tensors, encrypted, sound }
}

/// Checks the hashes of a header, read without the library: each must fit the data.
pub fn check_hashes(file: &[u8], header_at: usize, data_at: usize, encrypted: bool, data: &[u8]) {
    let header = &file[header_at..data_at];
    let int = |at: usize, size: usize| {
        header[at..at + size].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte))
    };
    assert_eq!(int(0, 8), header.len() as u64);
    let mut at = 13 + int(11, 2) as usize;
    at += 1 + int(at, 1) as usize;
    // The width of dimensions is the index's: the section of hashes is found by both.
    let dims = int(at, 1) as usize;
    let fits = |at: usize| {
        let len = at.checked_add(3).filter(|&end| end <= header.len()).map(|_| int(at, 2))?;
        let end = (at + 2).checked_add(usize::try_from(len).ok()?)?;
        (end + 8 <= header.len() && section(header, at + 2, end).is_some()).then_some(end)
    };
    let found = [at + 1 + 4 * dims, at + 1 + 8 * dims].into_iter().find_map(|at| {
        let end = fits(at)?;
        let values = section(header, at + 2, end)?;
        let mut covered = header.to_vec();
        for (_, range) in &values {
            covered[range.clone()].fill(0);
        }
        if encrypted {
            let len = usize::try_from(int(end, 8)).ok()?;
            let after = end.checked_add(8)?.checked_add(len)?;
            covered.get(..after)?;
            covered.drain(end..after);
        }
        covered.extend(data);
        let right = values.iter().all(|(code, range)| match code {
            0 => header[range.clone()] == crc32(&covered).to_le_bytes(),
            _ => header[range.clone()] == Sha256::digest(&covered)[..],
        });
        (right && !values.is_empty()).then_some(())
    });
    assert!(found.is_some(), "verified, and the hashes do not fit");
}

fn section(header: &[u8], from: usize, end: usize) -> Option<Vec<(u8, std::ops::Range<usize>)>> {
    let mut at = from + 1;
    let mut found = Vec::new();
    for _ in 0..*header.get(from)? {
        let (&code, &size) = (header.get(at)?, header.get(at + 1)?);
        if !matches!((code, size), (0, 4) | (1, 32)) {
            return None;
        }
        found.push((code, at + 2..at + 2 + usize::from(size)));
        at += 2 + usize::from(size);
    }
    (at == end).then_some(found)
}
