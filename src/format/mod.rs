//! Converts bytes of files to structs and back. Pure: no I/O, no torch, no Python.
//!
//! Each format becomes a [`catalog`]: tensors, and the positions of their bytes. Nothing here
//! allocates more than its input justifies, and no length in a file is trusted.

pub mod bytes;
pub mod catalog;
pub mod dtype;
mod json;
pub mod name;
pub mod name_tree;
pub mod safetensors;
pub mod shards;
pub mod tensors;
pub mod torch_legacy;
pub mod torch_zip;

/// The role of a tensor in the object that was saved.
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
    /// All kinds, in the order of their numbers.
    pub const ALL: [TensorKind; 3] =
        [TensorKind::Parameter, TensorKind::Buffer, TensorKind::StateDict];

    /// Its name in the output of the command.
    pub fn name(self) -> &'static str {
        match self {
            TensorKind::Parameter => "param",
            TensorKind::Buffer => "buffer",
            TensorKind::StateDict => "state_dict",
        }
    }

    /// The kind that a byte of a file stands for.
    pub fn from_u8(value: u8) -> Option<Self> {
        Self::ALL.get(usize::from(value)).copied()
    }
}

/// Number of elements of a shape, or `None` beyond 2⁶⁴ − 1.
pub fn element_count(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
}
