//! Conversion between the core and torch: dtype, shape and bytes to a tensor and back.
//!
//! A loaded tensor owns its memory: the storage that C++ makes of a [`TorchHostMemory`] drops it. A
//! tensor being saved is lent: the list that holds it outlives every use of its bytes. One of the
//! few modules that may use `unsafe`.
#![allow(unsafe_code)]

use std::sync::Arc;

use cxx::UniquePtr;
use tensorizer::TensorFile;
use tensorizer::device::{self, CPU, Consumer, Device, DeviceBytes, DeviceIndex, DeviceMemory};
use tensorizer::error::{Error, Result};
use tensorizer::format::TensorKind;
use tensorizer::format::catalog::Entry;
use tensorizer::format::dtype::DType;
use tensorizer::format::name::Name;
use tensorizer::mem::HostBuffer;
use tensorizer::{HostCopy, SaveTensor, TensorData, to_usize};

use crate::torch::{self, TensorInfo, TensorList, TensorPlace, TorchBlocks, thrown};

/// Tensors that were loaded, before torch takes them.
pub struct LoadedTensors {
    /// The entries of a file's index, and the numbers of these tensors among them.
    entries: Arc<Vec<Entry>>,
    numbers: Vec<usize>,
    locations: Vec<TensorLocation>,
    /// The memory blocks of each device.
    blocks: Vec<UniquePtr<TorchBlocks>>,
}

/// The memory of a loaded tensor.
pub enum TensorLocation {
    /// In host memory of its own.
    Host(HostBuffer),
    /// In the memory of a device: the device's position in the call's list, the number of the
    /// block, and the position of the first byte in it.
    Block(usize, usize, u64),
    /// No memory yet: a tensor of zeros will be created on the device at this position in the list.
    Zeros(usize),
}

impl LoadedTensors {
    /// Creates a list of the tensors with these numbers, each with its memory.
    pub fn new(
        file: &TensorFile,
        numbers: &[usize],
        locations: Vec<TensorLocation>,
        blocks: Vec<UniquePtr<TorchBlocks>>,
    ) -> Self {
        let (entries, numbers) = (Arc::clone(file.shared_entries()), numbers.to_vec());
        LoadedTensors { entries, numbers, locations, blocks }
    }

    /// Makes a list of copies of lent tensors in host memory, in their order, all of one name.
    pub fn copies(tensors: &TensorList, memory: Vec<HostBuffer>) -> Result<Self> {
        let name = Name::from_key("copy").map_err(Error::Bug)?;
        let entries = (0..memory.len()).map(|at| {
            let TensorInfo { dtype, shape, len, .. } = tensors.info(at).map_err(thrown)?;
            let dtype = stored_dtype(&name, dtype)?;
            Ok(Entry::new(name.clone(), dtype, shape.into(), 0, 0, len))
        });
        Ok(LoadedTensors {
            entries: Arc::new(entries.collect::<Result<_>>()?),
            numbers: (0..memory.len()).collect(),
            locations: memory.into_iter().map(TensorLocation::Host).collect(),
            blocks: Vec::new(),
        })
    }

    // C++ passes only indices below `size()`. For others these return an empty or default value.

    /// Returns the number of tensors.
    pub fn size(&self) -> usize {
        self.locations.len()
    }

    fn entry(&self, at: usize) -> Option<&Entry> {
        self.entries.get(*self.numbers.get(at)?)
    }

    /// Returns the stored form of a tensor's name.
    pub fn name(&self, at: usize) -> &str {
        self.entry(at).map_or("", |entry| entry.name.stored())
    }

    /// Returns the dtype, as a `c10::ScalarType`.
    pub fn dtype(&self, at: usize) -> i8 {
        self.entry(at).map_or(0, |entry| entry.dtype.code())
    }

    /// Returns the dimensions.
    pub fn shape(&self, at: usize) -> &[i64] {
        self.entry(at).map_or(&[0], Entry::signed_shape)
    }

    /// Takes a tensor's host memory; empty if it was taken before, or if the tensor has none.
    pub fn take(&mut self, at: usize) -> Box<TorchHostMemory> {
        let none = HostBuffer::empty();
        let memory_of_tensor = match self.locations.get_mut(at) {
            Some(TensorLocation::Host(memory)) => std::mem::replace(memory, none),
            _ => none,
        };
        Box::new(TorchHostMemory(memory_of_tensor))
    }

    /// Returns a tensor's place in the memory of devices.
    pub fn place(&self, at: usize) -> TensorPlace {
        match self.locations.get(at) {
            Some(&TensorLocation::Block(device, block, offset)) => {
                TensorPlace { device, block: i64::try_from(block).unwrap_or(i64::MAX), offset }
            }
            Some(&TensorLocation::Zeros(device)) => TensorPlace { device, block: -2, offset: 0 },
            _ => TensorPlace { device: 0, block: -1, offset: 0 },
        }
    }

    /// Returns the number of devices that tensors are on.
    pub fn devices(&self) -> usize {
        self.blocks.len()
    }

    /// Takes the blocks of a device; null if they were taken before, or if there are none.
    pub fn take_blocks(&mut self, device: usize) -> UniquePtr<TorchBlocks> {
        let blocks = self.blocks.get_mut(device);
        blocks.map_or_else(UniquePtr::null, |blocks| std::mem::replace(blocks, UniquePtr::null()))
    }
}

/// Host memory that is handed to torch.
pub struct TorchHostMemory(HostBuffer);

impl TorchHostMemory {
    /// Returns the address of the bytes; valid as long as this value lives.
    pub fn data(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Returns the number of bytes.
    pub fn size(&self) -> usize {
        self.0.bytes().len()
    }
}

/// Describes the tensors of a list, to be saved as a state dict under these names.
pub fn to_save<'t>(names: &[String], tensors: &'t TensorList) -> Result<Vec<SaveTensor<'t>>> {
    if names.len() != tensors.size() {
        return Err(Error::InvalidArgument(format!(
            "expected as many names as tensors, found {} names for {} tensors",
            names.len(),
            tensors.size()
        )));
    }
    let mut devices = LentDevices::default();
    let found = names
        .iter()
        .enumerate()
        .map(|(at, name)| {
            let name = Name::from_stored_or_key(name).map_err(Error::InvalidArgument)?;
            one_to_save(name, TensorKind::StateDict, 0, tensors, at, &mut devices)
        })
        .collect::<Result<Vec<_>>>()?;
    refuse_meta(&found)?;
    Ok(found)
}

/// The most names in a message.
const MAX_SHOWN: usize = 20;

/// Refuses tensors of the meta device, which have no data, by their names.
fn refuse_meta(tensors: &[SaveTensor<'_>]) -> Result<()> {
    let without_data = tensors.iter().filter(|one| matches!(one.data, TensorData::Meta));
    let names: Vec<String> = without_data.map(|one| format!("`{}`", one.name)).collect();
    if names.is_empty() {
        return Ok(());
    }
    let some: Vec<&str> = names.iter().take(MAX_SHOWN).map(String::as_str).collect();
    let more = if names.len() > MAX_SHOWN { ", ..." } else { "" };
    Err(Error::InvalidArgument(format!(
        "on the meta device, and without data: {} of {} tensors: {}{more}: materialize them with \
         their weights, or leave them out (in Python, tensorizer.save(allow_meta=True) records \
         names and shapes alone)",
        names.len(),
        tensors.len(),
        some.join(", ")
    )))
}

/// Returns the error for a tensor that the C++ side refuses.
pub fn refused(name: &Name, exception: &cxx::Exception) -> Error {
    Error::Unsupported(format!("tensor `{name}`: {}", exception.what()))
}

/// Describes one tensor of a list, to be saved.
pub fn one_to_save<'t>(
    name: Name,
    kind: TensorKind,
    module_index: u16,
    tensors: &'t TensorList,
    at: usize,
    devices: &mut LentDevices,
) -> Result<SaveTensor<'t>> {
    let info = tensors.info(at).map_err(|e| refused(&name, &e))?;
    let dtype = stored_dtype(&name, info.dtype)?;
    let data = data_of(tensors, at, &info, devices)?;
    let shape = info.shape;
    Ok(SaveTensor { name, kind, module_index, dtype, shape, data })
}

/// Returns the dtype of a `c10::ScalarType`.
fn stored_dtype(name: &Name, code: i8) -> Result<DType> {
    DType::from_code(code).ok_or_else(|| {
        Error::Unsupported(format!(
            "tensor `{name}`: its dtype (torch ScalarType {code}) cannot be stored in a file"
        ))
    })
}

/// The devices of lent tensors, each with the stream that uses its memory. Each is looked up once
/// per call.
#[derive(Default)]
pub struct LentDevices(Vec<(DeviceIndex, Option<DeviceStream>)>);

type DeviceStream = (Arc<dyn Device>, Consumer);

impl LentDevices {
    /// Returns a device with its current stream; None for host memory, and for devices that the
    /// core cannot reach, whose tensors torch has to copy.
    fn find(&mut self, index: DeviceIndex) -> Result<Option<DeviceStream>> {
        if let Some((_, device)) = self.0.iter().find(|(cached, _)| *cached == index) {
            return Ok(device.clone());
        }
        let found = match device::find(index).unwrap_or(None) {
            Some(device) => Some((device, Consumer(torch::current_stream(index).map_err(thrown)?))),
            None => None,
        };
        self.0.push((index, found.clone()));
        Ok(found)
    }
}

/// Returns the source of a tensor's bytes: host memory, a device, or a copy that torch makes later.
pub fn data_of<'t>(
    tensors: &'t TensorList,
    at: usize,
    info: &TensorInfo,
    devices: &mut LentDevices,
) -> Result<TensorData<'t>> {
    if info.meta {
        return Ok(TensorData::Meta);
    }
    let found = if info.ready { devices.find(info.device)? } else { None };
    if let Some((device, consumer)) = found {
        let len = to_usize(info.len);
        // SAFETY: these are the tensor's own bytes, which the list keeps alive. They are only read,
        // and all copies have ended when the call for which the tensor was lent returns.
        let memory = unsafe { DeviceMemory::new(tensors.address(at).map_err(thrown)?, len) };
        return Ok(TensorData::Device(DeviceBytes { device, consumer, memory }));
    }
    if info.ready && info.device == CPU {
        return Ok(TensorData::Bytes(tensors.bytes(at).map_err(thrown)?));
    }
    let stream = tensors.stream(at).map_err(thrown)?;
    Ok(TensorData::Deferred(Box::new(move || {
        let copy = tensors.host_copy(at, stream).map_err(thrown)?;
        copy.bytes(0).map_err(thrown)?;
        Ok(Box::new(HostTensor(copy)) as HostCopy)
    })))
}

/// Returns the device memory of lent tensors, all of which are in row-major order on devices.
pub fn all_on_devices(tensors: &TensorList) -> Result<Vec<DeviceBytes>> {
    let mut devices = LentDevices::default();
    (0..tensors.size())
        .map(|at| match data_of(tensors, at, &tensors.info(at).map_err(thrown)?, &mut devices)? {
            TensorData::Device(bytes) => Ok(bytes),
            _ => Err(Error::Bug("a snapshot of a tensor that is on no device".to_owned())),
        })
        .collect()
}

/// A copy of a tensor in host memory.
struct HostTensor(UniquePtr<TensorList>);

impl AsRef<[u8]> for HostTensor {
    fn as_ref(&self) -> &[u8] {
        // Cannot fail: this was checked when the copy was made.
        match self.0.bytes(0) {
            Ok(bytes) => bytes,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Checks that a tensor can take the data of an entry: its dtype, its shape, and row-major order.
pub fn expect_like(entry: &Entry, found: &TensorInfo) -> Result<()> {
    let dtype = DType::from_code(found.dtype);
    if dtype != Some(entry.dtype) || found.shape != *entry.shape || !found.ready {
        let found_dtype = dtype.map_or("another type", DType::name);
        return Err(Error::InvalidArgument(format!(
            "tensor `{}`: the file holds {} {:?}, the tensor to load into is torch.{found_dtype} {:?}",
            entry.name, entry.dtype, entry.shape, found.shape
        )));
    }
    Ok(())
}
