//! The Python module `tensorizer._C`: the core for the Python classes, with typed errors.

mod crypt;
mod device;
mod errors;
mod file;
mod handle;
mod reader;
mod sink;
mod source;
mod writer;

use std::cell::Cell;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tensorizer::environment::{self, set_guard};
use tensorizer::error::{Error, Result};
use tensorizer_torch::{registered, set_interrupt};

/// How often a thread looks for signals: that takes the GIL, which others may have for long.
const LOOK: Duration = Duration::from_millis(50);

/// Asked by whatever waits: lets Ctrl-C end a call. When the interpreter ends, so does the call.
fn signals() -> Result<()> {
    thread_local! {
        static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    if LOOKED.get().is_some_and(|looked| looked.elapsed() < LOOK) {
        return Ok(());
    }
    let found = Python::try_attach(|py| py.check_signals()).ok_or(Error::Cancelled)?;
    LOOKED.set(Some(Instant::now()));
    found.map_err(|e| Error::Caller(Box::new(e)))
}

/// The same for operators, which can raise text only: their caller sees a `RuntimeError`.
fn signals_in_operator() -> Result<()> {
    signals().map_err(|_| Error::Cancelled)
}

/// Has the variables `TENSORIZER_*` read again, for tests.
#[pyfunction]
fn forget_environment() {
    environment::forget();
}

#[pymodule(name = "_C")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    registered().map_err(pyo3::exceptions::PyImportError::new_err)?;
    set_interrupt(signals_in_operator);
    // Who changes `os.environ` holds the GIL.
    set_guard(|body| {
        Python::try_attach(|_| body());
    });
    module.add("TORCH_VERSION", tensorizer_torch::TORCH_VERSION)?;
    module.add("DEFAULT_S3_READ_ENDPOINT", tensorizer::net::s3::DEFAULT_READ_ENDPOINT)?;
    module.add("DEFAULT_S3_WRITE_ENDPOINT", tensorizer::net::s3::DEFAULT_WRITE_ENDPOINT)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("cpu_count", tensorizer::cpu_count())?;
    module.add_function(wrap_pyfunction!(forget_environment, module)?)?;
    module.add_function(wrap_pyfunction!(source::local_path, module)?)?;
    module.add_function(wrap_pyfunction!(device::staged, module)?)?;
    module.add_function(wrap_pyfunction!(device::snapshot, module)?)?;
    module.add_function(wrap_pyfunction!(device::stats, module)?)?;
    module.add_function(wrap_pyfunction!(device::set_pinned_limit, module)?)?;
    module.add_function(wrap_pyfunction!(device::release_pinned, module)?)?;
    module.add_class::<handle::Handle>()?;
    module.add_class::<reader::Reader>()?;
    module.add_class::<crypt::Encryption>()?;
    module.add_class::<crypt::Decryption>()?;
    module.add_class::<sink::PathSink>()?;
    module.add_class::<sink::Sink>()?;
    module.add_class::<source::Source>()?;
    module.add_class::<writer::Writer>()?;
    Ok(())
}
