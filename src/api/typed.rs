//! A simple interface for Rust programs without torch: tensors as slices of numbers.

use std::path::Path;

use super::file::TensorFile;
use super::load::{load, load_into};
use super::save_all::save;
use super::save_options::{SaveOptions, SaveTensor};
use super::tensor::{Element, Tensor, check_element_type, dtype_of};
use crate::cancel::Never;
use crate::engine::load_options::LoadOptions;
use crate::engine::write::TensorData;
use crate::error::{Error, Result};
use crate::format::TensorKind;
use crate::format::dtype::DType;
use crate::format::name::Name;

impl TensorFile {
    /// Reads one tensor, given by the stored form of its name, into memory of its own.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        self.read_all(&[name])?.pop().ok_or_else(|| Error::Bug(format!("`{name}` was not read")))
    }

    /// Reads several tensors at once, in the order of their names.
    pub fn read_all<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<Tensor>> {
        let selection = self.select(names)?;
        load(self, &selection, &LoadOptions::default(), &Never)
    }

    /// Reads one tensor into memory of the caller, which must have its element type and number of
    /// elements; otherwise nothing is written to it.
    pub fn read_into<T: Element>(&self, name: &str, out: &mut [T]) -> Result<()> {
        let selection = self.select(&[name])?;
        for &number in &selection {
            let entry = self.entry(number)?;
            check_element_type::<T>(&entry.name, entry.dtype)?;
        }
        let bytes = bytemuck::cast_slice_mut(out);
        load_into(self, &selection, vec![bytes], &LoadOptions::default(), &Never).map(drop)
    }
}

impl<'a> SaveTensor<'a> {
    /// Makes a tensor of its elements in row-major order.
    ///
    /// `name` is a plain key or the stored form of a nested one.
    pub fn new<T: Element>(name: &str, shape: &[u64], elements: &'a [T]) -> Result<Self> {
        Self::from_bytes(name, dtype_of::<T>()?, shape, bytemuck::cast_slice(elements))
    }

    /// Makes a tensor of any element type of its bytes in row-major order, little-endian.
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
            data: TensorData::Bytes(bytes),
        })
    }
}

/// Writes a file. It appears at the path whole; on an error, an older file stays.
pub fn write(path: &Path, tensors: Vec<SaveTensor<'_>>) -> Result<()> {
    save(path, tensors, SaveOptions::default(), &Never)
}
