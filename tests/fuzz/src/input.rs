//! The fuzzer's bytes as numbers and choices. Zeros follow where they end.

/// Reads front to back.
pub struct Input<'b>(&'b [u8]);

impl<'b> Input<'b> {
    pub fn new(bytes: &'b [u8]) -> Self {
        Input(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, len: usize) -> &'b [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    pub fn rest(&mut self) -> &'b [u8] {
        self.take(usize::MAX)
    }

    pub fn u8(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub fn u64(&mut self) -> u64 {
        self.take(8).iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    }

    /// A number below `end`, which is at most 256.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end.max(1)
    }

    pub fn one_of<'o, T>(&mut self, options: &'o [T]) -> &'o T {
        &options[self.below(options.len())]
    }

    /// True for one in `times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == times - 1
    }

    /// A number that a field may have in place of the right one.
    pub fn wrong(&mut self, right: u64) -> u64 {
        match self.below(12) {
            0 => 0,
            1 => 1,
            2 => right.wrapping_add(1),
            3 => right.wrapping_sub(1),
            4 => right ^ 1 << self.below(64),
            5 => u64::MAX,
            6 => u64::MAX >> 1,
            7 => 1 << self.below(64),
            8 => right.wrapping_mul(2),
            9 => u64::from(self.u8()),
            10 => right.wrapping_add(8),
            _ => self.u64(),
        }
    }
}

/// Numbered fields, of which some get a wrong value.
pub struct Faults<'i, 'b> {
    input: &'i mut Input<'b>,
    wrong: Vec<usize>,
    next: usize,
}

impl<'i, 'b> Faults<'i, 'b> {
    /// Up to three of the first 256 fields; often none.
    pub fn new(input: &'i mut Input<'b>) -> Self {
        let count = input.below(5).saturating_sub(1);
        let wrong = (0..count).map(|_| usize::from(input.u8())).collect();
        Faults { input, wrong, next: 0 }
    }

    /// The value of the next field: `right`, or a wrong one.
    pub fn field(&mut self, right: u64) -> u64 {
        self.next += 1;
        let is_wrong = self.wrong.contains(&(self.next - 1));
        if is_wrong { self.input.wrong(right) } else { right }
    }

    pub fn are_none(&self) -> bool {
        self.wrong.is_empty()
    }

    pub fn input(&mut self) -> &mut Input<'b> {
        self.input
    }
}

/// Little-endian fields one after another.
pub struct Out<'f, 'i, 'b> {
    pub bytes: Vec<u8>,
    pub faults: &'f mut Faults<'i, 'b>,
}

impl Out<'_, '_, '_> {
    /// A field of so many bytes.
    pub fn int(&mut self, right: u64, size: usize) {
        let value = self.faults.field(right);
        self.bytes.extend(&value.to_le_bytes()[..size]);
    }

    /// A field of bytes, of which one may be wrong.
    pub fn raw(&mut self, bytes: &[u8]) {
        let at = self.bytes.len();
        self.bytes.extend(bytes);
        if !bytes.is_empty() {
            let first = u64::from(bytes[0]);
            let value = self.faults.field(first);
            if value != first {
                let place = at + (value >> 8) as usize % bytes.len();
                self.bytes[place] ^= (value as u8).max(1);
            }
        }
    }
}

/// Changes that know no fields: bytes flipped, cut off, put in, appended.
pub fn damage(bytes: &mut Vec<u8>, input: &mut Input<'_>) {
    for _ in 0..input.below(4).saturating_sub(1) {
        let at = (input.u64() & 0xffff_ffff) as usize % bytes.len().max(1);
        match input.below(5) {
            0 => bytes.truncate(at),
            1 => bytes.extend(input.take(9)),
            2 => drop(bytes.splice(at..at, input.take(3).iter().copied())),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            _ => {
                let bit = 1 << input.below(8);
                bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= bit);
            }
        }
    }
}
