//! Python's names for the hashes that a load compares.

use pyo3::prelude::*;
use tensorizer::Verify;

/// Returns the option for a name; unknown names compare all hashes.
pub fn verification(name: &str) -> Verify {
    match name {
        "nothing" => Verify::Nothing,
        "crc32" => Verify::Crc32,
        _ => Verify::All,
    }
}

/// The same for a string of Python.
pub fn verification_of(name: &Bound<'_, PyAny>) -> PyResult<Verify> {
    Ok(verification(name.extract()?))
}
