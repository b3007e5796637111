//! Bytes of a `.tensors` file to structs and back. Pure: no I/O, no torch, no Python.
//!
//! ```text
//! prologue  73 bytes: magic, version, flags, totals, length of the index
//! index     one entry a tensor, then unused space
//! tensor    header, data          (repeated, in the order of the index)
//! end       8 zero bytes
//! ```
//!
//! Nothing here allocates more than its input justifies, and nothing trusts a length.

pub mod bytes;
pub mod crypt_info;
pub mod dtype;
pub mod header;
pub mod index;
pub mod layout;
pub mod name;
pub mod name_tree;
pub mod pair;
mod path;
pub mod prologue;

/// What a tensor was in the object that was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TensorKind {
    /// A parameter of a module.
    Parameter = 0,
    /// A buffer of a module.
    Buffer = 1,
    /// An element of a state dict.
    StateDict = 2,
}

impl TensorKind {
    /// The kind that a byte of the file stands for.
    pub fn from_u8(value: u8) -> Option<Self> {
        match value {
            0 => Some(TensorKind::Parameter),
            1 => Some(TensorKind::Buffer),
            2 => Some(TensorKind::StateDict),
            _ => None,
        }
    }
}

/// Number of elements of a shape, or `None` beyond 2⁶⁴ − 1.
pub fn element_count(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
}
