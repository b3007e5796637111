//! `libtensorizer_torch.so`: the operators for every process that has LibTorch and no Python.
#![allow(unsafe_code)]

// Defines the operators when the library is loaded.
use tensorizer_torch as _;

// SAFETY: runs once, when the dynamic linker loads the library; it reads the environment, and prints.
#[used]
#[unsafe(link_section = ".init_array")]
static WARN: extern "C" fn() = warn;

extern "C" fn warn() {
    if let Some(warning) = tensorizer::environment::unknown_variables() {
        eprintln!("warning: {warning}");
    }
}

/// Returns the version of the interface that `tensorizer.h` expects of this library.
// SAFETY: no other library that a C++ program links defines a function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn tensorizer_abi_version() -> u32 {
    2
}
