//! Cached heads of files, as plain tuples for Python.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tensorizer::io::{CachedHead, CachedHeads};

/// Address, length of the file, `ETag`, `Last-Modified`, headers of the response, first bytes.
type HeadTuple<B> = (String, u64, Option<String>, Option<String>, Vec<(String, String)>, B);
/// A head that Python passes in.
pub type HeadFromPython = HeadTuple<PyBackedBytes>;
/// A head that Python gets.
pub type HeadForPython<'py> = HeadTuple<Bound<'py, PyBytes>>;

/// Converts heads from Python for the core.
pub fn from_python(heads: impl Iterator<Item = HeadFromPython>) -> CachedHeads {
    let heads = heads.map(|(uri, len, tag, modified, headers, first)| {
        let first: &[u8] = &first;
        (uri.clone(), CachedHead { uri, len, tag, modified, headers, first: first.into() })
    });
    Arc::new(heads.collect())
}

/// Converts heads of the core for Python.
pub fn for_python<'py>(py: Python<'py>, heads: &[CachedHead]) -> Vec<HeadForPython<'py>> {
    let heads = heads.iter().map(|head| {
        let CachedHead { uri, len, tag, modified, headers, first } = head.clone();
        (uri, len, tag, modified, headers, PyBytes::new(py, &first))
    });
    heads.collect()
}
