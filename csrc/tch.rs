//! `tch::Tensor`s, for Rust programs on LibTorch.
//!
//! Each release of `tch` fits one minor of torch: 0.24 is for torch 2.11.
#![allow(unsafe_code)]

use std::path::Path;

use cxx::UniquePtr;
use tch::{Device, Tensor};
use tensorizer::TensorFile;
use tensorizer::device::{CPU, DeviceIndex};
use tensorizer::error::{Error, Result};
use tensorizer::{SaveOptions, save as save_tensors};

use crate::bridge::new_tensors;
use crate::operators::loaded;
use crate::tensor::to_save;
use crate::torch::{self, OpOptions, TensorList, thrown};

/// Makes a list of new references to the tensors.
fn list<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Result<UniquePtr<TensorList>> {
    let addresses: Vec<usize> = tensors.map(|one| one.as_ptr().expose_provenance()).collect();
    // SAFETY: each is the address of an `at::Tensor` that its `tch::Tensor` keeps alive for 't.
    unsafe { torch::list_tensors(&addresses) }.map_err(thrown)
}

/// Loads tensors, given by number, with their names.
fn load_numbers(
    file: &TensorFile,
    numbers: &[usize],
    device: Device,
) -> Result<Vec<(String, Tensor)>> {
    let options = OpOptions { verify: false, readers: 0, key: Vec::new(), device: index(device) };
    let mut loaded = loaded(file, numbers, false, options)?;
    let names: Vec<String> = (0..loaded.size()).map(|at| loaded.name(at).to_owned()).collect();
    let tensors = new_tensors(&mut loaded).map_err(thrown)?.into_iter().map(|address| {
        // SAFETY: a new `at::Tensor` on the heap, which nothing else owns.
        let tensor = unsafe { Tensor::from_ptr(std::ptr::with_exposed_provenance_mut(address)) };
        if device == tensor.device() { Ok(tensor) } else { tensor.f_to_device(device) }
    });
    let tensors = tensors.collect::<std::result::Result<Vec<_>, _>>();
    let tensors = tensors.map_err(|e| Error::Unsupported(e.to_string()))?;
    Ok(names.into_iter().zip(tensors).collect())
}

/// Returns the core's number of a device. Tensors for devices that it does not know come to the CPU
/// first.
fn index(device: Device) -> DeviceIndex {
    match device {
        Device::Cuda(index) => DeviceIndex::try_from(index).unwrap_or(CPU),
        _ => CPU,
    }
}

/// Loads all tensors of a file with their names, in its order.
pub fn load(path: &Path, device: Device) -> Result<Vec<(String, Tensor)>> {
    let file = TensorFile::open(path)?;
    let all: Vec<usize> = (0..file.entries().len()).collect();
    load_numbers(&file, &all, device)
}

/// Loads the tensors with these names, in this order.
pub fn load_named<S: AsRef<str>>(path: &Path, names: &[S], device: Device) -> Result<Vec<Tensor>> {
    let file = TensorFile::open(path)?;
    let loaded = load_numbers(&file, &file.select(names)?, device)?;
    Ok(loaded.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Fills existing tensors of the same dtypes and shapes in place, on any device. If a name, dtype
/// or shape does not fit, no tensor is changed.
pub fn load_into<S: AsRef<str>>(path: &Path, out: &mut [(S, &mut Tensor)]) -> Result<()> {
    let uri = path.to_str().ok_or_else(|| {
        Error::InvalidArgument(format!("the path {} is not UTF-8", path.display()))
    })?;
    let names: Vec<String> = out.iter().map(|(name, _)| name.as_ref().to_owned()).collect();
    let tensors = list(out.iter().map(|(_, tensor)| &**tensor))?;
    torch::load_into_list(uri, &names, &tensors).map_err(thrown)
}

/// Writes a file with these tensors. It appears whole; on an error, an older file stays.
pub fn save<S: AsRef<str>>(path: &Path, tensors: &[(S, &Tensor)]) -> Result<()> {
    let names: Vec<String> = tensors.iter().map(|(name, _)| name.as_ref().to_owned()).collect();
    let list = list(tensors.iter().map(|(_, tensor)| *tensor))?;
    save_tensors(path, to_save(&names, &list)?, SaveOptions::default(), &|| Ok(()))
}
