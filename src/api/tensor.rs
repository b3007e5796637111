//! A tensor that was loaded, and Rust's types of its elements.

use std::sync::Arc;

use bytemuck::{Pod, PodCastError};
use half::{bf16, f16};

use crate::codec::CompactHeader;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::format::dtype::DType;
use crate::format::name::Name;
use crate::mem::HostBuffer;

// Elements are little-endian in files, and are used as they are.
#[cfg(target_endian = "big")]
compile_error!("tensorizer needs a little-endian machine");

/// A Rust type that is an element type of the format.
pub trait Element: Pod {
    /// torch's name of the type, without `torch.`.
    const NAME: &'static str;
}

macro_rules! elements {
    ($($rust:ty => $name:literal),+ $(,)?) => {
        $(impl Element for $rust { const NAME: &'static str = $name; })+

        #[cfg(test)]
        const ALL: &[(&str, usize)] = &[$(($name, size_of::<$rust>())),+];
    };
}

elements! {
    u8 => "uint8", u16 => "uint16", u32 => "uint32", u64 => "uint64",
    i8 => "int8", i16 => "int16", i32 => "int32", i64 => "int64",
    f16 => "float16", bf16 => "bfloat16", f32 => "float32", f64 => "float64",
}

pub(super) fn dtype_of<T: Element>() -> Result<DType> {
    DType::from_name(T::NAME).ok_or_else(|| Error::Bug(format!("no element type {}", T::NAME)))
}

/// A tensor whose bytes have arrived, in memory of its own.
pub struct Tensor {
    pub(super) number: usize,
    /// Its header, which agrees with the index.
    pub header: CompactHeader,
    /// Its bytes, in row-major order.
    pub memory: HostBuffer,
    pub(super) entries: Arc<Vec<Entry>>,
}

impl Tensor {
    /// Returns its number in the file.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns its entry in the index.
    #[allow(clippy::indexing_slicing)] // It was loaded from these.
    pub fn entry(&self) -> &Entry {
        &self.entries[self.number]
    }

    /// Returns its name.
    pub fn name(&self) -> &Name {
        &self.entry().name
    }

    /// Returns its element type.
    pub fn dtype(&self) -> DType {
        self.entry().dtype
    }

    /// Returns its dimensions; none for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.entry().shape
    }

    /// Returns its bytes in row-major order, for any element type.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// Returns its elements in row-major order; an error if they are of another type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        check_element_type::<T>(self.name(), self.dtype())?;
        match bytemuck::try_cast_slice(self.bytes()) {
            // The address of an empty tensor need not be aligned.
            Err(PodCastError::TargetAlignmentGreaterAndInputNotAligned)
                if self.bytes().is_empty() =>
            {
                Ok(&[])
            }
            cast => cast.map_err(|e| Error::Bug(format!("tensor `{}`: {e}", self.name()))),
        }
    }
}

/// Refuses an element type that differs from the one found.
pub(super) fn check_element_type<T: Element>(name: &Name, found: DType) -> Result<()> {
    if found.name() == T::NAME {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "tensor `{name}`: expected elements of type {}, found {found}",
        T::NAME
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_in_the_table_of_types_with_their_sizes() {
        for &(name, size) in ALL {
            assert_eq!(DType::from_name(name).unwrap().size(), size as u64, "{name}");
        }
    }
}
