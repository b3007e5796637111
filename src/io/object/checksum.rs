//! Checksums by which servers detect damaged uploads: CRC-64/NVME, of which those of parts combine
//! to that of the object, and CRC-32C.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

/// The CRC-64/NVME of some bytes; by default of none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checksum {
    value: u64,
    len: u64,
}

impl Checksum {
    pub fn of(bytes: &[u8]) -> Self {
        let value = checksum(CrcAlgorithm::Crc64Nvme, bytes);
        Checksum { value, len: bytes.len() as u64 }
    }

    /// The checksum of these bytes followed by those of `next`.
    pub fn combined_with(self, next: Checksum) -> Self {
        let value = checksum_combine(CrcAlgorithm::Crc64Nvme, self.value, next.value, next.len);
        Checksum { value, len: self.len + next.len }
    }

    /// The encoding of S3: big-endian, in base64.
    #[cfg(feature = "s3")]
    pub fn for_s3(self) -> String {
        BASE64_STANDARD.encode(self.value.to_be_bytes())
    }

    /// The encoding of Azure: little-endian, in base64.
    #[cfg(feature = "clouds")]
    pub fn for_azure(self) -> String {
        BASE64_STANDARD.encode(self.value.to_le_bytes())
    }
}

/// The CRC-32C of some bytes in Google's encoding: big-endian, in base64.
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
    fn checksums_are_encoded_as_google_and_azure_expect() {
        assert_eq!(Checksum::of(b"123456789").for_azure(), "iJh5CoYUi64=");
        // The check value of the catalogue is e3069283.
        assert_eq!(for_google(b"123456789"), "4waSgw==");
        assert_eq!(for_google(b""), "AAAAAA==");
    }

    #[test]
    fn checksums_of_parts_combine() {
        // The check value of the catalogue of CRCs.
        let combined = Checksum::of(b"123456789");
        assert_eq!((combined.value, &*combined.for_s3()), (0xae8b_1486_0a79_9888, "rosUhgp5mIg="));
        assert_eq!(Checksum::default().for_s3(), "AAAAAAAAAAA=");
        assert_eq!(Checksum::default(), Checksum::of(b""));
        for at in 0..=9 {
            let (one, other) = b"123456789".split_at(at);
            assert_eq!(
                Checksum::default()
                    .combined_with(Checksum::of(one))
                    .combined_with(Checksum::of(other)),
                combined
            );
        }
    }
}
