//! The limit of the memory that a call may have in flight beside its tensors, and its division
//! among the parts of the call.
//!
//! Pure functions of numbers, except for the limit of the environment.

use crate::environment::MEMORY_LIMIT_MB;
use crate::error::{Error, Result};
use crate::sys::to_usize;

/// Bytes of a connection, apart from those that its server may send ahead: buffers of HTTP and TLS,
/// an event loop, a thread.
pub const CONNECTION: u64 = 1 << 20;
/// Bytes of a part of an upload, as long as the number of parts allows it.
pub const PART_LEN: u64 = 8 << 20;
/// Minimum bytes that a server may send ahead: the initial window of HTTP/2.
const MIN_WINDOW: u64 = 64 << 10;
/// The divisor of a limit that gives the bytes that a server may send ahead on a connection. With
/// less it waits for acknowledgements; with more there is memory for too few connections.
const WINDOW_DIVISOR: u64 = 8;
/// Minimum bytes of a reader for headers of tensors, and for unwanted bytes that it reads between
/// them.
const MIN_OVERHEAD: u64 = 256 << 10;
/// The share of a limit that staging buffers, parts of uploads or tensors may take where readers or
/// writers need memory too: three quarters.
const SHARE: (u64, u64) = (3, 4);
/// Maximum bytes that a thread of a save copies at once: two pieces of encryption and a margin.
const MAX_COPY: u64 = 6 << 20;
/// Minimum bytes for copies that wait for their hash.
const MIN_UNHASHED: u64 = 2 << 20;
/// Bytes to reserve for reads, at most half of the limit. Tensors get more than the largest one
/// needs only beyond these bytes.
const READ_RESERVE: u64 = 16 << 20;

/// The limit of the memory that a call may have in flight beside its tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes; None if the caller sets no limit.
    bytes: Option<u64>,
    /// Bytes of the original limit that are reserved for other uses, and are not part of `bytes`.
    reserved: u64,
}

/// The memory that a load needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadNeeds {
    /// Maximum number of readers.
    pub readers: usize,
    /// Bytes of each reader, without headers and unwanted bytes, which only pass through it.
    pub reader_bytes: u64,
    /// Minimum bytes that each reader holds to gather parts from; 0 if it does not gather.
    pub gather_bytes: u64,
    /// Bytes of a staging buffer, and the minimum and maximum number of these; None without a
    /// device.
    pub staging: Option<(u64, u64, u64)>,
}

impl LoadNeeds {
    /// The minimum memory with which one reader can load.
    pub fn minimum(&self) -> u64 {
        let (buffer, min_buffers, _) = self.staging.unwrap_or((0, 0, 0));
        self.per_reader().saturating_add(min_buffers.saturating_mul(buffer))
    }

    fn per_reader(&self) -> u64 {
        self.reader_bytes.saturating_add(MIN_OVERHEAD).saturating_add(self.gather_bytes)
    }

    /// The same for a server that sends ahead as much as the limit allows: at most two windows,
    /// together a quarter of the limit.
    pub fn minimum_with_read_ahead(&self) -> u64 {
        let minimum = self.minimum();
        minimum.saturating_add((minimum / 3 + 1).max(2 * MIN_WINDOW))
    }
}

/// The memory that a load may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadShares {
    /// Maximum number of readers.
    pub readers: usize,
    /// Maximum bytes of a batch that are headers or unwanted.
    pub overhead: u64,
    /// Maximum bytes of a batch to gather parts from.
    pub gather_bytes: u64,
    /// Number of staging buffers.
    pub staging: u64,
}

/// The memory that a save needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct SaveNeeds {
    /// Maximum number of threads.
    pub threads: usize,
    /// Bytes of each thread apart from copies: a connection, tensors that are brought one by one.
    pub thread_bytes: u64,
    /// Number of copies that each thread has of the bytes it writes: one if they are hashed, and
    /// another if they are encrypted.
    pub copies: u64,
    /// True if copies wait for hashes.
    pub hashes: bool,
    /// Bytes that are retained until the end.
    pub retained: u64,
    /// Bytes of a part that is retained until it is sent; 0 without parts.
    pub part: u64,
    /// Bytes of a staging buffer, and the maximum number of these; None without a device.
    pub staging: Option<(u64, u64)>,
}

impl SaveNeeds {
    /// The memory that a save of tensors in host memory needs, with hashes.
    pub fn of_host(uploads: bool, encrypted: bool) -> Self {
        let (retained, part) = if uploads { (PART_LEN, PART_LEN) } else { (0, 0) };
        let thread_bytes = if uploads { CONNECTION } else { 0 };
        let copies = 1 + u64::from(encrypted);
        SaveNeeds { threads: 1, thread_bytes, copies, hashes: true, retained, part, staging: None }
    }

    /// The minimum memory with which one thread can save.
    pub fn minimum(&self) -> u64 {
        let buffer = self.staging.map_or(0, |(buffer, _)| buffer);
        let all = [self.per_thread(), self.retained, self.part.saturating_mul(2), buffer];
        all.into_iter().fold(self.waiting(), u64::saturating_add)
    }

    fn per_thread(&self) -> u64 {
        self.thread_bytes.saturating_add(self.copies.saturating_mul(MAX_COPY))
    }

    fn waiting(&self) -> u64 {
        if self.hashes { MIN_UNHASHED } else { 0 }
    }
}

/// The memory that a save may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveShares {
    /// Maximum number of threads.
    pub threads: usize,
    /// Bytes waiting for their hash beyond which threads hash before they write more; None for the
    /// default.
    pub waiting: Option<u64>,
    /// Maximum number of parts that are not sent yet.
    pub parts: usize,
    /// Number of staging buffers.
    pub staging: u64,
}

impl MemoryLimit {
    /// Creates a limit; None for that of the environment.
    pub fn of(bytes: Option<u64>) -> Self {
        MemoryLimit { bytes, reserved: 0 }
    }

    /// Returns this limit, or that of the environment if the caller sets none.
    pub fn or_environment(self) -> Result<Self> {
        let of_all = || -> Result<Option<u64>> {
            let all = Some(MEMORY_LIMIT_MB.value()?.saturating_mul(1 << 20)).filter(|&all| all > 0);
            Ok(all.map(|all| all.saturating_sub(self.reserved)))
        };
        let bytes = self.bytes.map_or_else(of_all, |bytes| Ok(Some(bytes)))?;
        Ok(MemoryLimit { bytes, ..self })
    }

    /// Returns the limit without `reserved` bytes, which are for other uses.
    pub fn reserving(self, reserved: u64) -> Self {
        let bytes = self.bytes.map(|bytes| bytes.saturating_sub(reserved));
        MemoryLimit { bytes, reserved: self.reserved.saturating_add(reserved) }
    }

    /// Bytes of the limit that are reserved for other uses.
    pub fn reserved(self) -> u64 {
        self.reserved
    }

    /// Bytes; None if there is no limit.
    pub fn bytes(self) -> Option<u64> {
        self.bytes
    }

    /// Bytes that a server may send ahead on a connection, at most `most`.
    pub fn window(self, most: u64) -> u64 {
        self.bytes.map_or(most, |bytes| (bytes / WINDOW_DIVISOR).clamp(MIN_WINDOW.min(most), most))
    }

    /// Bytes of items that are held in host memory at once: `wanted`, or less if the limit is
    /// lower. It must allow `largest`, the bytes of the largest item.
    pub fn held(self, wanted: u64, largest: u64) -> Result<u64> {
        let Some(bytes) = self.bytes else { return Ok(wanted) };
        self.require(largest, || format!("a tensor of {largest} bytes is held as a whole"))?;
        Ok(wanted.min(bytes).max(largest))
    }

    fn require(self, minimum: u64, why: impl Fn() -> String) -> Result<()> {
        match self.bytes {
            Some(bytes) if bytes < minimum => Err(Error::InvalidArgument(format!(
                "a memory limit of {} bytes is too small: at least {} are needed, as {}",
                bytes.saturating_add(self.reserved),
                minimum.saturating_add(self.reserved),
                why()
            ))),
            _ => Ok(()),
        }
    }

    /// Divides the limit among the readers of a load.
    pub fn load(self, needs: &LoadNeeds) -> Result<LoadShares> {
        let LoadNeeds { readers, gather_bytes, staging, .. } = *needs;
        let (buffer, min_buffers, most) = staging.unwrap_or((0, 0, 0));
        let Some(bytes) = self.bytes else {
            let (overhead, gather_bytes) = (u64::MAX, u64::MAX);
            return Ok(LoadShares { readers, overhead, gather_bytes, staging: most });
        };
        let (each, minimum) = (needs.per_reader(), needs.minimum());
        self.require(minimum, || {
            let staged = format!(", and {min_buffers} staging buffers of {buffer} bytes each");
            let staged = if staging.is_some() { staged } else { String::new() };
            format!("one reader needs {each} bytes{staged}")
        })?;
        // Staging buffers leave enough for one reader.
        let staging = share(bytes).min(bytes - each).checked_div(buffer);
        let staging = staging.map_or(0, |fit| fit.clamp(min_buffers, most.max(min_buffers)));
        let remaining = bytes - staging.saturating_mul(buffer);
        let readers = readers.clamp(1, to_usize(remaining / each.max(1)).max(1));
        let more = remaining / readers as u64 - each;
        let (overhead, gather_bytes) = if gather_bytes > 0 {
            (MIN_OVERHEAD, gather_bytes + more)
        } else {
            (MIN_OVERHEAD + more, 0)
        };
        Ok(LoadShares { readers, overhead, gather_bytes, staging })
    }

    /// Divides the limit among the threads of a save.
    pub fn save(self, needs: &SaveNeeds) -> Result<SaveShares> {
        let SaveNeeds { threads, hashes, retained, part, staging, .. } = *needs;
        let (buffer, most) = staging.unwrap_or((0, 0));
        let Some(bytes) = self.bytes else {
            return Ok(SaveShares { threads, waiting: None, parts: usize::MAX, staging: most });
        };
        let (waiting, each) = (needs.waiting(), needs.per_thread());
        // Two parts: one that is being filled, and one that waits for the header of its tensor.
        let with_parts = each.saturating_add(part.saturating_mul(2));
        self.require(needs.minimum(), || {
            let parts = format!(
                ", two parts of the upload {part} each and the beginning of the file {retained}"
            );
            let parts = if part > 0 { parts } else { String::new() };
            let staged = format!(", a staging buffer {buffer}");
            let staged = if buffer > 0 { staged } else { String::new() };
            format!("one thread needs {each} bytes, the hashes {waiting}{parts}{staged}")
        })?;
        let free = bytes - retained - waiting;
        let for_staging = if part > 0 { free - share(free) } else { share(free) };
        let staging = for_staging.min(free - with_parts).checked_div(buffer);
        let staging = staging.map_or(0, |fit| fit.clamp(1, most.max(1)));
        let free = free - staging * buffer;
        let threads = threads.clamp(1, to_usize(free / with_parts.max(1)).max(1));
        let parts = (free - each * threads as u64).checked_div(part).map_or(0, to_usize);
        Ok(SaveShares { threads, waiting: hashes.then_some(waiting), parts, staging })
    }

    /// Divides the limit between tensors that are held for the caller and reading. `largest`: bytes
    /// of the largest tensor. `reader`: minimum bytes for reading. Returns the bytes for tensors,
    /// and the limit for reading.
    pub fn tensors(self, wanted: u64, largest: u64, reader: u64) -> Result<(u64, MemoryLimit)> {
        let Some(bytes) = self.bytes else { return Ok((wanted, self)) };
        let reads = READ_RESERVE.min(bytes / 2).max(bytes - share(bytes));
        self.require(largest.saturating_add(reader), || {
            format!("a tensor of {largest} bytes is held, and a reader needs {reader}")
        })?;
        let tensors = wanted.min(bytes - reads).min(bytes - reader).max(largest);
        Ok((tensors, self.reserving(tensors)))
    }
}

fn share(bytes: u64) -> u64 {
    bytes / SHARE.1 * SHARE.0
}

#[cfg(test)]
mod tests;
