//! GPUDirect Storage: files that the device reads itself, through cuFile. `unsafe` is allowed in
//! this file: it calls cuFile.
//!
//! The library is opened at run time, under the name that NVIDIA's packages and torch give it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::{Arc, OnceLock};

use super::context::Context;
use super::library::Library;
use crate::mem::device::DeviceFile;
use crate::sys::process::PerProcess;

/// `CUfileError_t`: an error of cuFile, and one of the driver.
#[repr(C)]
#[derive(Clone, Copy)]
struct CuFileStatus {
    cufile: c_int,
    driver: c_int,
}

/// `CUfileDescr_t`, for a descriptor of this process.
#[repr(C)]
struct CuFileDescription {
    kind: c_int,
    file: CuFileHandle,
    operations: *const c_void,
}

#[repr(C)]
union CuFileHandle {
    descriptor: c_int,
    _pointer: *mut c_void,
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_DESCRIPTOR: c_int = 1;

type OpenDriver = unsafe extern "C" fn() -> CuFileStatus;
type RegisterFile = unsafe extern "C" fn(*mut *mut c_void, *mut CuFileDescription) -> CuFileStatus;
type DeregisterFile = unsafe extern "C" fn(*mut c_void);
type ReadFile =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, libc::off_t, libc::off_t) -> isize;

#[derive(Clone, Copy)]
struct CuFileFunctions {
    register: RegisterFile,
    deregister: DeregisterFile,
    read: ReadFile,
}

/// Returns the functions of cuFile, if the library is installed and its driver could be opened.
fn cufile() -> Option<CuFileFunctions> {
    static LIBRARY: PerProcess<OnceLock<Option<CuFileFunctions>>> = PerProcess::new();
    *LIBRARY.get().get_or_init(|| {
        // SAFETY: the library's initialisers may run at any time. Each function has the type that
        // cuFile's header, of all its versions, gives it.
        unsafe {
            let library = Library::open(c"libcufile.so.0")?;
            let open: OpenDriver = library.find(c"cuFileDriverOpen")?;
            let found = CuFileFunctions {
                register: library.find(c"cuFileHandleRegister")?,
                deregister: library.find(c"cuFileHandleDeregister")?,
                read: library.find(c"cuFileRead")?,
            };
            (open().cufile == 0).then_some(found)
        }
    })
}

/// A file that the device reads itself.
pub struct GdsFile {
    context: Arc<Context>,
    library: CuFileFunctions,
    handle: *mut c_void,
    _file: File,
}

// SAFETY: cuFile's calls are safe on any thread; the handle is only read until it is dropped.
unsafe impl Send for GdsFile {}
// SAFETY: as above.
unsafe impl Sync for GdsFile {}

impl GdsFile {
    /// Opens the file once more, for the device. None if it cannot be read this way.
    pub fn open(context: Arc<Context>, file: &File) -> Option<Self> {
        let library = cufile()?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        let mut description = CuFileDescription {
            kind: OPAQUE_DESCRIPTOR,
            file: CuFileHandle { descriptor: file.as_raw_fd() },
            operations: std::ptr::null(),
        };
        let mut handle = std::ptr::null_mut();
        let _entered = context.enter().ok()?;
        // SAFETY: both live until the call returns; the descriptor is open as long as the handle,
        // which is dropped first.
        let registered = unsafe { (library.register)(&mut handle, &mut description) };
        let fits = registered.cufile == 0 && registered.driver == 0 && !handle.is_null();
        fits.then_some(GdsFile { context, library, handle, _file: file })
    }
}

impl DeviceFile for GdsFile {
    unsafe fn read(&self, to: usize, len: usize, offset: u64) -> io::Result<usize> {
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let to = std::ptr::with_exposed_provenance_mut(to);
        let _entered = self.context.enter().map_err(io::Error::other)?;
        // SAFETY: the caller's promise about the device's memory; the handle is open.
        let read = unsafe { (self.library.read)(self.handle, to, len, offset, 0) };
        usize::try_from(read).map_err(|_| match read {
            -1 => io::Error::last_os_error(),
            code => io::Error::other(format!("cuFile's error {}", code.unsigned_abs())),
        })
    }
}

impl Drop for GdsFile {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the handle was registered when it was opened, and only this value has it.
            unsafe { (self.library.deregister)(self.handle) };
        }
    }
}
