//! What happens to bytes on their way: hashing now, decryption later.

pub mod hash;
mod hash_pool;
mod sha256;
mod sha256_pair;

pub use hash_pool::HashPool;
