//! Defines the operators when the dynamic linker loads the library that contains this module:
//! `libtensorizer_torch.so`, for processes without Python, or the Python module.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use crate::guard::guard;
use crate::torch::{register_operators, thrown};

/// The error of the registration; unset if the operators are those of this library.
static FAILED: OnceLock<String> = OnceLock::new();

// SAFETY: runs once, after the dynamic linker has initialised torch, on which this library depends.
// It handles every error itself, because it has no caller that could.
#[used]
#[unsafe(link_section = ".init_array")]
static REGISTER: extern "C" fn() = register;

extern "C" fn register() {
    tensorizer::before_threads();
    if let Err(error) = guard(|| register_operators().map_err(thrown)) {
        eprintln!("tensorizer: {error}");
        FAILED.get_or_init(|| error.to_string());
    }
}

/// Returns an error that says why, if the operators of this process are not those of this library.
pub fn registered() -> std::result::Result<(), &'static str> {
    FAILED.get().map_or(Ok(()), |why| Err(why))
}
