//! Heads of files as Python hands them on: plain tuples.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tensorizer::io::{CachedHead, CachedHeads};

/// Address, bytes of the file, `ETag`, `Last-Modified`, what the server sent along, first bytes.
type Head<B> = (String, u64, Option<String>, Option<String>, Vec<(String, String)>, B);
/// One that Python hands in.
pub type Given = Head<PyBackedBytes>;
/// One that it is handed.
pub type Shown<'py> = Head<Bound<'py, PyBytes>>;

/// What Python hands in, for the core.
pub fn known(heads: impl Iterator<Item = Given>) -> CachedHeads {
    let heads = heads.map(|(uri, len, tag, modified, headers, first)| {
        let first: &[u8] = &first;
        CachedHead { uri, len, tag, modified, headers, first: first.into() }
    });
    heads.collect()
}

/// What the core has found, for Python.
pub fn for_python<'py>(py: Python<'py>, heads: &[CachedHead]) -> Vec<Shown<'py>> {
    let heads = heads.iter().map(|head| {
        let CachedHead { uri, len, tag, modified, headers, first } = head.clone();
        (uri, len, tag, modified, headers, PyBytes::new(py, &first))
    });
    heads.collect()
}
