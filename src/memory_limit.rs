//! How much memory a call may have in flight beside its tensors, and how the parts of the call share it.
//!
//! Pure functions of numbers, but for what the environment says.

use crate::environment::MEMORY_MB;
use crate::error::{Error, Result};

/// What a connection takes beside what its server may send ahead: buffers of HTTP and TLS, an event
/// loop, a thread.
pub const CONNECTION: u64 = 1 << 20;
/// Bytes of a part of an upload, while there may be more.
pub const PART_LEN: u64 = 8 << 20;
/// The least that a server may send ahead: what HTTP/2 begins with.
const SHORTEST_WINDOW: u64 = 64 << 10;
/// Of a limit, what a server may send ahead on each connection: with less, it waits for answers; with
/// more, there are too few connections.
const WINDOWS: u64 = 8;
/// For headers of tensors, and for what is read over between them: the least for a reader.
const PASSING: u64 = 256 << 10;
/// Of a limit, what staging buffers, parts of uploads or tensors may take where readers or writers need
/// some too: three quarters.
const SHARE: (u64, u64) = (3, 4);
/// Bytes that a thread of a save copies at once, at most: two pieces of encryption, with what is beside
/// them.
const COPIED: u64 = 6 << 20;
/// Copies that wait for their hash, at least.
const WAITING: u64 = 2 << 20;
/// The most tensors of which more than one is held at a time, and how much of a limit is for what
/// reads them.
const READS: u64 = 16 << 20;
/// A batch that a member of a group fetches, at least.
const BATCH: u64 = 1 << 20;

/// How much memory a call may have in flight beside its tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryLimit {
    /// None where the caller sets no limit.
    bytes: Option<u64>,
    /// What the caller of this call keeps of its own limit for something else.
    beside: u64,
}

/// What a load would take.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadNeeds {
    /// Readers at most.
    pub readers: usize,
    /// What each takes, beside what passes it.
    pub reader: u64,
    /// The least that each has in memory to gather from; 0 where it does not.
    pub gathers: u64,
    /// Bytes of a staging buffer, at least and at most how many of them; None without a device.
    pub staging: Option<(u64, u64, u64)>,
}

impl LoadNeeds {
    /// The least with which one reader goes on.
    pub fn least(&self) -> u64 {
        let (buffer, fewest, _) = self.staging.unwrap_or((0, 0, 0));
        self.each().saturating_add(fewest.saturating_mul(buffer))
    }

    fn each(&self) -> u64 {
        self.reader.saturating_add(PASSING).saturating_add(self.gathers)
    }

    /// The same, where a server sends ahead as much as the limit allows: that is no more than two
    /// windows, a quarter of the limit.
    pub fn least_ahead(&self) -> u64 {
        let least = self.least();
        least.saturating_add((least / 3 + 1).max(2 * SHORTEST_WINDOW))
    }
}

/// What a load may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadShares {
    /// Readers at most.
    pub readers: usize,
    /// Bytes of a batch that are headers, or that nobody wants.
    pub passing: u64,
    /// Bytes of a batch to gather from.
    pub gathers: u64,
    /// Staging buffers.
    pub staging: u64,
}

/// What a save would take.
#[derive(Debug, Clone, Copy, Default)]
pub struct SaveNeeds {
    /// Threads at most.
    pub threads: usize,
    /// What each takes beside copies: connections, tensors that are brought one by one.
    pub thread: u64,
    /// Copies of what it writes that each has: one, and another that is encrypted.
    pub copies: u64,
    /// Whether copies wait for hashes.
    pub hashes: bool,
    /// Bytes that are kept until the end.
    pub kept: u64,
    /// Bytes of a part that is kept until it is sent; 0 for none.
    pub part: u64,
    /// Bytes of a staging buffer, and how many there are at most; None without a device.
    pub staging: Option<(u64, u64)>,
}

impl SaveNeeds {
    /// Of tensors in host memory, which are hashed.
    pub fn of_host(uploads: bool, encrypted: bool) -> Self {
        let (kept, part) = if uploads { (PART_LEN, PART_LEN) } else { (0, 0) };
        let thread = if uploads { CONNECTION } else { 0 };
        let copies = 1 + u64::from(encrypted);
        SaveNeeds { threads: 1, thread, copies, hashes: true, kept, part, staging: None }
    }

    /// The least with which one thread goes on.
    pub fn least(&self) -> u64 {
        let buffer = self.staging.map_or(0, |(buffer, _)| buffer);
        let all = [self.each(), self.kept, self.part.saturating_mul(2), buffer];
        all.into_iter().fold(self.waiting(), u64::saturating_add)
    }

    fn each(&self) -> u64 {
        self.thread.saturating_add(self.copies.saturating_mul(COPIED))
    }

    fn waiting(&self) -> u64 {
        if self.hashes { WAITING } else { 0 }
    }
}

/// What a save may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveShares {
    /// Threads at most.
    pub threads: usize,
    /// Bytes that wait for their hash, beyond which threads hash before they write more; None for as
    /// many as suit.
    pub waiting: Option<u64>,
    /// Bytes of parts that are not sent yet.
    pub parts: u64,
    /// Staging buffers.
    pub staging: u64,
}

/// What each member of a group may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShares {
    /// Bytes of a batch.
    pub batch: u64,
    /// Batches that are fetched at once.
    pub at_once: u64,
    /// For each of them.
    pub load: MemoryLimit,
}

impl MemoryLimit {
    /// So many bytes; None for what the environment says.
    pub fn of(bytes: Option<u64>) -> Self {
        MemoryLimit { bytes, beside: 0 }
    }

    /// The same, with what the environment says where the caller says nothing.
    pub fn known(self) -> Result<Self> {
        let of_all = || -> Result<Option<u64>> {
            let all = Some(MEMORY_MB.value()?.saturating_mul(1 << 20)).filter(|&all| all > 0);
            Ok(all.map(|all| all.saturating_sub(self.beside)))
        };
        let bytes = self.bytes.map_or_else(of_all, |bytes| Ok(Some(bytes)))?;
        Ok(MemoryLimit { bytes, ..self })
    }

    /// What is left where so much of it is kept for something else.
    pub fn without(self, beside: u64) -> Self {
        let bytes = self.bytes.map(|bytes| bytes.saturating_sub(beside));
        MemoryLimit { bytes, beside: self.beside.saturating_add(beside) }
    }

    /// What of it is kept for something else.
    pub fn beside(self) -> u64 {
        self.beside
    }

    /// Bytes; None where there is no limit.
    pub fn bytes(self) -> Option<u64> {
        self.bytes
    }

    /// What a server may send ahead on a connection.
    pub fn window(self, most: u64) -> u64 {
        self.bytes.map_or(most, |bytes| (bytes / WINDOWS).clamp(SHORTEST_WINDOW.min(most), most))
    }

    /// Bytes that are held in host memory at once, of things of which the largest has so many.
    pub fn held(self, wanted: u64, largest: u64) -> Result<u64> {
        let Some(bytes) = self.bytes else { return Ok(wanted) };
        self.needs(largest, || format!("a tensor of {largest} bytes is held as a whole"))?;
        Ok(wanted.min(bytes).max(largest))
    }

    fn needs(self, least: u64, why: impl Fn() -> String) -> Result<()> {
        match self.bytes {
            Some(bytes) if bytes < least => Err(Error::InvalidArgument(format!(
                "a memory limit of {} bytes is too small: at least {} are needed, as {}",
                bytes.saturating_add(self.beside),
                least.saturating_add(self.beside),
                why()
            ))),
            _ => Ok(()),
        }
    }

    /// How the readers of a load share it.
    pub fn load(self, needs: &LoadNeeds) -> Result<LoadShares> {
        let LoadNeeds { readers, gathers, staging, .. } = *needs;
        let (buffer, fewest, most) = staging.unwrap_or((0, 0, 0));
        let Some(bytes) = self.bytes else {
            return Ok(LoadShares { readers, passing: u64::MAX, gathers: u64::MAX, staging: most });
        };
        let (each, least) = (needs.each(), needs.least());
        self.needs(least, || {
            let staged = format!(", and {fewest} staging buffers of {buffer}");
            let staged = if staging.is_some() { staged } else { String::new() };
            format!("one reader takes {each} bytes{staged}")
        })?;
        // What is left for one reader bounds the buffers too.
        let staging = match buffer {
            0 => 0,
            _ => (share(bytes).min(bytes - each) / buffer).clamp(fewest, most.max(fewest)),
        };
        let left = bytes - staging.saturating_mul(buffer);
        let fitting = usize::try_from(left / each.max(1)).unwrap_or(usize::MAX);
        let readers = readers.clamp(1, fitting.max(1));
        let more = left / readers as u64 - each;
        let (passing, gathers) =
            if gathers > 0 { (PASSING, gathers + more) } else { (PASSING + more, 0) };
        Ok(LoadShares { readers, passing, gathers, staging })
    }

    /// How the threads of a save share it.
    pub fn save(self, needs: &SaveNeeds) -> Result<SaveShares> {
        let SaveNeeds { threads, hashes, kept, part, staging, .. } = *needs;
        let (buffer, most) = staging.unwrap_or((0, 0));
        let Some(bytes) = self.bytes else {
            return Ok(SaveShares { threads, waiting: None, parts: u64::MAX, staging: most });
        };
        let (waiting, each) = (needs.waiting(), needs.each());
        // A part that is filled, and one that waits for the header of its tensor.
        let (parts, fewest) = (part.saturating_mul(2), u64::from(buffer > 0));
        let (fixed, least) = (kept.saturating_add(waiting), needs.least());
        self.needs(least, || {
            let parts = format!(", two parts of {part} and the first {kept} of the file");
            let parts = if part > 0 { parts } else { String::new() };
            let staged = format!(", a staging buffer {buffer}");
            let staged = if buffer > 0 { staged } else { String::new() };
            format!("one thread takes {each} bytes, hashes {waiting}{parts}{staged}")
        })?;
        let free = bytes - fixed - each;
        let of_parts = share(free).max(parts).min(free - fewest * buffer);
        let for_parts = if part > 0 { of_parts } else { 0 };
        let left = free - for_parts;
        let staging = match buffer {
            0 => 0,
            _ => (share(left) / buffer).clamp(fewest, most.max(fewest)),
        };
        let left = left.saturating_sub(staging.saturating_mul(buffer));
        let more = usize::try_from(left / each.max(1)).unwrap_or(usize::MAX);
        // Each thread writes to a part of its own, and as many are on their way.
        let fitting = for_parts
            .checked_div(parts)
            .map_or(usize::MAX, |pairs| usize::try_from(pairs).unwrap_or(usize::MAX).max(1));
        let threads = threads.clamp(1, more.saturating_add(1).min(fitting));
        Ok(SaveShares { threads, waiting: hashes.then_some(waiting), parts: for_parts, staging })
    }

    /// How tensors that are held for the caller, of which the largest has so many bytes, share it with
    /// what reads them, which takes `reader` at least: bytes of tensors, and the limit of the rest.
    pub fn tensors(self, wanted: u64, largest: u64, reader: u64) -> Result<(u64, MemoryLimit)> {
        let Some(bytes) = self.bytes else { return Ok((wanted, self)) };
        let reads = READS.min(bytes / 2).max(bytes - share(bytes));
        self.needs(largest.saturating_add(reader), || {
            format!("a tensor of {largest} bytes is held, and a reader takes {reader}")
        })?;
        let tensors = wanted.min(bytes - reads).min(bytes - reader).max(largest);
        Ok((tensors, self.without(tensors)))
    }

    /// How batches that a member of a group fetches for all share it with what reads them. Of `most`
    /// bytes each; `reads` at once, and `others` that are sent or wait. `whole`: bytes of a batch that
    /// cannot be shorter. What reads one takes `reader` at least.
    pub fn group(
        self,
        most: u64,
        reads: u64,
        others: u64,
        whole: u64,
        reader: u64,
    ) -> Result<GroupShares> {
        let Some(bytes) = self.bytes else {
            return Ok(GroupShares { batch: most, at_once: reads, load: self });
        };
        let batches = reads.saturating_add(others);
        let least = BATCH.max(whole);
        // What reads has a quarter, and one reads at a time where that is little.
        let quarter = bytes - share(bytes);
        // Each of those that read has a batch and a reader.
        let beside = bytes.saturating_sub(least.saturating_mul(others));
        let fitting = beside / least.saturating_add(reader).max(1);
        let at_once = (quarter / READS.max(reader)).min(fitting).clamp(1, reads.max(1));
        let fewest = least.saturating_mul(at_once.saturating_add(others));
        let readers = reader.saturating_mul(at_once);
        self.needs(fewest.saturating_add(readers), || {
            let count = at_once + others;
            format!(
                "{count} batches of {least} bytes are on their way, and a reader takes {reader}"
            )
        })?;
        let batch = (share(bytes) / batches.max(1)).clamp(least, most.max(least));
        let held = batch.saturating_mul(at_once.saturating_add(others));
        let held = held.min(bytes - readers).max(fewest);
        let batch = held / (at_once.saturating_add(others)).max(1);
        let each = (bytes - held) / at_once;
        Ok(GroupShares { batch, at_once, load: self.without(bytes - each) })
    }
}

fn share(bytes: u64) -> u64 {
    bytes / SHARE.1 * SHARE.0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
