//! The one code path of data into a file: they are hashed, encrypted and written, and their headers
//! finished.

use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::chunk::{Backlog, Chunk, Waiting};
use super::item::Item;
use crate::cancel::Cancel;
use crate::codec::crypt::Manifest;
use crate::codec::encrypt::Seal;
use crate::codec::hash::{Digests, digest_all, sha256};
use crate::codec::{HashPool, Taken};
use crate::engine::plan::PLAN;
use crate::engine::workers::Control;
use crate::error::{Error, Result};
use crate::fallible::{collected, listed, push};
use crate::format::tensors::header::{Draft, Hashes};
use crate::io::{WriteAt, write_all_at};
use crate::stats::{Counters, Stage};

/// State that the threads of one save share.
pub struct Pass<'p> {
    pub sink: &'p dyn WriteAt,
    pub items: &'p [Item<'p>],
    /// The encryption of each tensor, if there is one.
    pub seals: Vec<Option<Seal<'p>>>,
    pub manifest: Option<Manifest>,
    /// True if digests of headers are needed even without a manifest.
    pub named: bool,
    /// The hashes that headers store; None without headers.
    pub hashes: Option<Hashes>,
    /// The hashes of large tensors.
    pub pool: HashPool<Waiting<'p>>,
    pub backlog: &'p Backlog,
    /// True if the sink keeps written bytes until they are sent. Copies are then hashed and
    /// released before a thread waits for a server, so that bytes are not held twice.
    pub sends: bool,
    /// A digest of each header, for the manifest or the file's identity.
    pub digests: Mutex<Vec<[u8; 32]>>,
    /// Grows by the data written.
    pub progress: &'p AtomicU64,
    pub counters: Counters,
}

/// Adjacent bytes to be written together.
struct Run<'a> {
    offset: u64,
    end: u64,
    buffers: Vec<IoSlice<'a>>,
}

impl<'p> Pass<'p> {
    pub fn item(&self, tensor: usize) -> Result<&'p Item<'p>> {
        self.items.get(tensor).ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    /// True if SHA-256 is among the hashes.
    pub fn has_sha(&self) -> bool {
        self.hashes == Some(Hashes::All)
    }

    /// Writes chunks that are adjacent in the file.
    ///
    /// A small tensor comes as one chunk: it is hashed first, and its header is written with it.
    /// The chunks of a large tensor may come in any order; its header is written when the pool has
    /// hashed all of them. Complete parts are sent later, by [`Pass::settle`].
    pub fn put(&self, chunks: Vec<Chunk<'p>>, control: &Control<'_>) -> Result<()> {
        let sealed = collected(chunks.iter().map(|chunk| self.sealed(chunk)), PLAN)?;
        let plain = self.hashes.is_none();
        let headers = if plain { Vec::new() } else { self.headers_of_small(&chunks)? };
        let mut headers = headers.iter();
        let mut runs: Vec<Run<'_>> = Vec::new();
        for (chunk, sealed) in chunks.iter().zip(&sealed) {
            let item = self.item(chunk.tensor)?;
            if !plain && !item.is_large() {
                let header = headers.next().ok_or_else(|| Error::Bug("no header".to_owned()))?;
                append(&mut runs, item.entry.header_offset, header)?;
            }
            let bytes = sealed.as_deref().unwrap_or(chunk.bytes.as_ref());
            append(&mut runs, item.entry.data_offset + chunk.start, bytes)?;
        }
        for run in &mut runs {
            self.write(run.offset, &mut run.buffers, control)?;
        }
        let len: u64 = chunks.iter().map(|chunk| chunk.bytes.as_ref().len() as u64).sum();
        self.progress.fetch_add(len, Ordering::Relaxed);
        if plain {
            return Ok(());
        }
        self.counters.time(Stage::Hash, || -> Result<()> {
            for Chunk { tensor, start, bytes } in chunks {
                if self.item(tensor)?.is_large() {
                    if start == 0 {
                        self.pool.header(tensor, &self.draft(tensor)?.bytes);
                    }
                    self.pool.data(tensor, start, self.backlog.add(bytes));
                }
            }
            Ok(())
        })?;
        if self.sends { self.hash_all_ready(control) } else { Ok(()) }
    }

    /// Hashes some of the written bytes, and writes the headers of tensors whose hashes are then
    /// complete. False if there is nothing to hash, or too little while `more_to_write` returns
    /// true.
    pub fn hash(&self, more_to_write: &dyn Fn() -> bool, control: &Control<'_>) -> Result<bool> {
        let taken = self.pool.take(more_to_write, || control.stopped());
        let found = self.hash_taken(taken, control)?;
        if found {
            self.settle(control)?;
        }
        Ok(found)
    }

    /// Hashes all bytes that can be hashed without waiting. A thread calls this before it waits for
    /// memory that the backlog may hold. Bytes that another thread is hashing are released by that
    /// thread.
    pub fn hash_all_ready(&self, control: &Control<'_>) -> Result<()> {
        while self.hash_taken(self.pool.take_ready(), control)? {
            control.check()?;
        }
        Ok(())
    }

    /// Hashes until the backlog is below its limit, so that it does not grow.
    pub fn hash_backlog(&self, control: &Control<'_>) -> Result<()> {
        while self.hash(&|| !self.backlog.is_enough(), control)? {
            control.check()?;
        }
        Ok(())
    }

    fn hash_taken(&self, taken: Option<Taken<Waiting<'p>>>, control: &Control<'_>) -> Result<bool> {
        let Some(taken) = taken else { return Ok(false) };
        let mut complete = Vec::new();
        self.counters.time(Stage::Hash, || {
            self.pool.hash(taken, |tensor, digests| complete.push((tensor, digests)));
        });
        for (tensor, digests) in complete {
            let header = self.finish(tensor, self.draft(tensor)?, &digests)?;
            let offset = self.item(tensor)?.entry.header_offset;
            self.write(offset, &mut [IoSlice::new(&header)], control)?;
        }
        Ok(true)
    }

    /// Returns the finished headers of the small tensors, in order. Their data must be encrypted
    /// already.
    fn headers_of_small(&self, chunks: &[Chunk<'p>]) -> Result<Vec<Vec<u8>>> {
        let mut drafts = Vec::new();
        for chunk in chunks {
            if !self.item(chunk.tensor)?.is_large() {
                push(&mut drafts, (chunk, self.draft(chunk.tensor)?), PLAN)?;
            }
        }
        let inputs =
            drafts.iter().map(|(chunk, draft)| (draft.bytes.as_slice(), chunk.bytes.as_ref()));
        let inputs = listed(inputs, PLAN)?;
        let digests = self.counters.time(Stage::Hash, || digest_all(&inputs, self.has_sha()))?;
        let drafts = drafts.into_iter().zip(digests);
        let finish = |((chunk, draft), digests): ((&Chunk<'p>, _), _)| {
            self.finish(chunk.tensor, draft, &digests)
        };
        collected(drafts.map(finish), PLAN)
    }

    fn seal(&self, tensor: usize) -> Result<Option<&Seal<'p>>> {
        let seal = self.seals.get(tensor);
        Ok(seal.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?.as_ref())
    }

    /// Returns the encrypted bytes of a chunk, if the file is encrypted.
    fn sealed(&self, chunk: &Chunk<'_>) -> Result<Option<Vec<u8>>> {
        let bytes = chunk.bytes.as_ref();
        let seal =
            |seal: &Seal<'_>| self.counters.time(Stage::Decrypt, || seal.seal(chunk.start, bytes));
        self.seal(chunk.tensor)?.filter(|_| !bytes.is_empty()).map(seal).transpose()
    }

    fn draft(&self, tensor: usize) -> Result<Draft> {
        let item = self.item(tensor)?;
        let crypt_len = self.seal(tensor)?.map_or(0, Seal::encoded_len);
        let hashes =
            self.hashes.ok_or_else(|| Error::Bug("a header of a plain file".to_owned()))?;
        Draft::new(item.entry, item.module_index, hashes, crypt_len)
    }

    /// Returns the complete header of a tensor, whose data must be encrypted already.
    fn finish(&self, tensor: usize, draft: Draft, digests: &Digests) -> Result<Vec<u8>> {
        let crypt = self.seal(tensor)?.map(Seal::encode).transpose()?.unwrap_or(Vec::new());
        let header = draft.finish(digests.crc, &digests.sha, &crypt);
        let digest = match &self.manifest {
            Some(manifest) => Some(manifest.digest(&header).into()),
            None => self.named.then(|| sha256(&header)),
        };
        if let Some(digest) = digest {
            let mut all = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(slot) = all.get_mut(tensor) {
                *slot = digest;
            }
        }
        Ok(header)
    }

    fn write(&self, offset: u64, buffers: &mut [IoSlice<'_>], control: &Control<'_>) -> Result<()> {
        self.counters.time(Stage::Write, || write_all_at(self.sink, offset, buffers, control))
    }

    /// Lets the sink send its complete parts.
    pub fn settle(&self, control: &Control<'_>) -> Result<()> {
        self.counters.time(Stage::Write, || self.sink.finish_deferred_writes(control))
    }
}

fn append<'a>(runs: &mut Vec<Run<'a>>, offset: u64, bytes: &'a [u8]) -> Result<()> {
    let end = offset + bytes.len() as u64;
    match runs.last_mut().filter(|run| run.end == offset) {
        Some(run) => {
            push(&mut run.buffers, IoSlice::new(bytes), PLAN)?;
            run.end = end;
        }
        None => push(runs, Run { offset, end, buffers: vec![IoSlice::new(bytes)] }, PLAN)?,
    }
    Ok(())
}
