//! Every way in which the core fails, once.
//!
//! The variants are sorted by what the caller can do about them; `python/src/errors.rs` maps each to a
//! Python class. Messages say what failed, where, what was expected and what was found.

use std::io;

/// The result of every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error raised by code that the caller supplied, such as a Python file object.
pub type CallerError = Box<dyn std::error::Error + Send + Sync>;

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused: missing file, permission, full disk, lost device.
    #[error("{action} `{uri}`: {error}")]
    Io {
        /// What was being done, as a gerund.
        action: &'static str,
        /// The file or address.
        uri: String,
        /// What the operating system said.
        error: io::Error,
    },
    /// The source ended before bytes that its own headers promise.
    #[error("`{uri}` is truncated: {what} needs bytes {start} to {end}, found only {size} bytes")]
    Truncated {
        /// The file or address.
        uri: String,
        /// What the bytes were for.
        what: String,
        /// Position of the first byte wanted.
        start: u64,
        /// Position after the last byte wanted.
        end: u64,
        /// How many bytes there are.
        size: u64,
    },
    /// The bytes are not a well-formed file of their format.
    #[error("{what} (`{uri}`, at byte {offset})")]
    Format {
        /// The file or address.
        uri: String,
        /// Position of the offending bytes.
        offset: u64,
        /// What is wrong, with expected and found.
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
        /// The name asked for.
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
    /// Verification was asked for and the file holds nothing to verify against.
    #[error("Tensor '{name}' cannot be verified: `{uri}` holds no hash of it")]
    NoHash {
        /// The tensor.
        name: String,
        /// The file or address.
        uri: String,
    },
    /// Verification was asked for and the file's format has no hashes.
    #[error(
        "`{uri}` cannot be verified: {format} files hold no hashes{elsewhere}; load it without \
         verifying"
    )]
    NoHashes {
        /// The file or address.
        uri: String,
        /// The name of the format.
        format: &'static str,
        /// Why its server's do not help, if there might be some.
        elsewhere: &'static str,
    },
    /// The bytes of a file are not those of which its hub publishes the hash.
    #[error(
        "`{uri}` failed SHA256 verification: the hub publishes {expected}, the bytes have {found}{kept}"
    )]
    FileHashMismatch {
        /// The address.
        uri: String,
        /// The hash that is published.
        expected: Box<str>,
        /// The hash of the bytes read.
        found: Box<str>,
        /// Where they are kept, and what cures that; empty if they came from the hub.
        kept: Box<str>,
    },
    /// The file is encrypted in a way that this call cannot undo.
    #[error("{0}")]
    Crypt(String),
    /// Memory could not be had.
    #[error("cannot allocate {bytes} bytes for {what}: {error}")]
    OutOfMemory {
        /// How much was asked for.
        bytes: u64,
        /// What for.
        what: String,
        /// What the operating system said.
        error: io::Error,
    },
    /// A device, or its driver, refused or was lost.
    #[error("{device}: {what}")]
    Device {
        /// What torch calls it, such as `cuda:0`.
        device: String,
        /// What failed, and what the driver said.
        what: String,
    },
    /// Memory of a device could not be had.
    #[error("{what}")]
    DeviceMemory {
        /// What its allocator said.
        what: String,
    },
    /// Well-formed, but not something this release does.
    #[error("{0}")]
    Unsupported(String),
    /// The call's own arguments are wrong.
    #[error("{0}")]
    InvalidArgument(String),
    /// A complete file has its name, which may not survive a crash of the system.
    #[error("`{uri}` is complete and has its name, but its folder could not be synced: {error}")]
    Unsynced {
        /// The path.
        uri: String,
        /// What the disk said.
        error: io::Error,
    },
    /// A file may be written, but not replaced as a whole.
    #[error(
        "`{uri}` may be written, but not replaced by a new file in its folder `{}` ({error}): \
         write another file, or, at the risk of a damaged one if that fails, write it in place by \
         passing open(path, \"wb+\") instead of the path",
        .folder.display()
    )]
    Irreplaceable {
        /// The path.
        uri: String,
        /// Where no file can be made, or renamed.
        folder: std::path::PathBuf,
        /// What the operating system said.
        error: io::Error,
    },
    /// The object was closed before.
    #[error("{0}")]
    Closed(String),
    /// The caller interrupted the call.
    #[error("interrupted by the keyboard")]
    Cancelled,
    /// Code that the caller supplied raised this.
    #[error("{0}")]
    Caller(#[source] CallerError),
    /// A defect of this crate.
    #[error("{0}; this is a defect of tensorizer, please report it")]
    Bug(String),
}

impl Error {
    /// Names the file that was being loaded or saved when a device failed.
    pub fn with_file(self, doing: &str, uri: &str) -> Self {
        match self {
            Error::Device { device, what } => {
                Error::Device { device, what: format!("{doing} `{uri}`: {what}") }
            }
            Error::DeviceMemory { what } => {
                Error::DeviceMemory { what: format!("{doing} `{uri}`: {what}") }
            }
            other => other,
        }
    }

    /// Names the server that was asked, unless the message does already.
    #[cfg(feature = "http")]
    pub(crate) fn at_host(self, host: &str) -> Self {
        match self {
            Error::Io { action, uri, error } if !error.to_string().contains(host) => {
                let what = format!("{error} (host {host})");
                Error::Io { action, uri, error: io::Error::new(error.kind(), what) }
            }
            other => other,
        }
    }

    /// What the system refused, with the address.
    pub fn io(action: &'static str, uri: &str, error: io::Error) -> Self {
        Error::Io { action, uri: uri.to_owned(), error }
    }
}

/// Text that a file or a server has chosen, in a message: what a terminal would act on is escaped.
/// Those are control characters, and marks that turn the direction of text or are not seen.
pub struct Shown<'t>(pub &'t str);

impl std::fmt::Display for Shown<'_> {
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

/// Text that may be long, in a message: its beginning, and how long it is.
pub struct Brief<'t>(pub &'t str);

impl std::fmt::Display for Brief<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const MOST: usize = 200;
        match self.0.char_indices().nth(MOST) {
            None => Shown(self.0).fmt(f),
            Some((end, _)) => {
                let (start, _) = self.0.split_at(end);
                write!(f, "{}... ({} bytes)", Shown(start), self.0.len())
            }
        }
    }
}

/// What is wrong with some bytes, before it is known which file they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// Position in the file.
    pub offset: u64,
    /// What is wrong, with expected and found.
    pub what: String,
}

impl Malformed {
    pub(crate) fn new(offset: u64, what: impl Into<String>) -> Self {
        Malformed { offset, what: what.into() }
    }

    /// Names the file.
    pub fn of(self, uri: &str) -> Error {
        Error::Format { uri: uri.to_owned(), offset: self.offset, what: self.what }
    }
}
