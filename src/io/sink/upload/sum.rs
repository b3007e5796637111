//! The sums by which servers find bytes that are not what was sent: CRC-64/NVME, of which those of
//! parts give that of the object, and CRC-32C.

use base64::prelude::{BASE64_STANDARD, Engine as _};
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
    #[cfg(feature = "s3")]
    pub fn for_s3(self) -> String {
        BASE64_STANDARD.encode(self.value.to_be_bytes())
    }

    /// As Azure has it: its bytes, the lowest first, in base64.
    #[cfg(feature = "clouds")]
    pub fn for_azure(self) -> String {
        BASE64_STANDARD.encode(self.value.to_le_bytes())
    }
}

/// The sum that Google looks at, CRC-32C, as it has it: its bytes, the highest first, in base64.
#[cfg(feature = "clouds")]
pub fn for_google(bytes: &[u8]) -> String {
    let value = checksum(CrcAlgorithm::Crc32Iscsi, bytes);
    BASE64_STANDARD.encode(u32::try_from(value).unwrap_or(0).to_be_bytes())
}

#[cfg(test)]
#[cfg(feature = "s3")]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "clouds")]
    fn sums_of_the_other_clouds() {
        assert_eq!(Sum::of(b"123456789").for_azure(), "iJh5CoYUi64=");
        // The check value of the catalogue is e3069283.
        assert_eq!(for_google(b"123456789"), "4waSgw==");
        assert_eq!(for_google(b""), "AAAAAA==");
    }

    #[test]
    fn sums_of_parts_give_that_of_the_whole() {
        // The check value of the catalogue of CRCs.
        let whole = Sum::of(b"123456789");
        assert_eq!((whole.value, &*whole.for_s3()), (0xae8b_1486_0a79_9888, "rosUhgp5mIg="));
        assert_eq!(Sum::default().for_s3(), "AAAAAAAAAAA=");
        assert_eq!(Sum::default(), Sum::of(b""));
        for at in 0..=9 {
            let (one, other) = b"123456789".split_at(at);
            assert_eq!(Sum::default().and(Sum::of(one)).and(Sum::of(other)), whole);
        }
    }
}
