//! `tensorizer._C.open` and `.create`, which open sources and sinks of every kind.

use std::ffi::{OsString, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBool, PyBytes, PyDict, PyInt, PyString};
use tensorizer::error::{Error, Result};
use tensorizer::format::shards::{FILE_EXTENSIONS, MODEL_FILE_NAMES};
use tensorizer::io::cache::Cache;
use tensorizer::io::hf;
use tensorizer::io::transport::{Trust, show_text};
use tensorizer::io::uri::{self, Address};
use tensorizer::io::{Facts, MemorySource, OpenOptions, ReadAt, S3Cfg, S3Options, StreamSource};

use crate::cached_heads::{HeadFromPython, from_python};
use crate::calls::{SAVING, enter_part, signals, signals_in_save};
use crate::errors::Outcome;
use crate::file::{PyFile, duplicate};
use crate::gil;
use crate::sink::Sink;
use crate::source::Source;

/// The options of a call: `OpenOptions` of `_C.pyi`.
struct CallOptions<'py>(Option<Bound<'py, PyDict>>);

impl<'py> CallOptions<'py> {
    fn get<T: for<'a> FromPyObject<'a, 'py>>(&self, name: &str) -> PyResult<Option<T>> {
        let found = self.0.as_ref().map(|options| options.get_item(name)).transpose()?.flatten();
        let found = found.filter(|found| !found.is_none());
        let extract = |found: Bound<'py, PyAny>| {
            let py = found.py();
            found.extract().map_err(|error: T::Error| {
                let error: PyErr = error.into();
                PyErr::from_type(error.get_type(py), format!("{name}: {}", error.value(py)))
            })
        };
        found.map(extract).transpose()
    }

    fn s3(&self) -> PyResult<S3Options> {
        Ok(S3Options {
            access_key: self.get("access_key")?,
            secret_key: self.get("secret_key")?,
            endpoint: self.get("endpoint")?,
            default_endpoint: self.get("default_endpoint")?,
            config_path: self.get("config_path")?,
            force_http: self.get("force_http")?,
            region: self.get("region")?,
            session_token: self.get("session_token")?,
            addressing_style: self.get("addressing_style")?,
            encryption: self.get("encryption")?,
            kms_key_id: self.get("kms_key_id")?,
            requester_pays: self.get::<String>("payer")?.map(|_| true),
        })
    }

    /// Returns the options of the environment, overridden by those of the call.
    fn resolved(&self) -> Outcome<OpenOptions> {
        let mut found = OpenOptions::from_environment()?;
        found.s3 = self.s3()?;
        found.cached_heads =
            from_python(self.get::<Vec<HeadFromPython>>("heads")?.into_iter().flatten());
        if let Some(path) = self.get("certificates")? {
            found.transport.trust = Trust::from_argument(path);
        }
        if self.get("trust_all")?.unwrap_or(false) {
            found.transport.trust = Trust::Anything;
        }
        if let Some(headers) = self.get("headers")? {
            found.transport.headers = headers;
        }
        if let Some(limit) = self.get("max_bytes_per_second")? {
            found.transport.traffic.set_limit(limit);
        }
        if let Some(folder) = self.get::<PathBuf>("cache")? {
            uri::check_target(&folder)?;
            found.cache = Some(Cache::at(folder)?);
        }
        if let Some(cache) = &mut found.cache {
            cache.stale_if_error = self.get("stale_if_error")?.unwrap_or(false);
        }
        Ok(found)
    }
}

/// An address for messages, without its secrets.
fn show(address: &str) -> String {
    match uri::display_address(address) {
        Some(shown) => shown,
        // `@` begins a revision there, and ends a password elsewhere.
        None if address.starts_with("hf:") => address.to_owned(),
        None => show_text(address).to_owned(),
    }
}

/// Opens the address of a server; `model`: that of a folder means a file in it.
fn open_address(
    py: Python<'_>,
    address: &str,
    model: bool,
    options: &CallOptions<'_>,
) -> Outcome<Source> {
    let (timeout, options) = (options.get("timeout")?, options.resolved()?);
    let part = enter_part("opening", &show(address), timeout, &options.transport.traffic);
    let open = if model { uri::open_model } else { uri::open };
    let opened = gil::without(py, || open(address, &options, &signals));
    let opened = opened.inspect_err(|error| part.failed(error))?;
    if options.cache.is_some() && opened.facts().head().is_some() && !Cache::accepts(&*opened) {
        warn_of_no_tag(py, opened.uri())?;
    }
    Ok(Source::new(opened, 0).of_call(timeout, options.transport.traffic))
}

/// Opens an address or a path (a `str`), a descriptor (an `int`), a file in memory (`bytes`), or a
/// Python object that has `read`.
#[pyfunction]
#[pyo3(signature = (file, options = None))]
pub fn open(
    py: Python<'_>,
    file: &Bound<'_, PyAny>,
    options: Option<Bound<'_, PyDict>>,
) -> Outcome<Source> {
    let options = CallOptions(options);
    let uri = options.get::<String>("uri")?;
    let uri = || uri.clone().unwrap_or_else(|| "<file>".to_owned());
    let base = options.get("base")?.unwrap_or(0);
    if file.is_instance_of::<PyString>() {
        let name: OsString = file.extract()?;
        let model = options.get("model")?.unwrap_or(false);
        let is_path = options.get("path")?.unwrap_or(false);
        let path = if is_path { Some(name.clone()) } else { local_path(name.clone())? };
        return match path.map(PathBuf::from) {
            Some(path) => Ok(Source::new(gil::without(py, || uri::open_path(&path))?, 0)),
            None => open_address(py, &name.to_string_lossy(), model, &options),
        };
    }
    if file.is_instance_of::<PyInt>() && !file.is_instance_of::<PyBool>() {
        let (descriptor, uri): (c_int, _) = (file.extract()?, uri());
        let (source, base) = gil::without(py, || -> Result<_> {
            let file = duplicate(descriptor).map_err(|e| Error::io("opening", &uri, e))?;
            uri::open_file(file, uri, base)
        })?;
        return Ok(Source::new(source, base));
    }
    if file.is_instance_of::<PyBytes>() {
        let bytes: PyBackedBytes = file.extract().map_err(PyErr::from)?;
        return Ok(Source::new(Arc::new(MemorySource::new(bytes, uri())), base));
    }
    if !file.hasattr("read")? {
        let what = format!("expected a file with read(), found {}", file.get_type().name()?);
        return Err(PyTypeError::new_err(what).into());
    }
    let size: Option<u64> = options.get("size")?;
    let facts = Facts { uri: uri(), ..Facts::default() };
    let object = PyFile::new(file.clone().unbind(), facts.uri.clone(), size);
    let source: Arc<dyn ReadAt> = match size {
        Some(_) => Arc::new(object),
        None => Arc::new(StreamSource::with_facts(object, base, facts)),
    };
    Ok(Source::new(source, base))
}

/// True once the warning was issued. For most servers, it would be the same for all files.
static WARNED: AtomicBool = AtomicBool::new(false);

/// Warns, once per process, that the cache keeps nothing of a file.
fn warn_of_no_tag(py: Python<'_>, uri: &str) -> PyResult<()> {
    if WARNED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let message = format!(
        "{uri} is not cached: its server sends no strong ETag, without which a changed file cannot \
         be told from a cached one"
    );
    py.import("warnings")?.call_method1("warn", (message,))?;
    Ok(())
}

/// Creates an object at an address. Nothing is sent before a part is complete.
#[pyfunction]
#[pyo3(signature = (address, options = None))]
pub fn create(
    py: Python<'_>,
    address: String,
    options: Option<Bound<'_, PyDict>>,
) -> Outcome<Sink> {
    let options = CallOptions(options);
    let (timeout, options) = (options.get("timeout")?, options.resolved()?);
    let traffic = &options.transport.traffic;
    let part = enter_part(SAVING, &show(&address), timeout, traffic);
    let made = gil::without(py, || uri::create_object(&address, &options, &signals_in_save));
    let made = made.inspect_err(|error| part.failed(error))?;
    Ok(Sink::new(made, timeout, Arc::clone(traffic)))
}

/// Returns the path that a string names, or None for the address of a server.
#[pyfunction]
pub fn local_path(uri: OsString) -> Outcome<Option<OsString>> {
    Ok(match uri::parse(&uri)? {
        Address::Path(path) => Some(path.into_os_string()),
        Address::Server(_) => None,
    })
}

/// Refuses a path to write that is a misspelled address, such as `s3:/bucket/key` or `~/file`.
#[pyfunction]
pub fn check_target(path: OsString) -> Outcome<()> {
    Ok(uri::check_target(Path::new(&path))?)
}

/// Refuses a name for a `.tensors` file that promises another format; those of `torch.save` only if
/// they are not allowed.
#[pyfunction]
pub fn check_tensors_name(name: OsString, allows_torch: bool) -> Outcome<()> {
    Ok(uri::check_tensors_name(&name.to_string_lossy(), allows_torch)?)
}

/// Returns the names of the files that a model's folder may have, in the order in which they are
/// looked for, and the endings by which the address of a file is distinguished from that of a
/// folder.
#[pyfunction]
pub fn model_files() -> (Vec<&'static str>, Vec<&'static str>) {
    (MODEL_FILE_NAMES.to_vec(), FILE_EXTENSIONS.to_vec())
}

/// True if the environment says that no request is made to Hugging Face's hub.
#[pyfunction]
pub fn hub_is_offline() -> bool {
    hf::is_offline()
}

/// Returns the scheme of a server's address, and whether objects can be written there; None for a
/// path.
#[pyfunction]
pub fn scheme(uri: OsString) -> Outcome<Option<(&'static str, bool)>> {
    Ok(match uri::parse(&uri)? {
        Address::Path(_) => None,
        Address::Server(scheme) => Some((scheme.name, scheme.is_writable())),
    })
}

/// Access key, secret key, host and use of https, each None where the file does not have it.
type S3Keys = (Option<String>, Option<String>, Option<String>, Option<bool>);

/// Reads the `[default]` section of a configuration file of `s3cmd`.
#[pyfunction]
pub fn s3cfg(path: PathBuf) -> PyResult<S3Keys> {
    let failed = |e: std::io::Error| PyValueError::new_err(format!("{}: {e}", path.display()));
    let S3Cfg { access_key, secret_key, host, use_https, .. } =
        S3Cfg::read(&path).map_err(failed)?;
    Ok((access_key, secret_key, host, use_https))
}
