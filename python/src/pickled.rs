//! The tensors that a pickle of `torch.save` names, as Python has read them.

use pyo3::prelude::*;
use tensorizer::error::Error;
use tensorizer::format::dtype::DType;
use tensorizer::{PickledTensor, TensorFile};

use crate::errors::Outcome;
use crate::names::name_from_python;

/// A tensor of a pickle, as `Reader::tensors` takes it.
pub type PickledTuple<'py> = (Bound<'py, PyAny>, String, Vec<u64>, Option<(usize, u64)>, bool);

/// Returns the file with these tensors.
pub fn pickled(
    file: &TensorFile,
    py: Python<'_>,
    tensors: Vec<PickledTuple<'_>>,
) -> Outcome<TensorFile> {
    let uri = file.uri();
    let tensors = tensors.into_iter().map(|(name, dtype, shape, storage, strided)| {
        let name = name_from_python(&name).map_err(|error| {
            let (uri, what) = (uri.to_owned(), error.value(py).to_string());
            Error::Format { uri, offset: 0, what }
        })?;
        let dtype = DType::from_name(&dtype).ok_or_else(|| {
            let what =
                format!("`{uri}`: tensor `{name}` has the dtype torch.{dtype}, which is unknown");
            Error::Unsupported(what)
        })?;
        Ok(PickledTensor { name, dtype, shape: shape.into(), storage, strided })
    });
    Ok(file.pickled(tensors.collect::<Outcome<_>>()?)?)
}
