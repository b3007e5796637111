//! `tensorizer._C.TensorWriter`: a file under construction for `TensorSerializer`.

use std::borrow::Cow;
use std::ffi::{OsString, c_int};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt as _;
use tensorizer::cancel::Cancel;
use tensorizer::error::{Error, Result};
use tensorizer::format::TensorKind;
use tensorizer::format::name::Name;
use tensorizer::format::tensors::header::Hashes;
use tensorizer::io::WriteAt;
use tensorizer::io::local::FileSink;
use tensorizer::io::uri::check_target;
use tensorizer::traffic::{self, Traffic};
use tensorizer::{IdentitySource, MemoryLimit, OwnerProcess, SaveOptions, SaveTensor, unpoisoned};
use tensorizer_torch::TensorList;
use tensorizer_torch::handles::borrow;
use tensorizer_torch::lock_holder::LockHolder;
use tensorizer_torch::tensor::{LentDevices, one_to_save};

use crate::calls::{SAVING, enter_part, signals_in_save};
use crate::crypt::Encryption;
use crate::errors::Outcome;
use crate::file::{PyFile, duplicate};
use crate::gil;
use crate::handle::Handle;
use crate::logs::log;
use crate::names::name_from_python;
use crate::sink::{Sink, describe_unclosed};
use crate::watch::Watch;

/// A file under construction. Calls run one at a time.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct TensorWriter {
    inner: Mutex<tensorizer::Writer>,
    holder: LockHolder,
    owner: OwnerProcess,
    uri: String,
    progress: Arc<AtomicU64>,
    watch: Watch,
    traffic: Arc<Traffic>,
}

/// The options of a new file, as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct WriterArguments {
    alignment: u64,
    threads: Option<usize>,
    hashes: String,
    encryption: Option<Py<Encryption>>,
    metadata: Option<Vec<(String, String)>>,
    clear_metadata: bool,
    room_for_more: bool,
    memory: Option<u64>,
    reserved_memory: u64,
}

impl WriterArguments {
    fn options(self) -> Result<SaveOptions> {
        let hashes = match self.hashes.as_str() {
            "all" => Hashes::All,
            "crc32" => Hashes::Crc32,
            other => {
                let what = format!("hashes must be 'all' or 'crc32', not {other:?}");
                return Err(Error::InvalidArgument(what));
            }
        };
        Ok(SaveOptions {
            alignment: self.alignment,
            threads: self.threads,
            hashes,
            encryption: self.encryption.map(|encryption| Arc::clone(&encryption.get().0)),
            identity: None,
            metadata: self.metadata,
            clear_metadata: self.clear_metadata,
            room_for_more: self.room_for_more,
            memory: MemoryLimit::of(self.memory).reserving(self.reserved_memory),
        })
    }
}

impl Drop for TensorWriter {
    fn drop(&mut self) {
        let inner = unpoisoned(self.inner.get_mut());
        // Abandoning a file may wait for threads that need the GIL.
        Python::try_attach(|py| {
            gil::without(py, || {
                inner.abandon();
                Ok(())
            })
        });
    }
}

impl TensorWriter {
    fn new(sink: Result<Box<dyn WriteAt>>, base: u64, arguments: WriterArguments) -> Outcome<Self> {
        let inner = tensorizer::Writer::new(sink?, base, arguments.options()?)?;
        Ok(TensorWriter {
            progress: inner.progress(),
            owner: OwnerProcess::current(),
            uri: inner.uri().to_owned(),
            inner: Mutex::new(inner),
            holder: LockHolder::default(),
            watch: Watch::default(),
            traffic: traffic::current(),
        })
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut tensorizer::Writer) -> Result<T> + Send,
    ) -> Outcome<T> {
        let mut inner = match self.inner.try_lock() {
            Err(TryLockError::WouldBlock) if self.holder.is_this_thread() => {
                let what = format!("this thread is in the middle of a write to {}", self.uri);
                return Err(PyRuntimeError::new_err(what).into());
            }
            // In a forked child, the thread that holds the lock does not exist: that is an error
            // here.
            Err(TryLockError::WouldBlock) => {
                self.owner.check(&self.uri)?;
                unpoisoned(self.inner.lock_py_attached(py))
            }
            Err(TryLockError::Poisoned(poisoned)) => unpoisoned(Err(poisoned)),
            Ok(inner) => inner,
        };
        let _mark = self.holder.mark();
        let inner = &mut *inner;
        let part = enter_part(SAVING, &self.uri, None, &self.traffic);
        Ok(gil::without(py, || body(inner)).inspect_err(|error| part.failed(error))?)
    }

    /// Runs a write. Its progress is reported while it runs, and it is logged.
    fn counted(
        &self,
        py: Python<'_>,
        write: impl FnOnce(&mut tensorizer::Writer, &dyn Cancel) -> Result<()> + Send,
    ) -> Outcome<()> {
        let written = || self.progress.load(Ordering::Relaxed);
        self.with(py, |writer| {
            let go_on = || {
                signals_in_save()?;
                self.watch.tick(written(), 0)
            };
            write(writer, &go_on)?;
            self.watch.tick(written(), 0)
        })?;
        Ok(log(py)?)
    }
}

#[pymethods]
impl TensorWriter {
    /// Messages show the second path, if there is one.
    #[staticmethod]
    #[pyo3(signature = (path, arguments, shown = None))]
    fn to_path(path: OsString, arguments: WriterArguments, shown: Option<String>) -> Outcome<Self> {
        let path = Path::new(&path);
        let shown = shown.unwrap_or_else(|| path.display().to_string());
        let sink = check_target(path)
            .and_then(|()| FileSink::create_named(path, shown))
            .map(|sink| Box::new(sink) as _);
        Self::new(sink, 0, arguments)
    }

    /// Writes through a duplicate of the descriptor, from `base` on.
    #[staticmethod]
    fn to_fd(
        descriptor: c_int,
        uri: String,
        base: u64,
        arguments: WriterArguments,
    ) -> Outcome<Self> {
        let file = duplicate(descriptor).map_err(|e| Error::io("opening", &uri, e));
        let sink = file.and_then(|file| Ok(Box::new(FileSink::from_file(file, uri)?) as _));
        Self::new(sink, base, arguments)
    }

    /// Writes to a server, from `base` on.
    #[staticmethod]
    fn to_sink(sink: &Sink, base: u64, arguments: WriterArguments) -> Outcome<Self> {
        Self::new(sink.shared().map(|sink| Box::new(sink) as _), base, arguments)
    }

    /// Writes to a Python object that can seek, from `base` on.
    #[staticmethod]
    fn to_object(
        object: Py<PyAny>,
        uri: String,
        base: u64,
        arguments: WriterArguments,
    ) -> Outcome<Self> {
        Self::new(Ok(Box::new(PyFile::new(object, uri, None))), base, arguments)
    }

    #[getter]
    fn total_tensor_bytes(&self, py: Python<'_>) -> Outcome<u64> {
        self.with(py, |writer| Ok(writer.tensor_bytes()))
    }

    /// Bytes of tensor data written so far. Does not wait for a call that is under way.
    #[getter]
    fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Sets a callable that gets the bytes of tensor data that were written.
    fn watch(&self, callback: Py<PyAny>) {
        self.watch.set(callback);
    }

    /// Position after the last byte that belongs to the file.
    #[getter]
    fn end(&self, py: Python<'_>) -> Outcome<u64> {
        self.with(py, |writer| Ok(writer.end()))
    }

    /// Gives the file an identity: that of the file that it copies or, with None, one derived from
    /// its content.
    #[pyo3(signature = (pair_id))]
    fn set_pair_id(&self, py: Python<'_>, pair_id: Option<[u8; 16]>) -> Outcome<()> {
        let source = pair_id.map_or(IdentitySource::FromContent, IdentitySource::Given);
        self.with(py, |writer| writer.set_identity(source))
    }

    /// Adds metadata before the first write, also to an encrypted file.
    fn add_metadata(&self, py: Python<'_>, name: String, value: String) -> Outcome<()> {
        self.with(py, |writer| writer.add_metadata(name, value))
    }

    /// The file's identity, of the tensors written so far.
    #[getter]
    fn pair_id(&self, py: Python<'_>) -> Outcome<Option<Cow<'static, [u8]>>> {
        self.with(py, |writer| Ok(writer.identity().map(|id| id.to_vec().into())))
    }

    /// Writes lent tensors. Names are `str` or tuples of `str` and `int`.
    fn write(
        &self,
        py: Python<'_>,
        handle: &Handle,
        names: Vec<Bound<'_, PyAny>>,
        kinds: Vec<u8>,
        modules: Vec<u16>,
    ) -> Outcome<()> {
        let lent = borrow(&handle.0)?;
        let names = names.iter().map(name_from_python).collect::<PyResult<Vec<_>>>()?;
        self.counted(py, move |writer, go_on| {
            writer.write(to_save(&lent, names, kinds, modules)?, go_on)
        })
    }

    /// Writes lent tensors as the whole content of a safetensors file.
    fn write_safetensors(
        &self,
        py: Python<'_>,
        handle: &Handle,
        names: Vec<Bound<'_, PyAny>>,
    ) -> Outcome<()> {
        let lent = borrow(&handle.0)?;
        let names = names.iter().map(name_from_python).collect::<PyResult<Vec<_>>>()?;
        self.counted(py, move |writer, go_on| {
            let count = names.len();
            let tensors = to_save(&lent, names, vec![2; count], vec![0; count])?;
            writer.write_safetensors(tensors, go_on)
        })
    }

    /// Ends the file and makes it visible. False if a later save of this process to its path or
    /// address was complete before: then the file was dropped.
    fn finish(&self, py: Python<'_>) -> Outcome<bool> {
        self.with(py, |writer| writer.finish(&signals_in_save).map(|()| !writer.overtaken()))
    }

    /// Ends a file that was never closed; another file that has its name stays. Returns whether it
    /// exists, and its path if it did not get its own name.
    fn finish_unclosed(&self, py: Python<'_>) -> Outcome<(bool, Option<OsString>)> {
        Ok(describe_unclosed(self.with(py, |writer| writer.finish_unclosed(&signals_in_save))?))
    }

    /// True if a write has failed half-way, so that the file can only be abandoned.
    #[getter]
    fn failed(&self, py: Python<'_>) -> Outcome<bool> {
        self.with(py, |writer| Ok(writer.failed()))
    }

    /// The path or address.
    #[getter]
    fn uri(&self) -> &str {
        &self.uri
    }

    /// Abandons the file.
    fn abandon(&self, py: Python<'_>) -> Outcome<()> {
        self.with(py, |writer| {
            writer.abandon();
            Ok(())
        })
    }
}

/// Describes lent tensors, to be saved.
fn to_save(
    tensors: &TensorList,
    names: Vec<Name>,
    kinds: Vec<u8>,
    modules: Vec<u16>,
) -> Result<Vec<SaveTensor<'_>>> {
    let mut devices = LentDevices::default();
    let items = names.into_iter().zip(kinds).zip(modules).enumerate();
    let items = items.map(|(at, ((name, kind), module_index))| {
        let kind = TensorKind::from_u8(kind)
            .ok_or_else(|| Error::InvalidArgument(format!("{kind} is not a tensor type")))?;
        one_to_save(name, kind, module_index, tensors, at, &mut devices)
    });
    items.collect()
}
