//! The only bridge between Rust and C++: what the operators call, and the tensors they hand over.
#![allow(unsafe_code)]
// The bridge's own expansion is not documented.
#![allow(missing_docs, clippy::missing_safety_doc)]

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use zeroize::Zeroizing;

use super::guard::guard;
use super::load::{Where, load_into_tensors, load_tensors};
use crate::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use crate::device::{self, CPU, Index};
use crate::error::{Error, Result};
use crate::format::index::Entry;
use crate::load::{LoadOptions, Verify};
use crate::save::{SaveOptions, save_to};
use crate::sink;
use crate::tensor::{HostBuffer, Loaded, to_save};
use crate::tensor_file::TensorFile;

#[cxx::bridge(namespace = "tensorizer")]
pub mod bridge {
    /// What the core needs to know of a tensor.
    struct TensorInfo {
        /// `c10::ScalarType`.
        dtype: i8,
        shape: Vec<u64>,
        /// On the `meta` device.
        meta: bool,
        /// In row-major order in memory.
        ready: bool,
        /// -1 for the CPU, the index for CUDA, -2 for others.
        device: i16,
    }

    /// How an operator is to load.
    struct OpOptions {
        verify: bool,
        /// 0 for the source's own number.
        readers: u64,
        /// Empty for none.
        key: Vec<u8>,
        /// Where the tensors go: -1 for the CPU, the index for CUDA.
        device: i16,
    }

    unsafe extern "C++" {
        include!("tensor.h");
        include!("ops.h");

        type TensorList;
        fn size(self: &TensorList) -> usize;
        fn info(self: &TensorList, at: usize) -> Result<TensorInfo>;
        fn bytes(self: &TensorList, at: usize) -> Result<&[u8]>;
        fn host_copy(self: &TensorList, at: usize) -> Result<UniquePtr<TensorList>>;

        /// Uninitialised blocks of so many bytes each.
        fn new_blocks(device: i16, lens: &[u64]) -> Result<UniquePtr<TensorList>>;
        /// The stream that the driver knows as this thread's current one of a device.
        fn current_stream(device: i16) -> Result<usize>;
        /// Tells the allocator that a stream uses the tensors.
        fn used_by_stream(self: &TensorList, stream: usize) -> Result<()>;
        fn address(self: &TensorList, at: usize) -> Result<usize>;
        fn writable(self: &TensorList, at: usize) -> Result<usize>;
        fn len(self: &TensorList, at: usize) -> Result<u64>;
        fn fill_zero(self: &TensorList, at: usize) -> Result<()>;
        /// Tells autograd that the tensors were changed.
        #[cfg(feature = "python")]
        fn changed(self: &TensorList) -> Result<()>;

        fn register_operators() -> Result<()>;
    }

    extern "Rust" {
        type HostBuffer;
        fn data(self: &HostBuffer) -> *mut u8;

        type Loaded;
        fn size(self: &Loaded) -> usize;
        fn name(self: &Loaded, at: usize) -> &str;
        fn dtype(self: &Loaded, at: usize) -> i8;
        fn shape(self: &Loaded, at: usize) -> &[i64];
        fn take(self: &mut Loaded, at: usize) -> Box<HostBuffer>;
        fn block(self: &Loaded, at: usize) -> i64;
        fn offset(self: &Loaded, at: usize) -> u64;
        fn take_blocks(self: &mut Loaded) -> UniquePtr<TensorList>;

        fn op_load_all(uri: &str, options: OpOptions) -> Result<Box<Loaded>>;
        fn op_load(uri: &str, names: Vec<String>, options: OpOptions) -> Result<Box<Loaded>>;
        fn op_load_checked(
            uri: &str,
            names: Vec<String>,
            expected: Vec<String>,
            options: OpOptions,
        ) -> Result<Box<Loaded>>;
        fn op_load_into(
            uri: &str,
            names: Vec<String>,
            out: &TensorList,
            options: OpOptions,
        ) -> Result<()>;
        fn reaches(device: i16) -> bool;
        fn op_names(uri: &str) -> Result<Vec<String>>;
        fn op_describe(uri: &str, names: Vec<String>) -> Result<Vec<String>>;
        fn op_save(uri: &str, names: Vec<String>, tensors: &TensorList, key: Vec<u8>)
        -> Result<()>;
    }

    #[cfg(feature = "tch")]
    unsafe extern "C++" {
        /// # Safety
        /// Each address is that of an `at::Tensor`.
        unsafe fn list_tensors(addresses: &[usize]) -> Result<UniquePtr<TensorList>>;

        fn new_tensors(loaded: &mut Loaded) -> Result<Vec<usize>>;
        fn load_into_list(uri: &str, names: &[String], out: &TensorList) -> Result<()>;
    }

    #[cfg(feature = "python")]
    extern "Rust" {
        fn exchange_lend(tensors: UniquePtr<TensorList>) -> Result<i64>;
        fn exchange_take(ticket: i64) -> Result<Box<Loaded>>;
    }
}

#[cfg(feature = "python")]
use super::exchange::{exchange_lend, exchange_take};

// SAFETY: a list of `at::Tensor`s that is never changed after it was made. Their reference counts
// are atomic, and the methods of the bridge only read the tensors or make new ones.
unsafe impl Send for bridge::TensorList {}
// SAFETY: as above.
unsafe impl Sync for bridge::TensorList {}

impl From<cxx::Exception> for Error {
    /// Everything that the C++ side throws is about tensors that cannot be handled.
    fn from(exception: cxx::Exception) -> Self {
        Error::Unsupported(exception.what().to_owned())
    }
}

/// Looked at now and then during every operator; set by the Python module to see Ctrl-C.
static INTERRUPT: OnceLock<fn() -> Result<()>> = OnceLock::new();

/// Sets what the operators look at to see whether they should stop.
#[cfg(feature = "python")]
pub fn set_interrupt(hook: fn() -> Result<()>) {
    INTERRUPT.get_or_init(|| hook);
}

fn interrupt() -> Result<()> {
    INTERRUPT.get().map_or(Ok(()), |hook| hook())
}

impl From<bridge::OpOptions> for LoadOptions {
    fn from(given: bridge::OpOptions) -> Self {
        LoadOptions {
            readers: usize::try_from(given.readers).ok().filter(|&readers| readers > 0),
            verify: Verify::all_if(given.verify),
            ..LoadOptions::default()
        }
    }
}

/// The key of an operator's call; its bytes are wiped.
fn take_key(bytes: Vec<u8>) -> Result<Option<Key>> {
    let bytes = Zeroizing::new(bytes);
    if bytes.is_empty() {
        return Ok(None);
    }
    let wrong = || Error::InvalidArgument(format!("a key has 32 bytes, found {}", bytes.len()));
    Key::new(&bytes).map(Some).ok_or_else(wrong)
}

/// Opens what an operator is to load from.
fn open(uri: &str, options: &mut bridge::OpOptions) -> Result<TensorFile> {
    let key = take_key(std::mem::take(&mut options.key))?;
    let file = TensorFile::open_uri(uri)?;
    match key {
        None => Ok(file),
        Some(key) => file.decrypt(Arc::new(DecryptionOptions::new(Secret::Key(key))), &interrupt),
    }
}

/// All tensors of a file.
#[cfg(feature = "tch")]
pub fn load_all(file: &TensorFile, device: Index) -> Result<Loaded> {
    let all: Vec<usize> = (0..file.entries().len()).collect();
    loaded(file, &all, device, LoadOptions::default())
}

/// Some tensors of a file.
#[cfg(feature = "tch")]
pub fn load_some<S: AsRef<str>>(file: &TensorFile, names: &[S], device: Index) -> Result<Loaded> {
    loaded(file, &file.select(names)?, device, LoadOptions::default())
}

fn op_load_all(uri: &str, mut options: bridge::OpOptions) -> Result<Box<Loaded>> {
    guard(|| {
        let file = open(uri, &mut options)?;
        let all: Vec<usize> = (0..file.entries().len()).collect();
        loaded(&file, &all, options.device, options.into()).map(Box::new)
    })
}

fn op_load(uri: &str, names: Vec<String>, mut options: bridge::OpOptions) -> Result<Box<Loaded>> {
    guard(|| {
        let file = open(uri, &mut options)?;
        loaded(&file, &file.select(&names)?, options.device, options.into()).map(Box::new)
    })
}

/// What a tensor is, in the form that graphs carry: `float32[40,30]`.
fn describe(entry: &Entry) -> String {
    let shape: Vec<String> = entry.shape.iter().map(u64::to_string).collect();
    format!("{}[{}]", entry.dtype.name(), shape.join(","))
}

fn op_describe(uri: &str, names: Vec<String>) -> Result<Vec<String>> {
    guard(|| {
        let file = TensorFile::open_uri(uri)?;
        file.select(&names)?.into_iter().map(|number| file.entry(number).map(describe)).collect()
    })
}

fn op_load_checked(
    uri: &str,
    names: Vec<String>,
    expected: Vec<String>,
    mut options: bridge::OpOptions,
) -> Result<Box<Loaded>> {
    guard(|| {
        if names.len() != expected.len() {
            let (names, expected) = (names.len(), expected.len());
            return Err(Error::InvalidArgument(format!("{names} names, {expected} expectations")));
        }
        let file = open(uri, &mut options)?;
        let selection = file.select(&names)?;
        for ((&number, name), expected) in selection.iter().zip(&names).zip(&expected) {
            let found = describe(file.entry(number)?);
            if found != *expected {
                return Err(Error::InvalidArgument(format!(
                    "tensor `{name}`: expected {expected}, as when the graph was traced, but \
                     `{uri}` holds {found} now: trace or compile it again"
                )));
            }
        }
        // Tensors that a graph gets from an operator may not share memory.
        let destination = Where { device: options.device, apart: true };
        let options = options.into();
        Ok(Box::new(load_tensors(&file, &selection, destination, &options, &interrupt)?.0))
    })
}

fn loaded(
    file: &TensorFile,
    selection: &[usize],
    device: Index,
    options: LoadOptions,
) -> Result<Loaded> {
    let destination = Where { device, apart: false };
    Ok(load_tensors(file, selection, destination, &options, &interrupt)?.0)
}

fn op_load_into(
    uri: &str,
    names: Vec<String>,
    out: &bridge::TensorList,
    mut options: bridge::OpOptions,
) -> Result<()> {
    guard(|| {
        let file = open(uri, &mut options)?;
        let selection = file.select(&names)?;
        // SAFETY: the operator's caller hands `out` over for the length of the call.
        unsafe { load_into_tensors(&file, &selection, out, &options.into(), &interrupt) }.map(drop)
    })
}

/// Whether memory of a device can be filled and read from here, without a copy by torch.
pub fn reaches(device: Index) -> bool {
    device == CPU || device::find(device).is_ok_and(|found| found.is_some())
}

fn op_names(uri: &str) -> Result<Vec<String>> {
    guard(|| {
        Ok(TensorFile::open_uri(uri)?
            .entries()
            .iter()
            .map(|entry| entry.name.stored().to_owned())
            .collect())
    })
}

fn op_save(
    uri: &str,
    names: Vec<String>,
    tensors: &bridge::TensorList,
    key: Vec<u8>,
) -> Result<()> {
    guard(|| {
        let mut seen = HashSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            return Err(Error::InvalidArgument(format!("tensor `{name}` is given twice")));
        }
        let encryption = take_key(key)?
            .map(|key| Arc::new(EncryptionOptions { key, derivation: None, manifest: false }));
        let options = SaveOptions { encryption, ..SaveOptions::default() };
        save_to(sink::create(uri)?, to_save(&names, tensors)?, options, &interrupt)
    })
}

/// Defines the operators; an error if this process has them already.
pub fn register() -> Result<()> {
    Ok(bridge::register_operators()?)
}

/// Registration when the library is loaded, for processes without Python.
#[cfg(not(feature = "python"))]
mod on_load {
    // SAFETY: runs once, when the dynamic linker has initialised torch, on which this library
    // depends; catches every error, because nobody could.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static REGISTER: extern "C" fn() = register;

    /// The version of what `tensorizer.h` assumes of this library.
    // SAFETY: no other library defines a function of this name.
    #[unsafe(no_mangle)]
    pub extern "C" fn tensorizer_abi_version() -> u32 {
        2
    }

    extern "C" fn register() {
        if let Err(error) = super::guard(super::register) {
            eprintln!("tensorizer: {error}");
        }
    }
}
