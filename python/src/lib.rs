//! The Python module `tensorizer._C`: the core for the Python classes, with typed errors.

mod cache;
mod cached_heads;
mod calls;
mod crypt;
mod device;
mod errors;
mod file;
mod gil;
mod handle;
mod headers;
mod iterator;
mod logs;
mod memory;
mod names;
mod namespaces;
mod open;
mod pickled;
mod reader;
mod reports;
mod shards;
mod sink;
mod slicing;
mod source;
mod text;
mod watch;
mod writer;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tensorizer::environment::{self, set_guard};
use tensorizer::format::TensorKind;
use tensorizer_torch::{INTERRUPT, UNLOCKED, registered};

/// Makes the variables `TENSORIZER_*` be read again, for tests.
#[pyfunction]
fn forget_environment() {
    environment::clear_cache();
}

/// Returns a warning about variables `TENSORIZER_*` that have no effect; None if there are none.
#[pyfunction]
fn unknown_variables() -> Option<String> {
    environment::unknown_variables()
}

macro_rules! add_all {
    ($module:ident, functions [$($function:path;)+] classes [$($class:path;)+]) => {
        $($module.add_function(wrap_pyfunction!($function, $module)?)?;)+
        $($module.add_class::<$class>()?;)+
    };
}

#[pymodule(name = "_C")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    registered().map_err(pyo3::exceptions::PyImportError::new_err)?;
    gil::note_main(module.py())?;
    INTERRUPT.get_or_init(|| calls::signals_in_operator);
    UNLOCKED.get_or_init(|| gil::unlocked);
    // Code that changes `os.environ` holds the GIL, so that reads of the environment take it, too.
    set_guard(|body| {
        Python::try_attach(|_| body());
    });
    module.add("TORCH_VERSION", tensorizer_torch::TORCH_VERSION)?;
    module.add("DEFAULT_S3_READ_ENDPOINT", tensorizer::io::object::s3::DEFAULT_READ_ENDPOINT)?;
    module.add("DEFAULT_S3_WRITE_ENDPOINT", tensorizer::io::object::s3::DEFAULT_WRITE_ENDPOINT)?;
    module.add("MAX_DEPTH", tensorizer::format::name::MAX_DEPTH)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("cpu_count", tensorizer::cpu_count())?;
    module.add("KINDS", PyTuple::new(module.py(), TensorKind::ALL.map(TensorKind::name))?)?;
    add_all!(module, functions [
        calls::check_wait; calls::running; calls::set_heartbeat; calls::time_left; text::convert_bytes;
        forget_environment; unknown_variables; slicing::as_bytes; slicing::plan_parts;
        slicing::with_earlier; slicing::announce; namespaces::dicts_with_value;
        open::check_target; open::check_tensors_name; open::hub_is_offline; open::local_path;
        open::model_files; open::open; open::create; open::s3cfg; open::scheme; device::uses_staging_memory;
        device::snapshot; cache::cache_entries; cache::clear_cache; reports::stats;
        reports::stats_since; device::set_pinned_limit; device::release_pinned;
        memory::split_tensor_memory; memory::effective_memory_limit; memory::minimum_save_memory;
        memory::time_first_touch;
    ] classes [
        calls::Call; crypt::Encryption; crypt::Decryption; handle::Handle;
        iterator::TensorIterator; reader::Reader; shards::ShardIndex; slicing::Announcement;
        sink::PathSink; sink::Sink; source::Source; writer::TensorWriter;
    ]);
    Ok(())
}
