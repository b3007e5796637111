//! Extended attributes of files.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use super::checked;

/// The names of a file's extended attributes.
pub fn attribute_names(file: &File) -> io::Result<Vec<CString>> {
    let list = sized(|out, len| {
        // SAFETY: the kernel writes at most `len` bytes to `out`, see `sized`.
        checked(unsafe { libc::flistxattr(file.as_raw_fd(), out.cast(), len) })
    })?;
    let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(CString::new).collect::<Result<_, _>>()?)
}

/// An extended attribute; None if the file has no such attribute, or its file system has none at
/// all.
pub fn attribute(file: &File, name: &CStr) -> io::Result<Option<Vec<u8>>> {
    let value = sized(|out, len| {
        // SAFETY: a string that ends in a zero; the kernel writes at most `len` bytes to `out`,
        // see `sized`.
        let got = unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), out.cast(), len) };
        checked(got)
    });
    match value {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODATA | libc::ENOTSUP)) => Ok(None),
        other => other.map(Some),
    }
}

/// The output of a call that returns the length if it is given no room.
fn sized(call: impl Fn(*mut u8, usize) -> io::Result<usize>) -> io::Result<Vec<u8>> {
    let mut out = vec![0; call(std::ptr::null_mut(), 0)?];
    // A call with room for zero bytes would ask for the length again.
    let len = if out.is_empty() { 0 } else { call(out.as_mut_ptr(), out.len())? };
    out.truncate(len);
    Ok(out)
}

/// Sets an extended attribute, or with None removes it.
pub fn set_attribute(file: &File, name: &CStr, value: Option<&[u8]>) -> io::Result<()> {
    let number = file.as_raw_fd();
    let result = match value {
        Some(value) => {
            let bytes = value.as_ptr().cast();
            // SAFETY: a string that ends in a zero, and as many bytes as it says, which all
            // live until the call returns.
            unsafe { libc::fsetxattr(number, name.as_ptr(), bytes, value.len(), 0) }
        }
        // SAFETY: a string that ends in a zero and lives until the call returns.
        None => unsafe { libc::fremovexattr(number, name.as_ptr()) },
    };
    checked(result).map(drop)
}
