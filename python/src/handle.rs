//! `tensorizer._C.Handle`, which owns tensors on their way between torch and the native module.

use pyo3::prelude::*;
use tensorizer_torch::handles;

/// A number for the operators `_lend` and `_take`. Dropping it drops tensors that were not fetched.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Handle(pub handles::TensorHandle);

#[pymethods]
impl Handle {
    #[new]
    fn new() -> Self {
        Handle(handles::TensorHandle::reserve())
    }

    #[getter]
    fn number(&self) -> i64 {
        self.0.number()
    }
}
