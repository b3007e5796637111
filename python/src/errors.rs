//! Conversion of the core's errors to Python exceptions. The classes are in `tensorizer._errors`.

use std::io;

use pyo3::PyErrArguments;
use pyo3::exceptions as builtin;
use pyo3::prelude::*;
use pyo3::types::PyType;
use tensorizer::error::{Error, file_limit_hint};
use tensorizer::io::uri::path_hint;

/// The result of a method. An error of the core becomes its Python exception on the way out.
pub type Outcome<T> = std::result::Result<T, Raised>;

/// An exception on its way to Python.
pub struct Raised(PyErr);

impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Raised(error)
    }
}

impl From<Raised> for PyErr {
    fn from(raised: Raised) -> Self {
        raised.0
    }
}

impl From<Error> for Raised {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        Raised(match error {
            Error::Io { uri, error, .. } => os_error(error, &uri, text),
            Error::Unsynced { uri, error } => {
                builtin::PyOSError::new_err((error.raw_os_error(), text, uri))
            }
            Error::Irreplaceable { uri, error, .. } => {
                builtin::PyPermissionError::new_err((error.raw_os_error(), text, uri))
            }
            Error::Truncated { .. } => package_error("TruncatedError", (text,)),
            Error::Format { .. } => package_error("FormatError", (text,)),
            Error::Version { found, .. } => package_error("InvalidVersionError", (text, found)),
            Error::TensorNotFound { .. } => builtin::PyKeyError::new_err(text),
            Error::HashMismatch { .. } | Error::NoHash { .. } | Error::NoHashes { .. } => {
                package_error("HashMismatchError", (text,))
            }
            Error::FileHashMismatch { .. } => package_error("DamagedFileError", (text,)),
            Error::Crypt(_) => package_error("CryptographyError", (text,)),
            Error::OutOfMemory { .. } => builtin::PyMemoryError::new_err(text),
            Error::Device { .. } => package_error("DeviceError", (text,)),
            Error::DeviceMemory { .. } => package_error("DeviceMemoryError", (text,)),
            Error::Unsupported(_) => builtin::PyNotImplementedError::new_err(text),
            Error::InvalidArgument(_) => builtin::PyValueError::new_err(text),
            Error::Closed(_) => package_error("ClosedError", (text,)),
            Error::Cancelled => builtin::PyKeyboardInterrupt::new_err(()),
            Error::Caller(cause) => match cause.downcast::<PyErr>() {
                Ok(error) => *error,
                Err(other) => builtin::PyRuntimeError::new_err(other.to_string()),
            },
            Error::Bug(_) => builtin::PyRuntimeError::new_err(text),
        })
    }
}

/// Makes an exception of one of this package's classes.
fn package_error(class: &str, arguments: impl PyErrArguments + 'static) -> PyErr {
    Python::attach(|py| {
        let found = py.import("tensorizer._errors").and_then(|module| module.getattr(class));
        match found.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
            Ok(class) => PyErr::from_type(class, arguments),
            Err(error) => error,
        }
    })
}

/// Makes an `OSError` with errno and path, for which Python picks the subclass; or returns the
/// exception that a Python file object raised.
fn os_error(mut error: io::Error, uri: &str, text: String) -> PyErr {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable};
    if let Some(raised) = error.get_mut().and_then(|inner| inner.downcast_mut::<PyErr>()) {
        return Python::attach(|py| raised.clone_ref(py));
    }
    match (error.raw_os_error(), error.kind()) {
        (Some(code), _) => {
            let message = io::Error::from_raw_os_error(code).to_string();
            let message = message.split(" (os error").next().unwrap_or(&message);
            let hint = if error.kind() == io::ErrorKind::NotFound { path_hint(uri) } else { None };
            let message = hint.map_or(message.to_owned(), |hint| format!("{message}{hint}"));
            let message = message + file_limit_hint(&error);
            builtin::PyOSError::new_err((code, message, uri.to_owned()))
        }
        (None, io::ErrorKind::IsADirectory) => builtin::PyIsADirectoryError::new_err(text),
        (None, io::ErrorKind::NotFound) => builtin::PyFileNotFoundError::new_err(text),
        (None, io::ErrorKind::PermissionDenied) => builtin::PyPermissionError::new_err(text),
        (None, io::ErrorKind::TimedOut) => builtin::PyTimeoutError::new_err(text),
        (None, ConnectionRefused | ConnectionReset | ConnectionAborted | HostUnreachable) => {
            builtin::PyConnectionError::new_err(text)
        }
        (None, _) => builtin::PyOSError::new_err(text),
    }
}
