//! Processing of bytes between file and memory: encryption, decryption and hashing.

pub mod crypt;
pub mod decrypt;
pub mod encrypt;
pub mod hash;
mod hash_pool;
mod kept;
pub mod sha256;
mod sha256_pair;

pub use hash_pool::{HashPool, Taken};
pub use kept::KeptHeader;
