//! The GIL: released during long work, and not requested when the interpreter ends. One of the few
//! modules that may use `unsafe`.
//!
//! Before Python 3.14, an interpreter that ends terminates every thread that requests the GIL, in
//! the middle of the calling function. That cannot unwind through Rust, and aborts the process.
//! Such threads wait here for the end of the process instead, as Python 3.14 makes them do.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::thread;

use pyo3::prelude::*;
use tensorizer::error::{Error, Result};
use tensorizer_torch::guard::guard;

/// The interpreter's main thread, which is the one that ends it.
static MAIN: OnceLock<libc::pthread_t> = OnceLock::new();

fn this_thread() -> libc::pthread_t {
    // SAFETY: takes no arguments, and returns the id of the calling thread.
    unsafe { libc::pthread_self() }
}

/// Notes the interpreter's main thread.
pub fn note_main(py: Python<'_>) -> PyResult<()> {
    let main = py.import("threading")?.call_method0("main_thread")?.getattr("ident")?;
    let main = main.extract()?;
    MAIN.get_or_init(|| main);
    // Initialises its static now: a fork while another thread initialises it would leave it locked
    // in the child.
    is_held();
    Ok(())
}

/// True if this thread may go on while the interpreter ends.
pub fn is_main() -> bool {
    // SAFETY: both take no arguments, and cannot fail.
    let first = unsafe { libc::getpid() == libc::gettid() };
    first || MAIN.get() == Some(&this_thread())
}

fn is_ending() -> bool {
    // SAFETY: may be called at any time, with or without the GIL.
    unsafe { pyo3::ffi::Py_IsInitialized() == 0 }
}

fn wait_for_the_end() -> ! {
    loop {
        thread::park();
    }
}

/// Runs work that may take long without the GIL. A panic becomes an error.
pub fn without<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    py.detach(|| {
        let result = guard(body);
        if is_ending() && !is_main() {
            wait_for_the_end();
        }
        result
    })
}

/// True if this thread holds the GIL. The function is not in Python's stable ABI, and is looked up.
fn is_held() -> bool {
    static CHECK: OnceLock<Option<extern "C" fn() -> libc::c_int>> = OnceLock::new();
    let check = CHECK.get_or_init(|| {
        // SAFETY: the name is a null-terminated string.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) };
        // SAFETY: in every version of Python, the function takes no arguments and returns an int;
        // null becomes None.
        unsafe {
            std::mem::transmute::<*mut libc::c_void, Option<extern "C" fn() -> libc::c_int>>(found)
        }
    });
    check.is_some_and(|check| check() == 1)
}

/// Runs the body of an operator without the GIL, if its caller holds it: torch releases it, but
/// code that is compiled ahead of time may not. The body does not panic.
pub fn unlocked(body: &mut dyn FnMut()) {
    if !is_held() {
        return body();
    }
    // SAFETY: this thread holds the GIL, releases it here, and takes it back below.
    let state = unsafe { pyo3::ffi::PyEval_SaveThread() };
    body();
    if is_ending() && !is_main() {
        wait_for_the_end();
    }
    // SAFETY: the state is that which this thread got when it released the GIL above.
    unsafe { pyo3::ffi::PyEval_RestoreThread(state) };
}

/// Runs a function with the GIL. If the interpreter is ending, this is an error on the thread that
/// ends it; other threads wait for the end of the process.
pub fn with<T>(body: impl FnOnce(Python<'_>) -> T) -> Result<T> {
    match Python::try_attach(body) {
        Some(result) => Ok(result),
        None if is_main() => Err(Error::Cancelled),
        None => wait_for_the_end(),
    }
}
