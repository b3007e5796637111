//! All errors of the core.
//!
//! The variants are sorted by what the caller can do about them; `python/src/errors.rs` maps each
//! to a Python class. Messages say what failed, on which file, what was expected and what was
//! found.

use std::io;
use std::ops::Range;

/// The result of every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error raised by code that the caller supplied, such as a Python file object.
pub type CallerError = Box<dyn std::error::Error + Send + Sync>;

/// The error with which a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused: missing file, permission, full disk, lost device.
    #[error("{action} `{uri}`: {error}{}", file_limit_hint(.error))]
    Io {
        /// The operation that failed, as a gerund.
        action: &'static str,
        /// The file or address.
        uri: String,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The source ended before bytes that its own headers promise.
    #[error("`{uri}` is truncated: {what} needs bytes {start} to {end}, found only {size} bytes")]
    Truncated {
        /// The file or address.
        uri: String,
        /// The purpose of the bytes.
        what: String,
        /// Position of the first byte wanted.
        start: u64,
        /// Position after the last byte wanted.
        end: u64,
        /// The number of bytes that there are.
        size: u64,
    },
    /// The bytes are not a well-formed file of their format.
    #[error("{what} (`{uri}`, at byte {offset})")]
    Format {
        /// The file or address.
        uri: String,
        /// Position of the offending bytes.
        offset: u64,
        /// The defect, with expected and found.
        what: String,
    },
    /// The file is of a data version that this release cannot read.
    #[error("Unsupported version: `{uri}` has data version {found}, supported are 1 to 5")]
    Version {
        /// The file or address.
        uri: String,
        /// The version in the file.
        found: u32,
    },
    /// The file holds no tensor of this name.
    #[error("Tensor not found: `{name}` in `{uri}`")]
    TensorNotFound {
        /// The file or address.
        uri: String,
        /// The requested name.
        name: String,
    },
    /// A tensor's bytes are not those that were hashed when it was written.
    #[error("Tensor '{name}' failed {algorithm} verification. Expected {expected}, got {found}.")]
    HashMismatch {
        /// The tensor.
        name: String,
        /// `CRC32` or `SHA256`.
        algorithm: &'static str,
        /// The hash in the file.
        expected: String,
        /// The hash of the bytes read.
        found: String,
    },
    /// Verification was requested, but the file has no hash of the tensor.
    #[error("Tensor '{name}' cannot be verified: `{uri}` holds no hash of it")]
    NoHash {
        /// The tensor.
        name: String,
        /// The file or address.
        uri: String,
    },
    /// Verification was requested, but the file's format has no hashes.
    #[error(
        "`{uri}` cannot be verified: {format} files hold no hashes{elsewhere}; load it without \
         verifying, compare the whole file with sha256=, or copy it to a .tensors file, which holds \
         them, with `tensorizer cp`"
    )]
    NoHashes {
        /// The file or address.
        uri: String,
        /// The name of the format.
        format: &'static str,
        /// A remark on hashes that the server of the file may have; empty if it has none.
        elsewhere: &'static str,
    },
    /// The bytes of a file do not have the hash that its hub publishes, or that the caller states.
    #[error("`{uri}` failed SHA256 verification: {expected}, the bytes have {found}{kept}")]
    FileHashMismatch {
        /// The address.
        uri: String,
        /// The stated hash, and its origin: `the hub publishes ...`.
        expected: Box<str>,
        /// The hash of the bytes read.
        found: Box<str>,
        /// The local copy that was read, and how to replace it; empty if the bytes came from the
        /// hub.
        kept: Box<str>,
    },
    /// The file is encrypted in a way that this call cannot undo.
    #[error("{0}")]
    Crypt(String),
    /// Memory could not be allocated.
    #[error("cannot allocate {bytes} bytes for {what}: {error}")]
    OutOfMemory {
        /// The number of bytes that were requested.
        bytes: u64,
        /// The purpose of the memory.
        what: String,
        /// The error of the operating system.
        error: io::Error,
    },
    /// A device, or its driver, refused an operation or was lost.
    #[error("{device}: {what}")]
    Device {
        /// The name of the device in torch, such as `cuda:0`.
        device: String,
        /// The operation that failed, and the driver's message.
        what: String,
    },
    /// Memory of a device could not be allocated.
    #[error("{what}")]
    DeviceMemory {
        /// The message of its allocator.
        what: String,
    },
    /// The request is valid, but this release does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// The call's own arguments are wrong.
    #[error("{0}")]
    InvalidArgument(String),
    /// The file is complete and has its name, but the name may not survive a crash of the system.
    #[error("`{uri}` is complete and has its name, but its folder could not be synced: {error}")]
    Unsynced {
        /// The path.
        uri: String,
        /// The error of the disk.
        error: io::Error,
    },
    /// The file may be written, but not replaced as a whole.
    #[error(
        "`{uri}` may be written, but not replaced by a new file in its folder `{}` ({error}): \
         write another file, or, at the risk of a damaged one if that fails, write it in place by \
         passing open(path, \"wb+\") instead of the path",
        .folder.display()
    )]
    Irreplaceable {
        /// The path.
        uri: String,
        /// The folder in which no file can be created, or renamed.
        folder: std::path::PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The object is closed.
    #[error("{0}")]
    Closed(String),
    /// The caller interrupted the call.
    #[error("interrupted by the keyboard")]
    Cancelled,
    /// The error was raised by code that the caller supplied.
    #[error("{0}")]
    Caller(#[source] CallerError),
    /// A defect of this crate.
    #[error("{0}; this is a defect of tensorizer, please report it")]
    Bug(String),
}

impl Error {
    /// Adds the file that was being loaded or saved to an error of a device.
    pub fn with_file(mut self, doing: &str, uri: &str) -> Self {
        if let Error::Device { what, .. } | Error::DeviceMemory { what } = &mut self {
            *what = format!("{doing} `{uri}`: {what}");
        }
        self
    }

    /// Adds the name of the server, unless the message has it already.
    #[cfg(feature = "http")]
    pub(crate) fn at_host(self, host: &str) -> Self {
        match &self {
            Error::Io { error, .. } if error.to_string().contains(host) => self,
            _ => self.with_hint(&format!("host {host}")),
        }
    }

    /// Adds a hint in parentheses to an error of a file or a server.
    #[cfg(feature = "http")]
    pub(crate) fn with_hint(mut self, hint: &str) -> Self {
        if let Error::Io { error, .. } = &mut self {
            *error = io::Error::new(error.kind(), format!("{error} ({hint})"));
        }
        self
    }

    /// Creates the error of a source of `size` bytes in all that does not have the range `wanted`.
    pub(crate) fn truncated(uri: &str, what: &str, wanted: Range<u64>, size: u64) -> Self {
        let Range { start, end } = wanted;
        Error::Truncated { uri: uri.to_owned(), what: what.to_owned(), start, end, size }
    }

    /// Creates the error of an operation that the system refused.
    pub fn io(action: &'static str, uri: &str, error: io::Error) -> Self {
        Error::Io { action, uri: uri.to_owned(), error }
    }

    /// The same, or the error of this crate that is carried by the one of the system.
    pub(crate) fn of_io(action: &'static str, uri: &str, error: io::Error) -> Self {
        error.downcast().unwrap_or_else(|error| Error::io(action, uri, error))
    }

    /// Creates the error of an operation that cannot succeed, with the reason in words.
    pub fn failed(
        action: &'static str,
        uri: &str,
        kind: io::ErrorKind,
        what: impl Into<String>,
    ) -> Self {
        Error::io(action, uri, io::Error::new(kind, what.into()))
    }
}

/// Advice for an error that says that this process may open no more files; empty for others.
pub fn file_limit_hint(error: &io::Error) -> &'static str {
    let is_limit = error.to_string().contains("(os error 24)");
    if is_limit { "; raise the limit of open files (ulimit -n)" } else { "" }
}

/// Text that a file or a server has chosen, in a message. Characters on which a terminal would act
/// are escaped: control characters, and marks that are invisible or change the direction of text.
pub struct Escaped<'t>(pub &'t str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '\0'..='\x1f' | '\x7f'..='\u{9f}' => write!(f, "\\x{:02x}", u32::from(letter)),
            '\u{61c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}'
            | '\u{feff}' => write!(f, "\\u{:04x}", u32::from(letter)),
            letter => write!(f, "{letter}"),
        })
    }
}

/// Text that may be long, in a message. A long one is cut after its beginning, and its length
/// added.
pub struct Shortened<'t>(pub &'t str);

impl std::fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const MAX_CHARACTERS: usize = 200;
        match self.0.char_indices().nth(MAX_CHARACTERS) {
            None => Escaped(self.0).fmt(f),
            Some((end, _)) => {
                let (start, _) = self.0.split_at(end);
                write!(f, "{}... ({} bytes)", Escaped(start), self.0.len())
            }
        }
    }
}

/// A defect in some bytes, before it is known which file they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// Position in the file.
    pub offset: u64,
    /// The defect, with expected and found.
    pub what: String,
}

impl Malformed {
    pub(crate) fn new(offset: u64, what: impl Into<String>) -> Self {
        Malformed { offset, what: what.into() }
    }

    /// Adds the file.
    pub fn in_file(self, uri: &str) -> Error {
        Error::Format { uri: uri.to_owned(), offset: self.offset, what: self.what }
    }
}
