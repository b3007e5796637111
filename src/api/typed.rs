//! The short way for Rust programs without torch: tensors as slices of numbers.

use std::path::Path;

use bytemuck::{Pod, PodCastError};
use half::{bf16, f16};

use crate::api::file::TensorFile;
use crate::api::load::{LoadOptions, load, load_into};
use crate::api::save::save;
use crate::api::save_options::{SaveOptions, SaveTensor};
use crate::cancel::Never;
use crate::engine::write::Origin;
use crate::error::{Error, Result};
use crate::format::TensorKind;
use crate::format::dtype::DType;
use crate::format::index::Entry;
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

fn dtype_of<T: Element>() -> Result<DType> {
    DType::from_name(T::NAME).ok_or_else(|| Error::Bug(format!("no element type {}", T::NAME)))
}

/// A tensor in memory of its own.
pub struct Tensor {
    name: Name,
    dtype: DType,
    shape: Vec<u64>,
    memory: HostBuffer,
}

impl Tensor {
    /// Its name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dimensions; none for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its bytes, in row-major order, whatever its element type.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// Its elements in row-major order; an error if they are of another type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        expect::<T>(&self.name, self.dtype)?;
        match bytemuck::try_cast_slice(self.bytes()) {
            // An empty tensor has no address.
            Err(PodCastError::TargetAlignmentGreaterAndInputNotAligned)
                if self.bytes().is_empty() =>
            {
                Ok(&[])
            }
            cast => cast.map_err(|e| Error::Bug(format!("tensor `{}`: {e}", self.name))),
        }
    }
}

fn expect<T: Element>(name: &Name, found: DType) -> Result<()> {
    if found.name() == T::NAME {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "tensor `{name}`: expected elements of type {}, found {found}",
        T::NAME
    )))
}

impl TensorFile {
    /// Reads one tensor, given by the stored form of its name, into memory of its own.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        self.read_all(&[name])?.pop().ok_or_else(|| Error::Bug(format!("`{name}` was not read")))
    }

    /// Reads several tensors at once, in the order of their names.
    pub fn read_all<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<Tensor>> {
        let selection = self.select(names)?;
        let loaded = load(self, &selection, &LoadOptions::default(), &Never)?;
        loaded
            .into_iter()
            .map(|loaded| {
                let Entry { name, dtype, shape, .. } = self.entry(loaded.number)?;
                let (name, shape) = (name.clone(), shape.to_vec());
                Ok(Tensor { name, dtype: *dtype, shape, memory: loaded.memory })
            })
            .collect()
    }

    /// Reads one tensor into memory of the caller, which must have its element type and number of
    /// elements; otherwise nothing is written to it.
    pub fn read_into<T: Element>(&self, name: &str, out: &mut [T]) -> Result<()> {
        let selection = self.select(&[name])?;
        for &number in &selection {
            let entry = self.entry(number)?;
            expect::<T>(&entry.name, entry.dtype)?;
        }
        let bytes = bytemuck::cast_slice_mut(out);
        load_into(self, &selection, vec![bytes], &LoadOptions::default(), &Never).map(drop)
    }
}

impl<'a> SaveTensor<'a> {
    /// A tensor from its elements in row-major order.
    ///
    /// `name` is a plain key or the stored form of a nested one.
    pub fn new<T: Element>(name: &str, shape: &[u64], elements: &'a [T]) -> Result<Self> {
        Self::from_bytes(name, dtype_of::<T>()?, shape, bytemuck::cast_slice(elements))
    }

    /// A tensor of any element type from its bytes in row-major order, little-endian.
    pub fn from_bytes(name: &str, dtype: DType, shape: &[u64], bytes: &'a [u8]) -> Result<Self> {
        let name = Name::from_stored_or_key(name).map_err(Error::InvalidArgument)?;
        let wanted = shape.iter().try_fold(dtype.size(), |len, &dim| len.checked_mul(dim));
        if wanted != Some(bytes.len() as u64) {
            return Err(Error::InvalidArgument(format!(
                "tensor `{name}`: {dtype} {shape:?} does not have {} bytes",
                bytes.len()
            )));
        }
        Ok(SaveTensor {
            name,
            kind: TensorKind::StateDict,
            module_index: 0,
            dtype,
            shape: shape.to_vec(),
            data: Origin::Bytes(bytes),
        })
    }
}

/// Writes a file: it appears at the path whole, or not at all with the old one left.
pub fn write(path: &Path, tensors: Vec<SaveTensor<'_>>) -> Result<()> {
    save(path, tensors, SaveOptions::default(), &Never)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_in_the_table_of_types_with_their_sizes() {
        for &(name, size) in ALL {
            assert_eq!(DType::from_name(name).unwrap().size(), size as u64, "{name}");
        }
    }
}
