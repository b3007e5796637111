//! `.tensors` files, versions 1 to 5.
//!
//! ```text
//! prologue  73 bytes: magic, version, flags, totals, length of the index
//! index     one entry per tensor, then unused space, which may end with a trailer: see `trailer`
//! tensor    header, data          (repeated, in the order of the index)
//! end       8 zero bytes
//! ```

pub mod crypt_info;
pub mod header;
pub mod identity;
pub mod index;
pub mod layout;
pub mod metadata;
pub mod prologue;
pub mod trailer;
