//! Finds the modules that have an object among their globals. One of the few modules that may use
//! `unsafe`.
#![allow(unsafe_code)]

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the numbers of the dicts that have one of these objects as a value.
///
/// Changes no reference counts: there may be hundreds of thousands of values, in memory that no
/// other code is about to touch.
#[pyfunction]
pub fn dicts_with_value(
    namespaces: Vec<Bound<'_, PyDict>>,
    objects: Vec<Bound<'_, PyAny>>,
) -> Vec<usize> {
    let objects: Vec<*mut ffi::PyObject> = objects.iter().map(|object| object.as_ptr()).collect();
    let holds = |dict: &Bound<'_, PyDict>| {
        let (mut position, mut value) = (0, ptr::null_mut());
        // SAFETY: `dict` is a live dict, and nothing changes it: this thread holds the GIL, and
        // calls nothing else of Python meanwhile. The value is borrowed, and only its address is
        // used.
        while unsafe { ffi::PyDict_Next(dict.as_ptr(), &mut position, ptr::null_mut(), &mut value) }
            != 0
        {
            if objects.contains(&value) {
                return true;
            }
        }
        false
    };
    let found = namespaces.iter().enumerate().filter(|(_, dict)| holds(dict));
    found.map(|(number, _)| number).collect()
}
