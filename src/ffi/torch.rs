//! The only bridge between Rust and C++: what the operators call, and the tensors they hand over.
#![allow(unsafe_code)]
// The bridge's own expansion is not documented.
#![allow(missing_docs, clippy::missing_safety_doc)]

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use zeroize::Zeroizing;

use super::guard::guard;
use crate::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use crate::error::{Error, Result};
use crate::format::index::Entry;
use crate::load::{LoadOptions, Verify, load, load_into};
use crate::save::{SaveOptions, save_to};
use crate::sink;
use crate::tensor::{HostBuffer, Loaded, expect_like, to_save};
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
        /// In host memory, in row-major order.
        ready: bool,
    }

    /// How an operator is to load.
    struct OpOptions {
        verify: bool,
        /// 0 for the source's own number.
        readers: u64,
        /// Empty for none.
        key: Vec<u8>,
    }

    unsafe extern "C++" {
        include!("tensor.h");
        include!("ops.h");

        type TensorList;
        fn size(self: &TensorList) -> usize;
        fn info(self: &TensorList, at: usize) -> Result<TensorInfo>;
        fn bytes(self: &TensorList, at: usize) -> Result<&[u8]>;
        fn data(self: &TensorList, at: usize) -> Result<*mut u8>;
        fn host_copy(self: &TensorList, at: usize) -> Result<UniquePtr<TensorList>>;

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
pub fn load_all(file: &TensorFile) -> Result<Loaded> {
    let all: Vec<usize> = (0..file.entries().len()).collect();
    loaded(file, &all, LoadOptions::default())
}

/// Some tensors of a file.
#[cfg(feature = "tch")]
pub fn load_some<S: AsRef<str>>(file: &TensorFile, names: &[S]) -> Result<Loaded> {
    loaded(file, &file.select(names)?, LoadOptions::default())
}

fn op_load_all(uri: &str, mut options: bridge::OpOptions) -> Result<Box<Loaded>> {
    guard(|| {
        let file = open(uri, &mut options)?;
        let all: Vec<usize> = (0..file.entries().len()).collect();
        loaded(&file, &all, options.into()).map(Box::new)
    })
}

fn op_load(uri: &str, names: Vec<String>, mut options: bridge::OpOptions) -> Result<Box<Loaded>> {
    guard(|| {
        let file = open(uri, &mut options)?;
        loaded(&file, &file.select(&names)?, options.into()).map(Box::new)
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
        loaded(&file, &selection, options.into()).map(Box::new)
    })
}

fn loaded(file: &TensorFile, selection: &[usize], options: LoadOptions) -> Result<Loaded> {
    let loaded = load(file, selection, &options, &interrupt)?;
    let memory = loaded.into_iter().map(|tensor| (tensor.number, tensor.memory));
    Loaded::new(file, memory)
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
        let destinations = unsafe { destinations(&file, &selection, out)? };
        load_into(&file, &selection, destinations, &options.into(), &interrupt).map(drop)
    })
}

/// The memory of tensors that are to be filled, after checking that they fit and do not overlap.
///
/// # Safety
/// Nobody else reads or writes the tensors while the result lives.
#[allow(clippy::mut_from_ref)] // the tensors' memory is not behind the list's reference
unsafe fn destinations<'t>(
    file: &TensorFile,
    selection: &[usize],
    out: &'t bridge::TensorList,
) -> Result<Vec<&'t mut [u8]>> {
    let mut memory: Vec<(*mut u8, usize)> = Vec::with_capacity(selection.len());
    for (at, &number) in selection.iter().enumerate() {
        let entry = file.entry(number)?;
        expect_like(entry, &out.info(at)?)?;
        let len = entry.memory_len().and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| Error::Bug(format!("size of `{}`", entry.name)))?;
        memory.push((out.data(at)?, len));
    }
    let mut ranges: Vec<(usize, usize)> = memory
        .iter()
        .filter(|(_, len)| *len > 0)
        .map(|(start, len)| (start.addr(), *len))
        .collect();
    ranges.sort_unstable();
    if ranges.windows(2).any(|pair| matches!(pair, [(a, len), (b, _)] if a + len > *b)) {
        return Err(Error::InvalidArgument("tensors to load into overlap in memory".to_owned()));
    }
    Ok(memory
        .into_iter()
        .map(|(start, len)| {
            if len == 0 {
                return &mut [][..];
            }
            // SAFETY: `expect_like` made sure that the tensor has `len` bytes in one piece from
            // `start` on; the list keeps it alive for 't; no two ranges overlap, as checked above,
            // and the caller promises that nobody else uses them.
            unsafe { std::slice::from_raw_parts_mut(start, len) }
        })
        .collect())
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
