//! What happens to bytes on their way: hashing now, decryption later.

pub mod hash;
