//! `tensorizer._C.Source`: an open address for `stream_io`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorizer::Brief;
use tensorizer::error::{Error, Result};
use tensorizer::mem::Buffers;
use tensorizer::net::s3::S3Options;
use tensorizer::net::{NetOptions, Trust};
use tensorizer::source::address::{self, Address};
use tensorizer::source::{KnownHeads, ReadAt, clouds, hf, http, redis, s3};

use crate::errors::Answer;
use crate::gil;
use crate::signals;

/// The path that a string names, or None for the address of a server.
#[pyfunction]
pub fn local_path(uri: OsString) -> Answer<Option<OsString>> {
    Ok(match address::parse(&uri)? {
        Address::Path(path) => Some(path.into_os_string()),
        Address::Scheme(_) => None,
    })
}

/// Bytes that a read takes memory for at first; then it doubles.
const STEP: usize = 8 << 20;

/// Bytes of a server. All methods may be called from several threads.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Source {
    source: Brief<Option<Arc<dyn ReadAt>>>,
    uri: String,
}

impl Source {
    fn new(source: Arc<dyn ReadAt>) -> Self {
        Source { uri: source.uri().to_owned(), source: Brief::new(Some(source)) }
    }

    /// The source, unless it was closed.
    pub fn shared(&self) -> Result<Arc<dyn ReadAt>> {
        let source = self.source.lock();
        source
            .clone()
            .ok_or_else(|| Error::Closed(format!("I/O operation on closed file `{}`", self.uri)))
    }
}

/// Which certificates Python's `CAInfo` stands for.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Certificates {
    ca_file: Option<PathBuf>,
    ca_folder: Option<PathBuf>,
    trust_all: bool,
}

impl Certificates {
    /// The options of the environment, with these certificates.
    pub fn options(self) -> Result<NetOptions> {
        let trust = match (self.ca_file, self.ca_folder, self.trust_all) {
            (Some(file), ..) => Trust::File(file),
            (_, Some(folder), _) => Trust::Folder(folder),
            (.., true) => Trust::Anything,
            _ => Trust::System,
        };
        Ok(NetOptions { trust, ..NetOptions::from_environment()? })
    }
}

/// What a call says about S3.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct S3Given {
    access_key: Option<String>,
    secret_key: Option<String>,
    endpoint: Option<String>,
    default_endpoint: Option<String>,
    config_path: Option<PathBuf>,
    force_http: Option<bool>,
    region: Option<String>,
}

impl From<S3Given> for S3Options {
    fn from(given: S3Given) -> Self {
        let S3Given {
            access_key,
            secret_key,
            endpoint,
            default_endpoint,
            config_path,
            force_http,
            region,
        } = given;
        let requester_pays = None;
        S3Options {
            access_key,
            secret_key,
            endpoint,
            default_endpoint,
            config_path,
            force_http,
            region,
            requester_pays,
        }
    }
}

#[pymethods]
impl Source {
    /// Opens an address.
    #[staticmethod]
    fn http(
        py: Python<'_>,
        uri: String,
        headers: Vec<(String, String)>,
        certificates: Certificates,
    ) -> Answer<Self> {
        let source = gil::without(py, || -> Result<_> {
            let options = NetOptions { headers, ..certificates.options()? };
            http::open(&uri, options, &KnownHeads::default(), &signals)
        })?;
        Ok(Self::new(source))
    }

    /// Opens an object of S3.
    #[staticmethod]
    fn s3(
        py: Python<'_>,
        uri: String,
        options: S3Given,
        certificates: Certificates,
    ) -> Answer<Self> {
        let options = options.into();
        let source = gil::without(py, || -> Result<_> {
            s3::open(&uri, &options, certificates.options()?, &KnownHeads::default(), &signals)
        })?;
        Ok(Self::new(source))
    }

    /// Opens a file of a hub, or that of a folder or a repository of it.
    #[staticmethod]
    fn hf(py: Python<'_>, uri: String, certificates: Certificates) -> Answer<Self> {
        let source = gil::without(py, || -> Result<_> {
            hf::open(&uri, certificates.options()?, &KnownHeads::default(), &signals)
        })?;
        Ok(Self::new(source))
    }

    /// Opens an object of Google Cloud Storage or a blob of Azure.
    #[staticmethod]
    fn clouds(py: Python<'_>, uri: String, certificates: Certificates) -> Answer<Self> {
        let source = gil::without(py, || -> Result<_> {
            clouds::open(&uri, certificates.options()?, &KnownHeads::default(), &signals)
        })?;
        Ok(Self::new(source))
    }

    /// Opens the values of a Redis server.
    #[staticmethod]
    fn redis(py: Python<'_>, uri: String, certificates: Certificates) -> Answer<Self> {
        let source = gil::without(py, || -> Result<_> {
            redis::open(&uri, certificates.options()?, &signals)
        })?;
        Ok(Self::new(source))
    }

    /// Up to `len` bytes at a position: fewer only at the end.
    fn read<'py>(&self, py: Python<'py>, offset: u64, len: usize) -> Answer<Bound<'py, PyBytes>> {
        let source = self.shared()?;
        let bytes = gil::without(py, || -> Result<_> {
            let known = source.traits().len.unwrap_or(u64::MAX).saturating_sub(offset);
            let len = len.min(usize::try_from(known).unwrap_or(len));
            let mut bytes = Vec::new();
            let mut done = 0;
            while done < len {
                if done == bytes.len() {
                    // What was asked for, and what a server promises, is not believed.
                    let more = STEP.max(done).min(len - done);
                    bytes.try_reserve(more).map_err(|_| Error::OutOfMemory {
                        bytes: (done + more) as u64,
                        what: format!("bytes of `{}`", source.uri()),
                        error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
                    })?;
                    bytes.resize(done + more, 0);
                }
                let rest = bytes.split_at_mut(done).1;
                let at = offset.saturating_add(done as u64);
                match source.read_at(at, &mut Buffers::of(rest), &signals)? {
                    0 => break,
                    read => done += read,
                }
            }
            bytes.truncate(done);
            Ok(bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn close(&self) {
        let source = self.source.lock().take();
        drop(source);
    }

    /// The address, without its secrets.
    #[getter]
    fn uri(&self) -> &str {
        &self.uri
    }

    /// Size in bytes; None for a server that can only be read front to back.
    #[getter]
    fn size(&self) -> Answer<Option<u64>> {
        Ok(self.shared()?.traits().len)
    }

    /// What the server sent along.
    fn headers(&self) -> Answer<Vec<(String, String)>> {
        Ok(self.shared()?.headers().to_vec())
    }
}
