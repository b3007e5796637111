//! The encryption block: the part of each header in an encrypted file that describes the encryption
//! of the data.
//!
//! This module only parses and writes its bytes; `crate::codec::crypt` encrypts and decrypts.

use crate::error::Malformed;
use crate::format::bytes::Cursor;
use crate::sys::to_usize;

const CHUNK_KEY_DERIVATION: u16 = 1;
const CHUNK_PARALLEL: u16 = 2;
const CHUNK_SEQUENTIAL: u16 = 3;
const METHOD_ARGON2: u16 = 1;
const ALGORITHM_ARGON2ID13: i32 = 2;
const SALT_LEN: u16 = 16;
/// Bytes of an authentication tag.
pub const MAC_LEN: usize = 16;
/// Bytes that are encrypted as one piece, as in the earlier package.
pub const PIECE_LEN: u64 = 2 << 20;

/// The parameters for deriving the key from a passphrase: Argon2id version 1.3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyDerivation {
    /// Number of passes over the memory.
    pub opslimit: u64,
    /// Memory in bytes.
    pub memlimit: u64,
    /// The salt.
    pub salt: [u8; 16],
}

/// The encryption of a tensor's data: XSalsa20-Poly1305 for each piece by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cipher {
    /// Bytes per piece; the last may be shorter. None for one piece of all data.
    pub piece_len: Option<u64>,
    /// Nonce of the first piece; a 192-bit little-endian counter.
    pub nonce: [u8; 24],
    /// The authentication tag of each piece.
    pub macs: Vec<[u8; MAC_LEN]>,
}

/// The contents of an encryption block. Both fields are None for a tensor without data.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CryptInfo {
    /// The derivation of the key; None if the key was given directly.
    pub key_derivation: Option<KeyDerivation>,
    /// The encryption of the data.
    pub cipher: Option<Cipher>,
}

impl CryptInfo {
    /// Parses the contents of a block, which lie at file position `offset`.
    pub fn parse(bytes: &[u8], offset: u64) -> Result<Self, Malformed> {
        let mut cursor = Cursor::new(bytes, offset, "encryption block");
        let mut info = CryptInfo::default();
        for _ in 0..cursor.u16("chunk count")? {
            let len = cursor.u64("chunk length")?;
            let at = cursor.offset();
            let chunk = cursor.take(to_usize(len), "chunk")?;
            info.parse_chunk(Cursor::new(chunk, at, "encryption chunk"))?;
        }
        Ok(info)
    }

    fn parse_chunk(&mut self, mut chunk: Cursor<'_>) -> Result<(), Malformed> {
        match chunk.u16("chunk type")? {
            CHUNK_KEY_DERIVATION => {
                let method = chunk.u16("derivation method")?;
                if method != METHOD_ARGON2 {
                    return Err(chunk.error(format!(
                        "unknown key derivation method: expected {METHOD_ARGON2}, found {method}"
                    )));
                }
                let (opslimit, memlimit) = (chunk.u64("opslimit")?, chunk.u64("memlimit")?);
                let algorithm = chunk.i32("algorithm")?;
                if algorithm != ALGORITHM_ARGON2ID13 {
                    return Err(chunk.error(format!(
                        "unknown key derivation algorithm: expected {ALGORITHM_ARGON2ID13}, \
                         found {algorithm}"
                    )));
                }
                let salt_len = chunk.u16("salt length")?;
                if salt_len != SALT_LEN {
                    return Err(chunk.error(format!(
                        "invalid salt length: expected {SALT_LEN} bytes, found {salt_len}"
                    )));
                }
                let salt = chunk.fixed("salt")?;
                let found = KeyDerivation { opslimit, memlimit, salt };
                set_once(&mut self.key_derivation, found, "key derivation", &chunk)
            }
            CHUNK_PARALLEL => {
                let piece_len = chunk.u64("piece length")?;
                let nonce = chunk.fixed("nonce")?;
                let count = chunk.u64("MAC count")?;
                let tags = chunk.take(to_usize(count).saturating_mul(MAC_LEN), "MACs")?;
                let macs = tags.as_chunks::<MAC_LEN>().0.to_vec();
                let found = Cipher { piece_len: Some(piece_len), nonce, macs };
                set_once(&mut self.cipher, found, "cipher", &chunk)
            }
            CHUNK_SEQUENTIAL => {
                let (nonce, macs) = (chunk.fixed("nonce")?, vec![chunk.fixed("MAC")?]);
                let found = Cipher { piece_len: None, nonce, macs };
                set_once(&mut self.cipher, found, "cipher", &chunk)
            }
            other => Err(chunk.error(format!("unknown encryption chunk type {other}"))),
        }
    }
}

/// Bytes that [`encode`] writes, the length field included.
pub fn encoded_len(derived: bool, mac_count: u64) -> u64 {
    let derivation = if derived && mac_count > 0 { 8 + 42 } else { 0 };
    let cipher = if mac_count > 0 { 8 + 42 + mac_count * MAC_LEN as u64 } else { 0 };
    8 + 2 + derivation + cipher
}

/// Encodes an encryption block with its length field. Without tags, it is that of a tensor without
/// data.
pub fn encode(
    derivation: Option<&KeyDerivation>,
    piece_len: u64,
    nonce: &[u8; 24],
    macs: &[[u8; MAC_LEN]],
) -> Vec<u8> {
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    if let Some(derivation) = derivation.filter(|_| !macs.is_empty()) {
        let mut chunk = CHUNK_KEY_DERIVATION.to_le_bytes().to_vec();
        chunk.extend(METHOD_ARGON2.to_le_bytes());
        chunk.extend(derivation.opslimit.to_le_bytes());
        chunk.extend(derivation.memlimit.to_le_bytes());
        chunk.extend(ALGORITHM_ARGON2ID13.to_le_bytes());
        chunk.extend(SALT_LEN.to_le_bytes());
        chunk.extend(derivation.salt);
        chunks.push(chunk);
    }
    if !macs.is_empty() {
        let mut chunk = CHUNK_PARALLEL.to_le_bytes().to_vec();
        chunk.extend(piece_len.to_le_bytes());
        chunk.extend(nonce);
        chunk.extend((macs.len() as u64).to_le_bytes());
        chunk.extend_from_slice(macs.as_flattened());
        chunks.push(chunk);
    }
    let count = if chunks.len() == 2 { 2u16 } else { u16::from(!chunks.is_empty()) };
    let mut body = count.to_le_bytes().to_vec();
    for chunk in chunks {
        body.extend((chunk.len() as u64).to_le_bytes());
        body.extend(chunk);
    }
    [(body.len() as u64).to_le_bytes().to_vec(), body].concat()
}

fn set_once<T>(
    slot: &mut Option<T>,
    value: T,
    what: &str,
    at: &Cursor<'_>,
) -> Result<(), Malformed> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(at.error(format!("expected at most one {what} chunk, found two"))),
    }
}

impl std::fmt::Display for CryptInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.cipher {
            None => f.write_str("no data, not encrypted")?,
            Some(Cipher { piece_len: Some(piece_len), macs, .. }) => {
                write!(f, "XSalsa20-Poly1305 in {} pieces of {piece_len} bytes", macs.len())?;
            }
            Some(_) => f.write_str("XSalsa20-Poly1305 in one piece")?,
        }
        if let Some(kdf) = &self.key_derivation {
            write!(
                f,
                ", key by Argon2id with {} passes over {} bytes",
                kdf.opslimit, kdf.memlimit
            )?;
        }
        Ok(())
    }
}
