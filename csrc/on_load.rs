//! The operators are defined when the dynamic linker loads the library that this is part of:
//! `libtensorizer_torch.so`, for processes without Python, or the Python module.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use crate::guard::guard;
use crate::torch::{register_operators, thrown};

/// Why the operators are not this library's.
static FAILED: OnceLock<String> = OnceLock::new();

// SAFETY: runs once, when the dynamic linker has initialised torch, on which this library depends;
// catches every error, because nobody could.
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

/// Whether the operators of this process are those of this library; if not, why.
pub fn registered() -> std::result::Result<(), &'static str> {
    FAILED.get().map_or(Ok(()), |why| Err(why))
}

/// The version of what `tensorizer.h` assumes of this library.
// SAFETY: no other library that a C++ program links defines a function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn tensorizer_abi_version() -> u32 {
    2
}
