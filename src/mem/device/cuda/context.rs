//! The primary context of a CUDA device, which is the one that torch uses. `unsafe` is allowed in
//! this file: it calls the driver.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::ptr;

use super::driver::{self, Driver, ResultCode};
use crate::error::{Error, Result};
use crate::sys::process::OwnerProcess;

thread_local! {
    /// The context that [`Context::enter`] has made the current one of this thread; null for none.
    static CURRENT: Cell<driver::Context> = const { Cell::new(ptr::null_mut()) };
}

/// A device's context. Lives as long as the process.
pub struct Context {
    /// torch's name of the device.
    pub name: String,
    /// The driver.
    pub driver: &'static Driver,
    raw: driver::Context,
    device: c_int,
    owner: OwnerProcess,
}

// SAFETY: contexts of the driver may be used on any thread that makes them current, as `enter`
// does.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the context of the device that torch calls `cuda:<index>`.
    pub fn open(index: u32) -> Result<Self> {
        let name = format!("cuda:{index}");
        let driver = driver::driver()
            .map_err(|why| Error::Device { device: name.clone(), what: why.to_owned() })?;
        let (raw, owner) = (ptr::null_mut(), OwnerProcess::current());
        let mut context = Context { name, driver, raw, device: 0, owner };
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        let mut device = 0;
        // SAFETY: each call writes to the variables given, which live until it returns.
        unsafe {
            context.check("starting the driver", (driver.init)(0))?;
            context.check("finding the device", (driver.device)(&mut device, ordinal))?;
            let retained = (driver.retain_context)(&mut context.raw, device);
            context.check("opening the device", retained)?;
        }
        context.device = device;
        Ok(context)
    }

    /// Returns the device's PCI bus id, such as `0000:C1:00.0`.
    pub fn bus_id(&self) -> Option<String> {
        let mut text = [0_u8; 32];
        // SAFETY: writes a text with a zero at its end, of 32 bytes at most.
        let code = unsafe { (self.driver.bus_id)(text.as_mut_ptr().cast(), 32, self.device) };
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
        (code == driver::SUCCESS).then(|| text.to_owned())
    }

    /// Returns an error in a process other than the one that opened the context: the driver does
    /// not work after a fork.
    pub fn check_process(&self) -> Result<()> {
        if self.owner.is_current() {
            return Ok(());
        }
        let what = "CUDA was used before fork(), and does not work in this child process: use the \
                    `spawn` start method";
        Err(Error::Device { device: self.name.clone(), what: what.to_owned() })
    }

    /// Makes the context the current one of this thread, until the result is dropped. A nested call
    /// costs nothing. No foreign code, such as a signal handler, may run meanwhile.
    pub fn enter(&self) -> Result<ContextScope> {
        let outer = CURRENT.get();
        if outer == self.raw {
            return Ok(ContextScope { driver: None, outer, mode: driver::CAPTURE_RELAXED });
        }
        let mut mode = driver::CAPTURE_RELAXED;
        // SAFETY: the context lives as long as the process; the mode is written back into the
        // variable.
        unsafe {
            self.check("entering the device", (self.driver.push_context)(self.raw))?;
            // Calls made here must neither become part of a graph that another thread captures, nor
            // invalidate that graph.
            let _ = (self.driver.exchange_capture_mode)(&mut mode);
        }
        CURRENT.set(self.raw);
        Ok(ContextScope { driver: Some(self.driver), outer, mode })
    }

    /// Returns an error unless the driver call has succeeded.
    pub fn check(&self, what: &str, code: ResultCode) -> Result<()> {
        if code == driver::SUCCESS {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: gives a pointer to a constant of the driver, or leaves the null.
        unsafe {
            let _ = (self.driver.error_text)(code, &mut text);
        }
        let message = if text.is_null() {
            format!("error {code}")
        } else {
            // SAFETY: not null, so a constant of the driver that ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Error::Device { device: self.name.clone(), what: format!("{what}: {message}") })
    }
}

/// A scope in which a context is current; its drop restores the previous one. It cannot be sent to
/// another thread, because of the raw pointer in it.
pub struct ContextScope {
    /// None in a nested scope of the same context.
    driver: Option<&'static Driver>,
    outer: driver::Context,
    mode: c_int,
}

impl Drop for ContextScope {
    fn drop(&mut self) {
        let Some(driver) = self.driver else { return };
        let mut before = ptr::null_mut();
        // SAFETY: undoes what `enter` did on this thread; both variables are only written to.
        unsafe {
            let _ = (driver.exchange_capture_mode)(&mut self.mode);
            let _ = (driver.pop_context)(&mut before);
        }
        CURRENT.set(self.outer);
    }
}
