//! The one code path of data into a file: they are hashed, encrypted and written, and their headers
//! finished.

use std::io::IoSlice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::chunk::{HashBacklog, TensorChunk, UnhashedBytes};
use super::write_tensor::WriteTensor;
use crate::cancel::Cancel;
use crate::codec::crypt::Manifest;
use crate::codec::encrypt::Encryptor;
use crate::codec::hash::{Digests, digest_all, sha256};
use crate::codec::{HashBatch, HashPool};
use crate::engine::workers::Control;
use crate::error::{Error, Result};
use crate::fallible::collect_all;
use crate::format::tensors::header::{Hashes, HeaderDraft};
use crate::io::{WriteAt, write_all_at};
use crate::stats::{Counters, Stage};
use crate::sys::sync::unpoisoned;

/// State that the threads of one save share.
pub struct SaveTask<'p> {
    pub sink: &'p dyn WriteAt,
    pub items: &'p [WriteTensor<'p>],
    /// The encryption of each tensor, if there is one.
    pub encryptors: Vec<Option<Encryptor<'p>>>,
    pub manifest: Option<Manifest>,
    /// True if digests of headers are needed even without a manifest.
    pub needs_digests: bool,
    /// The hashes that headers store; None without headers.
    pub hashes: Option<Hashes>,
    /// Maximum data of a small tensor, which is one chunk: it is hashed at once and written with its
    /// header. Those of a large one are hashed chunk by chunk, and its header is written after them.
    pub max_small: u64,
    /// The hashes of large tensors.
    pub hash_pool: HashPool<UnhashedBytes<'p>>,
    pub backlog: &'p HashBacklog,
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
struct WriteRun<'a> {
    offset: u64,
    end: u64,
    buffers: Vec<IoSlice<'a>>,
}

impl<'p> SaveTask<'p> {
    pub fn item(&self, tensor: usize) -> Result<&'p WriteTensor<'p>> {
        self.items.get(tensor).ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))
    }

    fn is_large(&self, item: &WriteTensor<'_>) -> bool {
        item.entry.data_len > self.max_small
    }

    /// Writes chunks that are adjacent in the file.
    ///
    /// A small tensor comes as one chunk: it is hashed first, and its header is written with it.
    /// The chunks of a large tensor may come in any order; its header is written when the pool has
    /// hashed all of them. Complete parts are sent later, by [`SaveTask::send_complete_parts`].
    pub fn write_chunks(&self, chunks: Vec<TensorChunk<'p>>, control: &Control<'_>) -> Result<()> {
        let encrypted =
            chunks.iter().map(|chunk| self.encrypted(chunk)).collect::<Result<Vec<_>>>()?;
        let plain = self.hashes.is_none();
        let headers = if plain { Vec::new() } else { self.headers_of_small(&chunks)? };
        let mut headers = headers.iter();
        let mut writes: Vec<WriteRun<'_>> = Vec::new();
        for (chunk, encrypted) in chunks.iter().zip(&encrypted) {
            let item = self.item(chunk.tensor)?;
            if !plain && !self.is_large(item) {
                let header = headers.next().ok_or_else(|| Error::Bug("no header".to_owned()))?;
                append(&mut writes, item.entry.header_offset, header);
            }
            let bytes = encrypted.as_deref().unwrap_or(chunk.bytes.as_ref());
            append(&mut writes, item.entry.data_offset + chunk.start, bytes);
        }
        for write in &mut writes {
            self.write(write.offset, &mut write.buffers, control)?;
        }
        let len: u64 = chunks.iter().map(|chunk| chunk.bytes.as_ref().len() as u64).sum();
        self.progress.fetch_add(len, Ordering::Relaxed);
        if plain {
            return Ok(());
        }
        self.counters.time(Stage::Hash, || -> Result<()> {
            for TensorChunk { tensor, start, bytes } in chunks {
                if self.is_large(self.item(tensor)?) {
                    if start == 0 {
                        self.hash_pool.header(tensor, &self.draft(tensor)?.bytes);
                    }
                    self.hash_pool.data(tensor, start, self.backlog.add(bytes));
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
        let batch = self.hash_pool.take(more_to_write, || control.stopped());
        let found = self.hash_batch(batch, control)?;
        if found {
            self.send_complete_parts(control)?;
        }
        Ok(found)
    }

    /// Hashes all bytes that can be hashed without waiting. A thread calls this before it waits for
    /// memory that the backlog may hold. Bytes that another thread is hashing are released by that
    /// thread.
    pub fn hash_all_ready(&self, control: &Control<'_>) -> Result<()> {
        while self.hash_batch(self.hash_pool.take_ready(), control)? {
            control.check()?;
        }
        Ok(())
    }

    /// Hashes until the backlog is below its limit, so that it does not grow.
    pub fn hash_backlog(&self, control: &Control<'_>) -> Result<()> {
        while self.hash(&|| !self.backlog.is_full(), control)? {
            control.check()?;
        }
        Ok(())
    }

    fn hash_batch(
        &self,
        batch: Option<HashBatch<UnhashedBytes<'p>>>,
        control: &Control<'_>,
    ) -> Result<bool> {
        let Some(batch) = batch else { return Ok(false) };
        let mut complete = Vec::new();
        self.counters.time(Stage::Hash, || {
            self.hash_pool.hash(batch, |tensor, digests| complete.push((tensor, digests)));
        });
        for (tensor, digests) in complete {
            let header = self.finish_header(tensor, self.draft(tensor)?, &digests)?;
            let offset = self.item(tensor)?.entry.header_offset;
            self.write(offset, &mut [IoSlice::new(&header)], control)?;
        }
        Ok(true)
    }

    /// Returns the finished headers of the small tensors, in order. Their data must be encrypted
    /// already.
    fn headers_of_small(&self, chunks: &[TensorChunk<'p>]) -> Result<Vec<Vec<u8>>> {
        let mut drafts = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            if !self.is_large(self.item(chunk.tensor)?) {
                drafts.push((chunk, self.draft(chunk.tensor)?));
            }
        }
        let inputs =
            drafts.iter().map(|(chunk, draft)| (draft.bytes.as_slice(), chunk.bytes.as_ref()));
        let inputs = inputs.collect::<Vec<_>>();
        let sha = self.hashes == Some(Hashes::All);
        let digests = self.counters.time(Stage::Hash, || digest_all(&inputs, sha));
        let drafts = drafts.into_iter().zip(digests);
        let finish = |((chunk, draft), digests): ((&TensorChunk<'p>, _), _)| {
            self.finish_header(chunk.tensor, draft, &digests)
        };
        collect_all(drafts.map(finish))
    }

    fn encryptor(&self, tensor: usize) -> Result<Option<&Encryptor<'p>>> {
        let encryptor = self.encryptors.get(tensor);
        Ok(encryptor.ok_or_else(|| Error::Bug(format!("no tensor {tensor}")))?.as_ref())
    }

    /// Returns the encrypted bytes of a chunk, if the file is encrypted.
    fn encrypted(&self, chunk: &TensorChunk<'_>) -> Result<Option<Vec<u8>>> {
        let bytes = chunk.bytes.as_ref();
        let encryptor = |encryptor: &Encryptor<'_>| {
            self.counters.time(Stage::Decrypt, || encryptor.encrypt(chunk.start, bytes))
        };
        self.encryptor(chunk.tensor)?.filter(|_| !bytes.is_empty()).map(encryptor).transpose()
    }

    fn draft(&self, tensor: usize) -> Result<HeaderDraft> {
        let item = self.item(tensor)?;
        let crypt_len = self.encryptor(tensor)?.map_or(0, |encryptor| encryptor.encoded_len);
        let hashes =
            self.hashes.ok_or_else(|| Error::Bug("a header of a plain file".to_owned()))?;
        HeaderDraft::new(item.entry, item.module_index, hashes, crypt_len)
    }

    /// Returns the complete header of a tensor, whose data must be encrypted already.
    fn finish_header(
        &self,
        tensor: usize,
        draft: HeaderDraft,
        digests: &Digests,
    ) -> Result<Vec<u8>> {
        let crypt = self.encryptor(tensor)?.map_or(Vec::new(), Encryptor::encode);
        let header = draft.finish(digests.crc, &digests.sha, &crypt);
        let digest = match &self.manifest {
            Some(manifest) => Some(manifest.digest(&header).0),
            None => self.needs_digests.then(|| sha256(&header)),
        };
        if let Some(digest) = digest {
            let mut all = unpoisoned(self.digests.lock());
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
    pub fn send_complete_parts(&self, control: &Control<'_>) -> Result<()> {
        self.counters.time(Stage::Write, || self.sink.finish_deferred_writes(control))
    }
}

fn append<'a>(writes: &mut Vec<WriteRun<'a>>, offset: u64, bytes: &'a [u8]) {
    let end = offset + bytes.len() as u64;
    match writes.last_mut().filter(|write| write.end == offset) {
        Some(run) => {
            run.buffers.push(IoSlice::new(bytes));
            run.end = end;
        }
        None => writes.push(WriteRun { offset, end, buffers: vec![IoSlice::new(bytes)] }),
    }
}
