//! Shared libraries that are opened at run time. `unsafe` is allowed in this file: it calls
//! `dlopen` and `dlsym`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// An open library. It is never closed, so that its functions stay valid.
#[derive(Clone, Copy)]
pub struct Library(NonNull<c_void>);

impl Library {
    /// Opens the library of a name, which the dynamic linker searches for.
    ///
    /// # Safety
    /// The library's initialisers may run at any time, on any thread.
    pub unsafe fn open(name: &CStr) -> Option<Self> {
        // SAFETY: a string that ends in a zero; the rest is the caller's promise.
        NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) }).map(Library)
    }

    /// Returns a function of the library.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function that has this name.
    pub unsafe fn find<F: Copy>(self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
        // SAFETY: the library is open; the name ends in a zero.
        let symbol = NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })?;
        // SAFETY: not null, of the size of `F`, and of that type by the caller's promise.
        Some(unsafe { std::mem::transmute_copy::<NonNull<c_void>, F>(&symbol) })
    }
}
