//! Processing of bytes between file and memory: encryption, decryption and hashing.

mod compact_header;
pub mod crypt;
pub mod decrypt;
pub mod encrypt;
pub mod hash;
mod hash_pool;
pub mod sha256;
mod sha256_pair;
mod tensor_codec;

pub use compact_header::CompactHeader;
pub use hash_pool::{HashBatch, HashPool};
pub use tensor_codec::{CodecTensors, HeaderCallback, TensorCodec};
