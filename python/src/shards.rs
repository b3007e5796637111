//! `tensorizer._C.ShardIndex`: the index of a checkpoint in several files, opened one by one.

use std::sync::Arc;

use pyo3::prelude::*;
use tensorizer::error::Result;
use tensorizer::traffic::Traffic;
use tensorizer::{ForkSafeMutex, Opening, ShardIndex as Index, TensorFile};

use crate::calls::{enter_part, signals};
use crate::errors::Outcome;
use crate::gil;
use crate::names::plain_name;
use crate::reader::Reader;
use crate::source::{Source, unless_closed};

/// An index that was read. All methods may be called from several threads.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct ShardIndex {
    index: ForkSafeMutex<Option<Arc<Index>>>,
    /// The address, without its secrets.
    #[pyo3(get)]
    uri: String,
    /// The time limit of each opening, in seconds.
    timeout: Option<f64>,
    /// The requests of its files.
    traffic: Arc<Traffic>,
}

impl ShardIndex {
    /// Returns the index, unless it was closed.
    fn shared(&self) -> Result<Arc<Index>> {
        unless_closed(&self.index, &self.uri)
    }

    fn opened(
        &self,
        py: Python<'_>,
        open: impl FnOnce(&Index, &Opening<'_>) -> Result<TensorFile> + Send,
    ) -> Outcome<Reader> {
        let index = self.shared()?;
        let part = enter_part("opening", &self.uri, self.timeout, &self.traffic);
        // Another thread may close it meanwhile.
        let go_on = || self.shared().and_then(|_| signals());
        let opening = Opening { storages: true, ..Opening::new(&go_on) };
        let file = gil::without(py, || open(&index, &opening));
        Ok(Reader::new(file.inspect_err(|error| part.failed(error))?, &self.traffic))
    }
}

#[pymethods]
impl ShardIndex {
    /// Reads the index of a source; None if the source is something else, or can be read only once.
    #[staticmethod]
    fn of(py: Python<'_>, source: &Source) -> Outcome<Option<Self>> {
        let (base, timeout, traffic) = (source.base, source.timeout, Arc::clone(&source.traffic));
        let source = source.shared()?;
        let index = gil::without(py, || Index::of_source(source, base, &signals))?;
        Ok(index.map(|index| ShardIndex {
            uri: index.uri().to_owned(),
            index: ForkSafeMutex::new(Some(Arc::new(index))),
            timeout,
            traffic,
        }))
    }

    /// Returns the number of the file that has a tensor; None if the index does not name it.
    fn file_of(&self, name: &Bound<'_, PyAny>) -> Outcome<Option<usize>> {
        let index = self.shared()?;
        Ok(plain_name(name).and_then(|name| index.file_of(name.stored())))
    }

    /// Opens one of the files.
    fn open(&self, py: Python<'_>, file: usize) -> Outcome<Reader> {
        self.opened(py, |index, opening| index.open_one(file, opening))
    }

    /// Opens all files.
    fn open_all(&self, py: Python<'_>) -> Outcome<Reader> {
        self.opened(py, |index, opening| index.open_wanted(opening))
    }

    fn close(&self) {
        let index = self.index.lock().take();
        drop(index);
    }
}
