//! Which modules have an object among their globals. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The numbers of the dicts that have one of these objects as a value.
///
/// Counts no references: there may be hundreds of thousands of values, in memory that nobody else
/// is about to use.
#[pyfunction]
pub fn holders(namespaces: Vec<Bound<'_, PyDict>>, objects: Vec<Bound<'_, PyAny>>) -> Vec<usize> {
    let objects: Vec<*mut ffi::PyObject> = objects.iter().map(|object| object.as_ptr()).collect();
    let holds = |dict: &Bound<'_, PyDict>| {
        let (mut place, mut value) = (0, ptr::null_mut());
        // SAFETY: `dict` is a dict that lives, and nothing changes it: this thread has the GIL, and
        // calls nothing else of Python meanwhile. The value is borrowed, and only its address is used.
        while unsafe { ffi::PyDict_Next(dict.as_ptr(), &mut place, ptr::null_mut(), &mut value) }
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
