//! Stamps, which tell files and their content apart.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Identifies a file and its content at one moment. Another file, and other content, have another
/// stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    len: u64,
    /// The time of the last change of content or metadata, which cannot be set by hand.
    changed: (i64, i64),
}

impl FileStamp {
    /// The stamp of a file with this metadata.
    pub fn of(found: &Metadata) -> Self {
        let changed = (found.ctime(), found.ctime_nsec());
        FileStamp { device: found.dev(), inode: found.ino(), len: found.len(), changed }
    }

    /// The number of its file system.
    pub fn device(&self) -> u64 {
        self.device
    }
}

impl fmt::Display for FileStamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FileStamp { device, inode, len, changed: (seconds, nanoseconds) } = self;
        write!(
            f,
            "{len} bytes of inode {inode} on device {device}, changed at {seconds}.{nanoseconds:09}"
        )
    }
}

/// The stamp of the file that a path names; None if there is none.
pub fn file_stamp(path: &Path) -> Option<FileStamp> {
    Some(FileStamp::of(&std::fs::metadata(path).ok()?))
}
