//! `tensorizer._C.Reader`: an open file for `TensorDeserializer`. One of the few modules that may
//! use `unsafe`.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use tensorizer::TensorFile;
use tensorizer::codec::CompactHeader;
use tensorizer::error::Result;
use tensorizer::format::catalog::{Entry, data_len};
use tensorizer::traffic::Traffic;
use tensorizer::{IterateOptions, LoadOptions, MemoryLimit, Opening, Order, load};
use tensorizer_torch::fill::load_into_tensors;
use tensorizer_torch::handles::{borrow, offer};
use tensorizer_torch::iterate::TorchTensors;
use tensorizer_torch::load::{LoadDestination, load_tensors};
use tensorizer_torch::thrown;

use crate::cached_heads::{HeadForPython, for_python};
use crate::calls::{signals, waits_for};
use crate::crypt::Decryption;
use crate::errors::{Outcome, Raised};
use crate::gil;
use crate::handle::Handle;
use crate::headers::{HeaderCache, NamedHashes, hashes, matching};
use crate::iterator::TensorIterator;
use crate::names::{described, name_from_python, name_to_python, plain_name, stored, top_level};
use crate::pickled::{PickledTuple, pickled};
use crate::source::{Source, python_bytes};
use crate::watch::{LoadState, ReadOptions};

/// An open file. All methods may be called from several threads.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Reader {
    pub file: TensorFile,
    headers: HeaderCache,
    /// See [`TensorFile::order`].
    pub order: OnceLock<(Vec<usize>, Vec<usize>)>,
    /// The state that its loads share with those of its slices.
    loads: Arc<LoadState>,
}

impl Reader {
    pub fn new(file: TensorFile, traffic: &Arc<Traffic>) -> Self {
        Self::with_loads(file, Arc::new(LoadState::counted_in(traffic)))
    }

    fn with_loads(file: TensorFile, loads: Arc<LoadState>) -> Self {
        Reader { file, headers: HeaderCache::default(), order: OnceLock::new(), loads }
    }

    /// Returns a reader of the same file with other tensors.
    pub fn of_same(&self, file: TensorFile) -> Self {
        Self::with_loads(file, Arc::clone(&self.loads))
    }

    /// Keeps headers, and returns their module indices.
    fn keep_all(&self, numbers: &[usize], headers: Vec<CompactHeader>) -> Vec<u16> {
        let modules = headers.iter().map(|header| header.module_index).collect();
        self.headers.insert(numbers, headers);
        modules
    }

    fn some(&self, numbers: &[usize]) -> Result<Vec<&Entry>> {
        numbers.iter().map(|&number| self.file.entry(number)).collect()
    }
}

#[pymethods]
impl Reader {
    /// Reads a source from `base` on, or from the beginning of its file. With `keep_heads`, it
    /// retains cached heads for other processes. Of a checkpoint's files, it opens only those with
    /// `wanted` tensors; all if the index lacks one. `sha256`: see [`Opening::pins`].
    #[new]
    #[pyo3(signature = (source, base = None, keep_heads = false, wanted = None, sha256 = None))]
    fn open(
        py: Python<'_>,
        source: &Source,
        base: Option<u64>,
        keep_heads: bool,
        wanted: Option<Vec<Bound<'_, PyAny>>>,
        sha256: Option<BTreeMap<String, [u8; 32]>>,
    ) -> Outcome<Self> {
        // An invalid name is an error later, when the tensor is looked up.
        let wanted: Option<BTreeSet<String>> =
            wanted.and_then(|names| names.iter().map(|name| stored(name).ok()).collect());
        let (base, traffic, source) =
            (base.unwrap_or(source.base), &source.traffic, source.shared()?);
        let opening = Opening {
            storages: true,
            keeps_heads: keep_heads,
            wanted: wanted.as_ref(),
            pins: sha256.as_ref(),
            ..Opening::new(&signals)
        };
        waits_for(format!("reading the index of `{}`", source.uri()), source.uri());
        Ok(Self::new(gil::without(py, || opening.source(source, base))?, traffic))
    }

    /// Returns cached heads, with which other processes open its files without a request.
    fn heads<'py>(&self, py: Python<'py>) -> Vec<HeadForPython<'py>> {
        for_python(py, self.file.heads())
    }

    /// Returns the identity of each file, which later content does not have; None without one.
    fn identities(&self) -> Vec<Option<String>> {
        self.file.identities()
    }

    /// Returns the headers of the servers' responses when its files were opened.
    fn headers(&self) -> Vec<(String, String)> {
        self.file.headers()
    }

    /// Makes loads decrypt with a key or a passphrase.
    fn decrypt(&self, py: Python<'_>, decryption: &Decryption) -> Outcome<()> {
        let options = Arc::clone(&decryption.0);
        Ok(gil::without(py, || self.file.unlock(options, &signals))?)
    }

    /// Sets a callable that gets the bytes of tensor data that all loads have moved.
    fn watch(&self, callback: Py<PyAny>) {
        self.loads.watch.set(callback);
    }

    /// Sets how its loads, and those of its slices and parts, read.
    fn set_options(&self, options: ReadOptions) {
        *self.loads.reading.lock() = options;
    }

    /// Limits the memory of its loads; `reserved` bytes of the limit are for the caller.
    #[pyo3(signature = (limit, reserved = 0))]
    fn limit_memory(&self, limit: Option<u64>, reserved: u64) {
        *self.loads.memory.lock() = MemoryLimit::of(limit).reserving(reserved);
    }

    /// Makes its loads read through the page cache, as other processes load the same file now.
    fn share_cache(&self) {
        self.loads.share_cache();
    }

    /// Returns the minimum memory of a load: of `parts` of tensors, or with staging buffers.
    fn minimum_memory(&self, parts: bool, staged: bool) -> Outcome<u64> {
        Ok(self.file.minimum_memory(parts, staged)?)
    }

    /// Makes the next load report a fallback.
    fn report_fallback(&self, why: String) {
        *self.loads.fallback.lock() = Some(why);
    }

    /// Returns the same file with slices of some of its tensors as its only tensors. Each is given
    /// by its number, and first index and end in each dimension, or None for the whole tensor.
    #[allow(clippy::type_complexity)]
    pub fn sliced(&self, slices: Vec<(usize, Option<Vec<(u64, u64)>>)>) -> Outcome<Reader> {
        let slices = slices.into_iter().map(|(number, ranges)| {
            let ranges = ranges.map(|ranges| ranges.into_iter().map(|(start, end)| start..end));
            (number, ranges.map(Iterator::collect))
        });
        Ok(self.of_same(self.file.with_slices(slices)?))
    }

    /// Returns the range of a slice in each dimension of the whole tensor; None for a whole tensor.
    fn ranges(&self, number: usize) -> Outcome<Option<Vec<(u64, u64)>>> {
        let whole = self.file.entry(number)?.whole.as_ref();
        Ok(whole.map(|whole| whole.slice.iter().map(|range| (range.start, range.end)).collect()))
    }

    /// Returns the hashes of tensors in the file: algorithm and value, as messages show them.
    fn hashes(&self, py: Python<'_>, numbers: Vec<usize>) -> Outcome<Vec<NamedHashes>> {
        let uri = self.file.uri();
        self.loads.run_part(py, uri, |go_on| hashes(&self.file, &self.headers, &numbers, go_on))
    }

    // With the GIL: the source may be a Python object, which must be dropped with it.
    fn close(&self, _py: Python<'_>) {
        self.loads.end();
        self.file.close();
    }

    #[getter]
    fn uri(&self) -> &str {
        self.file.uri()
    }

    #[getter]
    fn version(&self) -> Option<u32> {
        self.file.prologue().map(|prologue| prologue.version)
    }

    #[getter]
    fn encrypted(&self) -> bool {
        self.file.is_encrypted()
    }

    /// The name of its format.
    #[getter]
    fn format(&self) -> &'static str {
        self.file.format().name()
    }

    /// Returns the same files with the tensors of a pickle, which are parts of the records. Each is
    /// name, dtype without `torch.`, shape, `(record, position in it)` or None for the `meta`
    /// device, and true if it is strided and cannot be loaded here.
    fn tensors<'py>(&self, py: Python<'py>, tensors: Vec<PickledTuple<'py>>) -> Outcome<Self> {
        Ok(self.of_same(pickled(&self.file, py, tensors)?))
    }

    /// Returns the bytes of some entries.
    fn read<'py>(&self, py: Python<'py>, numbers: Vec<usize>) -> Outcome<Vec<Bound<'py, PyBytes>>> {
        let options = LoadOptions::default();
        let loaded = self
            .loads
            .run_part(py, self.file.uri(), |go_on| load(&self.file, &numbers, &options, go_on))?;
        Ok(loaded.iter().map(|entry| python_bytes(py, entry.bytes())).collect::<PyResult<_>>()?)
    }

    /// Returns the number of each tensor's file, if only an index of shards names the tensors.
    fn indexed_files(&self) -> BTreeMap<String, usize> {
        self.file.indexed_files().clone()
    }

    /// The metadata of the file; an error if they are damaged.
    #[getter]
    fn metadata(&self) -> Outcome<Option<Vec<(String, String)>>> {
        Ok(self.file.metadata()?.map(<[_]>::to_vec))
    }

    /// Returns the path or address of each of its files.
    fn files(&self) -> Vec<String> {
        self.file.sources().iter().map(|source| source.uri().to_owned()).collect()
    }

    /// Returns the number of each tensor's file.
    fn file_numbers(&self) -> Vec<usize> {
        self.file.entries().iter().map(|entry| entry.file).collect()
    }

    /// The identity by which the pickle of a saved object refers to this file.
    #[getter]
    fn pair_id(&self) -> Option<Cow<'static, [u8]>> {
        self.file.identity().map(|id| id.to_vec().into())
    }

    #[getter]
    fn tensor_bytes_field(&self) -> u64 {
        let all = || data_len(self.file.entries().iter());
        self.file.prologue().map_or_else(all, |prologue| prologue.tensor_bytes)
    }

    /// True if several readers may read at once.
    #[getter]
    fn parallel(&self) -> bool {
        self.file.sources().iter().all(|source| source.capabilities().max_readers > 1)
    }

    /// True if tensors can be read in any order.
    #[getter]
    fn seekable(&self) -> bool {
        self.file.is_seekable()
    }

    /// True if all of it is in files of this machine.
    #[getter]
    fn local(&self) -> bool {
        self.file.sources().iter().all(|source| source.facts().is_local)
    }

    fn __len__(&self) -> usize {
        self.file.entries().len()
    }

    /// Returns a tensor's name.
    fn name<'py>(&self, py: Python<'py>, number: usize) -> Outcome<Bound<'py, PyAny>> {
        Ok(name_to_python(py, &self.file.entry(number)?.name)?)
    }

    /// Returns the names of tensors.
    fn names<'py>(&self, py: Python<'py>, numbers: Vec<usize>) -> Outcome<Vec<Bound<'py, PyAny>>> {
        let names = self.some(&numbers)?.into_iter().map(|entry| name_to_python(py, &entry.name));
        Ok(names.collect::<PyResult<_>>()?)
    }

    /// Returns a tensor's name in its stored form.
    fn stored_name(&self, number: usize) -> Outcome<&str> {
        Ok(self.file.entry(number)?.name.stored())
    }

    /// Returns the number of the tensor of this name; None if there is none.
    fn find(&self, name: &Bound<'_, PyAny>) -> Outcome<Option<usize>> {
        Ok(self.file.find(name_from_python(name)?.stored()))
    }

    /// Does the same for several names. None also for invalid names, and for possible stored forms.
    fn find_all(&self, names: Vec<Bound<'_, PyAny>>) -> Vec<Option<usize>> {
        names.iter().map(|name| self.file.find(plain_name(name)?.stored())).collect()
    }

    /// Returns the first components of the names of these tensors. Each has the number of its
    /// tensor, or the list of the numbers of tensors below it.
    fn top_level<'py>(&self, py: Python<'py>, numbers: Vec<usize>) -> Outcome<Bound<'py, PyDict>> {
        let entries = self.some(&numbers)?;
        Ok(top_level(py, numbers.into_iter().zip(entries))?)
    }

    /// Returns the bytes in the file of these tensors together.
    fn data_len(&self, numbers: Vec<usize>) -> Outcome<u64> {
        Ok(data_len(self.some(&numbers)?.into_iter()))
    }

    /// Returns the numbers of bytes of tensors in memory.
    fn memory_lens(&self, numbers: Vec<usize>) -> Outcome<Vec<u64>> {
        let some = self.some(&numbers)?.into_iter();
        Ok(some.map(|entry| entry.memory_len().unwrap_or(u64::MAX)).collect())
    }

    /// Returns every tensor's number of bytes in the file: 0 for tensors of the `meta` device.
    fn data_lens(&self) -> Vec<u64> {
        self.file.entries().iter().map(|entry| entry.data_len).collect()
    }

    /// Returns every tensor's `(position of its header, position of its data)`.
    fn offsets(&self) -> Vec<(u64, u64)> {
        self.file.entries().iter().map(|entry| (entry.header_offset, entry.data_offset)).collect()
    }

    /// Returns prologue and index of a file with only these tensors, at the same positions.
    fn head_of<'py>(&self, py: Python<'py>, numbers: Vec<usize>) -> Outcome<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.file.head_of(&numbers)?))
    }

    /// Reads bytes of the file as they are.
    fn raw<'py>(&self, py: Python<'py>, offset: u64, len: usize) -> Outcome<Bound<'py, PyBytes>> {
        let _part = self.loads.enter(self.file.uri());
        let read = |buffer: &mut [u8]| gil::without(py, || self.file.raw(offset, buffer, &signals));
        Ok(PyBytes::new_with(py, len, |buffer| Ok(read(buffer).map_err(Raised::from)?))?)
    }

    /// Makes the kernel begin to read bytes of one tensor's data, from its byte `start` on, if they
    /// are in a local file and not in the page cache.
    fn read_ahead(&self, py: Python<'_>, number: usize, start: u64, len: u64) -> Outcome<()> {
        // The check keeps the GIL: after a release, it may take long to get it back.
        if let Some(begin) = self.file.read_ahead(number, start, len)? {
            gil::without(py, || {
                begin();
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns every tensor's kind: 0 parameter, 1 buffer, 2 state dict.
    fn kinds(&self) -> Vec<u8> {
        self.file.entries().iter().map(|entry| entry.kind as u8).collect()
    }

    /// Returns `(dtype without "torch.", shape, opaque)` of one tensor.
    fn describe(&self, number: usize) -> Outcome<(&'static str, Vec<u64>, bool)> {
        let entry = self.file.entry(number)?;
        Ok((entry.dtype.name(), entry.shape.to_vec(), entry.dtype.is_opaque()))
    }

    /// Returns `(dtype without "torch.", shape)` of each of some tensors.
    fn describe_all<'py>(
        &self,
        py: Python<'py>,
        numbers: Vec<usize>,
    ) -> Outcome<Vec<Bound<'py, PyTuple>>> {
        Ok(described(py, self.some(&numbers)?.into_iter())?)
    }

    /// Loads tensors to one device, or each to its own of `devices`: -1 for the CPU, the index for
    /// CUDA. Returns the handle with which `_take` fetches them, and their module indices.
    #[pyo3(signature = (numbers, *, devices, verify = None))]
    fn load(
        &self,
        py: Python<'_>,
        numbers: Vec<usize>,
        devices: Vec<i16>,
        verify: Option<&str>,
    ) -> Outcome<(Handle, Vec<u16>)> {
        let (loaded, headers) = self.loads.run(py, self.file.uri(), |counters, go_on| {
            let options = self.loads.options(verify, None, true);
            let separate_memory = self.loads.reading.lock().separate_memory;
            let destination = LoadDestination { devices: &devices, separate_memory };
            load_tensors(&self.file, &numbers, destination, &options, counters, go_on)
        })?;
        Ok((Handle(offer(loaded)), self.keep_all(&numbers, headers)))
    }

    /// Begins to load tensors one by one, in the order of the file, or as they are `ready`. At most
    /// `buffer_bytes` bytes of tensors are in memory before they are handed out. They are handed
    /// out for the device's current stream or, with `complete`, after their copies, for all its
    /// streams.
    #[pyo3(signature = (numbers, *, device, buffer_bytes, ready, complete, readers = None, maps = false))]
    #[allow(clippy::too_many_arguments)]
    fn iterate(
        &self,
        py: Python<'_>,
        numbers: Vec<usize>,
        device: i16,
        buffer_bytes: u64,
        ready: bool,
        complete: bool,
        readers: Option<usize>,
        maps: bool,
    ) -> Outcome<TensorIterator> {
        let order = if ready { Order::Ready } else { Order::File };
        let load = self.loads.options(None, readers, maps);
        let options = IterateOptions { load, buffer_bytes, order, complete };
        let _part = self.loads.enter(self.file.uri());
        let tensors =
            gil::without(py, || TorchTensors::new(&self.file, &numbers, device, &options))?;
        Ok(TensorIterator::new(tensors, Arc::clone(&self.loads), self.file.uri()))
    }

    /// Fills lent tensors, which must have the dtypes and shapes of these. Returns module indices.
    #[pyo3(signature = (handle, numbers, *, verify = None))]
    fn load_into(
        &self,
        py: Python<'_>,
        handle: &Handle,
        numbers: Vec<usize>,
        verify: Option<&str>,
    ) -> Outcome<Vec<u16>> {
        let headers = self.loads.run(py, self.file.uri(), |counters, go_on| {
            let (options, lent) = (self.loads.options(verify, None, false), borrow(&handle.0)?);
            // SAFETY: the Python caller owns the tensors, and does not use them during the call.
            let headers = unsafe {
                load_into_tensors(&self.file, &numbers, &lent, &options, counters, go_on)
            };
            // After an error, too: some tensors may have new bytes already.
            lent.changed().map_err(thrown)?;
            headers
        })?;
        Ok(self.keep_all(&numbers, headers))
    }

    /// Compares lent tensors with the bytes, types and shapes of these tensors of the file.
    fn matches(&self, py: Python<'_>, handle: &Handle, numbers: Vec<usize>) -> Outcome<Vec<bool>> {
        self.loads.run_part(py, self.file.uri(), |go_on| {
            let lent = borrow(&handle.0)?;
            matching(&self.file, &self.headers, &lent, &numbers, go_on)
        })
    }
}
