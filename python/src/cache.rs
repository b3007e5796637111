//! The contents of the cache, for the command line.

use std::path::PathBuf;

use pyo3::prelude::*;
use tensorizer::error::{Error, Result};
use tensorizer::io::cache::{Cache, CachedFile};

use crate::errors::Outcome;
use crate::gil;
use crate::reports::since_1970;

/// The address of a file, its bytes, the bytes of it that are cached, and the time of its last
/// opening, in seconds since 1970.
type CacheRow = (String, u64, u64, f64);

fn rows(
    py: Python<'_>,
    folder: Option<PathBuf>,
    found: fn(&Cache) -> Result<Vec<CachedFile>>,
) -> Outcome<Vec<CacheRow>> {
    let found = gil::without(py, || {
        let cache = folder.map(Cache::at).transpose()?;
        let cache = cache.map_or_else(Cache::from_environment, |cache| Ok(Some(cache)))?;
        let what = "no cache folder was given: set TENSORIZER_CACHE, or pass --folder";
        found(&cache.ok_or_else(|| Error::InvalidArgument(what.to_owned()))?)
    })?;
    let row = |it: CachedFile| (it.uri, it.len, it.present, since_1970(it.used));
    Ok(found.into_iter().map(row).collect())
}

/// Lists the files of a cache: of that in a folder, or of the one that the environment names.
#[pyfunction]
#[pyo3(signature = (folder = None))]
pub fn cache_entries(py: Python<'_>, folder: Option<PathBuf>) -> Outcome<Vec<CacheRow>> {
    rows(py, folder, Cache::entries)
}

/// Removes files that no process is using, and returns them.
#[pyfunction]
#[pyo3(signature = (folder = None))]
pub fn clear_cache(py: Python<'_>, folder: Option<PathBuf>) -> Outcome<Vec<CacheRow>> {
    rows(py, folder, Cache::clear)
}
