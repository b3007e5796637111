//! The GIL: given away while something takes long, and not asked for when the interpreter ends. One
//! of the few doors to `unsafe`.
//!
//! An interpreter that ends, before Python 3.14, ends every thread that asks for the GIL, in the
//! middle of whatever called; that cannot pass through Rust, and aborts the process. Such threads
//! wait here for the end of the process instead, as Python 3.14 has them do.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tensorizer::error::{Error, Result};
use tensorizer_torch::guard::guard;

/// How often a thread looks for signals: that takes the GIL, which others may have for long.
const LOOK: Duration = Duration::from_millis(50);

/// The thread that ends the interpreter, as it began it.
static MAIN: OnceLock<libc::pthread_t> = OnceLock::new();

fn this_thread() -> libc::pthread_t {
    // SAFETY: takes nothing, and names the thread that calls.
    unsafe { libc::pthread_self() }
}

/// Notes which thread is the interpreter's main one.
pub fn note_main(py: Python<'_>) -> PyResult<()> {
    let main = py.import("threading")?.call_method0("main_thread")?.getattr("ident")?;
    let main = main.extract()?;
    MAIN.get_or_init(|| main);
    // Looks for it now, before there is a thread that could be forked from while it does.
    is_held();
    Ok(())
}

/// Whether this thread may go on although the interpreter ends.
fn is_main() -> bool {
    // SAFETY: both take nothing.
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

/// Runs what may take long without the GIL. A panic is an error.
pub fn without<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    py.detach(|| {
        let result = guard(body);
        if is_ending() && !is_main() {
            wait_for_the_end();
        }
        result
    })
}

/// Whether this thread has the GIL. Not part of Python's stable interface, so looked for.
fn is_held() -> bool {
    static CHECK: OnceLock<Option<extern "C" fn() -> libc::c_int>> = OnceLock::new();
    let check = CHECK.get_or_init(|| {
        // SAFETY: a string that ends in a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) };
        // SAFETY: a function that takes nothing and returns an int, in every Python there is; or
        // null, which is none.
        unsafe {
            std::mem::transmute::<*mut libc::c_void, Option<extern "C" fn() -> libc::c_int>>(found)
        }
    });
    check.is_some_and(|check| check() == 1)
}

/// Runs the body of an operator without the GIL, if its caller has it: torch gives it away, but code
/// that is compiled ahead of time may not. The body does not panic.
pub fn unlocked(body: &mut dyn FnMut()) {
    if !is_held() {
        return body();
    }
    // SAFETY: the GIL is held, is given away, and taken back by the same thread.
    let state = unsafe { pyo3::ffi::PyEval_SaveThread() };
    body();
    if is_ending() && !is_main() {
        wait_for_the_end();
    }
    // SAFETY: as above.
    unsafe { pyo3::ffi::PyEval_RestoreThread(state) };
}

/// Runs something with the GIL; an error on the thread that ends the interpreter.
pub fn with<T>(body: impl FnOnce(Python<'_>) -> T) -> Result<T> {
    match Python::try_attach(body) {
        Some(result) => Ok(result),
        None if is_main() => Err(Error::Cancelled),
        None => wait_for_the_end(),
    }
}

/// Asked by whatever waits: lets Ctrl-C end a call.
pub fn signals() -> Result<()> {
    thread_local! {
        static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    if LOOKED.get().is_some_and(|looked| looked.elapsed() < LOOK) {
        return Ok(());
    }
    let found = match with(|py| py.check_signals()) {
        Ok(found) => found.map_err(|e| Error::Caller(Box::new(e))),
        // Files that were forgotten are finished by the thread that ends the interpreter.
        Err(_) => Ok(()),
    };
    LOOKED.set(Some(Instant::now()));
    found
}

/// The same for operators, which can raise text only: their caller sees a `RuntimeError`.
pub fn signals_in_operator() -> Result<()> {
    signals().map_err(|_| Error::Cancelled)
}
