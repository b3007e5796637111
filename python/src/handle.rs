//! `tensorizer._C.Handle`, which owns tensors on their way between torch and the native module.

use pyo3::prelude::*;
use tensorizer_torch::exchange;

/// A number for the operators `_lend` and `_take`. Dropping it drops tensors that were not fetched.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Handle(pub exchange::ExchangeHandle);

#[pymethods]
impl Handle {
    #[new]
    fn new() -> Self {
        Handle(exchange::ExchangeHandle::reserve())
    }

    #[getter]
    fn number(&self) -> i64 {
        self.0.number()
    }
}
