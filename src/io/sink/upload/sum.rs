//! The sum by which a server finds bytes that are not what was sent: CRC-64/NVME, of which those of
//! parts give that of the object.

use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

/// The sum of some bytes; by default of none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    value: u64,
    len: u64,
}

impl Sum {
    pub fn of(bytes: &[u8]) -> Self {
        let value = checksum(CrcAlgorithm::Crc64Nvme, bytes);
        Sum { value, len: bytes.len() as u64 }
    }

    /// That of the same bytes and of those behind them.
    pub fn and(self, next: Sum) -> Self {
        let value = checksum_combine(CrcAlgorithm::Crc64Nvme, self.value, next.value, next.len);
        Sum { value, len: self.len + next.len }
    }

    /// As S3 has it: its bytes, the highest first, in base64.
    pub fn text(self) -> String {
        const DIGITS: &[u8; 64] =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        // Eleven digits: the last has four bits of the sum, and two that are 0.
        let bits = u128::from(self.value) << 2;
        let digit = |place: u32| {
            let digit = (bits >> (6 * place)) & 63;
            usize::try_from(digit).ok().and_then(|at| DIGITS.get(at)).map(|&byte| char::from(byte))
        };
        (0..11).rev().filter_map(digit).chain(['=']).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_parts_give_that_of_the_whole() {
        // The check value of the catalogue of CRCs.
        let whole = Sum::of(b"123456789");
        assert_eq!((whole.value, &*whole.text()), (0xae8b_1486_0a79_9888, "rosUhgp5mIg="));
        assert_eq!(Sum::default().text(), "AAAAAAAAAAA=");
        assert_eq!(Sum::default(), Sum::of(b""));
        for at in 0..=9 {
            let (one, other) = b"123456789".split_at(at);
            assert_eq!(Sum::default().and(Sum::of(one)).and(Sum::of(other)), whole);
        }
    }
}
