//! Checksums of a hub. If it publishes the SHA-256 of a file, all bytes of the file are compared
//! with it before a tensor is handed out. The tensors are read after that, and each chunk of them is
//! compared with the one that was hashed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use super::file::TensorFile;
use super::verified_source::{CHUNK, ChunkHashes, ComparedFile, ComparedFiles, VerifiedSource};
use crate::cancel::{Cancel, POLL};
use crate::codec::hash::Verify;
use crate::codec::sha256::Sha256;
use crate::engine::load_options::LoadOptions;
use crate::engine::worker_range;
use crate::engine::workers::{self, Control, WorkerRange};
use crate::error::{Error, Result};
use crate::fallible::try_resize;
use crate::io::{Capabilities, HubChecksum, ReadAt, WantedRead, as_refs, read_exact_at};
use crate::mem::Buffers;
use crate::memory_limit::{LoadNeeds, MemoryLimit};
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Maximum bytes of a reader's request. The reader holds them until all earlier bytes are hashed.
const MAX_PIECE_LEN: u64 = 16 << 20;
/// Files that are read at once: each is hashed by one core at a time.
const MAX_FILES_AT_ONCE: usize = 8;
/// Files whose checksums are requested at once.
const MAX_CHECKSUM_REQUESTS: usize = 16;

impl TensorFile {
    /// Compares the bytes of its files with the checksums that their hubs publish, once. Returns
    /// which hashes the load itself has to verify. Refuses a file with neither hashes of its own
    /// nor a published checksum.
    pub(super) fn verify_hub_checksums(
        &self,
        options: &LoadOptions,
        cancel: &dyn Cancel,
    ) -> Result<Verify> {
        let verify = options.verify;
        let has_own_hashes = self.format().has_hashes();
        let load_verify = if has_own_hashes { verify } else { Verify::Nothing };
        let nothing_to_compare =
            verify == Verify::Nothing || (has_own_hashes && verify != Verify::All);
        if !nothing_to_compare {
            let state = self.hub_verification();
            state.once.run(cancel, || {
                let compared = self.compare_all(has_own_hashes, options, cancel)?;
                state.compared.get_or_init(|| compared);
                Ok(())
            })?;
            self.replace_sources(|file, source| {
                let compared = state.compared.get()?.get(file)?.as_ref()?;
                let needed = source.facts().is_of_hub();
                needed.then(|| -> Arc<dyn ReadAt> {
                    Arc::new(VerifiedSource::new(Arc::clone(source), Arc::clone(compared)))
                })
            });
        }
        Ok(load_verify)
    }

    /// Compares all of its files, and returns the hashes of the chunks of those that have a
    /// published checksum. Files with hashes of their own need none.
    fn compare_all(
        &self,
        has_own_hashes: bool,
        options: &LoadOptions,
        cancel: &dyn Cancel,
    ) -> Result<ComparedFiles> {
        let sources = self.sources();
        if !sources.iter().any(|source| source.facts().is_of_hub()) {
            return if has_own_hashes {
                Ok(Vec::new())
            } else {
                Err(self.no_hashes(self.uri(), ""))
            };
        }
        let memory = worker_range::limit(options.memory, &as_refs(&sources))?;
        let mut files = Vec::with_capacity(sources.len());
        let mut compared: ComparedFiles = Vec::with_capacity(sources.len());
        for (source, published) in
            as_refs(&sources).into_iter().zip(request_checksums(&sources, cancel)?)
        {
            compared.push(None);
            let why = match published {
                HubChecksum::Sha256(expected) => {
                    let number = compared.len() - 1;
                    files.push(ChecksumComparison::new(number, source, expected, memory)?);
                    continue;
                }
                _ if has_own_hashes => continue,
                HubChecksum::NoHub => "",
                HubChecksum::NotSha256 => ", and its hub publishes no SHA-256 of it",
                HubChecksum::Offline => ", and with HF_HUB_OFFLINE its hub is not asked for one",
            };
            return Err(self.no_hashes(source.uri(), why));
        }
        for group in files.chunks(MAX_FILES_AT_ONCE) {
            compare(group, memory, options, cancel)?;
        }
        for file in files {
            let number = file.number;
            if let Some(slot) = compared.get_mut(number) {
                *slot = Some(Arc::new(file.into_compared()));
            }
        }
        Ok(compared)
    }
}

/// Returns the checksum that is published of each file.
fn request_checksums(sources: &[Arc<dyn ReadAt>], cancel: &dyn Cancel) -> Result<Vec<HubChecksum>> {
    workers::map(MAX_CHECKSUM_REQUESTS, sources, cancel, |source, control| {
        let server = source.facts().server.as_ref();
        let request = server.and_then(|server| server.checksum.as_ref());
        request.map_or(Ok(HubChecksum::NoHub), |request| request(control))
    })
}

/// The first pieces of a file: their number, their hash, and the hashes of their chunks.
#[derive(Default)]
struct HashedPieces {
    count: u64,
    sha: Sha256,
    chunks: ChunkHashes,
}

/// The comparison of one file with its checksum.
struct ChecksumComparison<'s> {
    /// The number of the source.
    number: usize,
    source: &'s dyn ReadAt,
    len: u64,
    /// Bytes of each piece but the last.
    piece: u64,
    expected: [u8; 32],
    hashed: Mutex<HashedPieces>,
    turn: Condvar,
    /// The announcement of the reads.
    _wanted: Option<WantedRead>,
}

impl<'s> ChecksumComparison<'s> {
    fn new(
        number: usize,
        source: &'s dyn ReadAt,
        expected: [u8; 32],
        memory: MemoryLimit,
    ) -> Result<Self> {
        let capabilities = source.capabilities();
        let len = source.facts().len.ok_or_else(|| {
            Error::Unsupported(format!(
                "`{}` cannot be verified: its server sends it front to back only, and it would have \
                 to be read twice",
                source.uri()
            ))
        })?;
        let wanted = source.facts().will_read(len);
        let hashed = Mutex::default();
        // Each reader holds one piece, and its connection may hold as much again.
        let most = memory.window(MAX_PIECE_LEN);
        let piece = (capabilities.request_len.min(most) / CHUNK).max(1) * CHUNK;
        Ok(ChecksumComparison {
            number,
            source,
            len,
            piece,
            expected,
            hashed,
            turn: Condvar::new(),
            _wanted: wanted,
        })
    }

    fn pieces(&self) -> u64 {
        self.len.div_ceil(self.piece)
    }

    /// Reads a piece, and hashes it once all pieces before it were hashed.
    fn piece(&self, number: u64, buffer: &mut Vec<u8>, control: &Control<'_>) -> Result<()> {
        let start = number * self.piece;
        let len = to_usize(self.piece.min(self.len - start));
        try_resize(buffer, len, "a file that is hashed")?;
        let what = || "bytes that are hashed for its checksum".to_owned();
        Buffers::from_slice(buffer).with_observer(control, |buffers| {
            read_exact_at(self.source, start, buffers, &what, control)
        })?;
        let chunks = ChunkHashes::of(buffer)?;
        let mut hashed = unpoisoned(self.hashed.lock());
        while hashed.count != number {
            control.check()?;
            let waited = self.turn.wait_timeout(hashed, POLL);
            hashed = unpoisoned(waited).0;
        }
        hashed.sha.update(buffer);
        hashed.chunks.append(chunks)?;
        hashed.count += 1;
        self.turn.notify_all();
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        let hashed = unpoisoned(self.hashed.lock());
        let found = hashed.sha.clone().finish();
        if found == self.expected {
            return Ok(());
        }
        Err(Error::FileHashMismatch {
            uri: self.source.uri().to_owned(),
            expected: hex(&self.expected).into(),
            found: hex(&found).into(),
            kept: self.source.facts().local_copy().map_or_else(Box::default, |copy| {
                let path = copy.path.display();
                let what = "remove that file to have it downloaded again";
                format!("; they were read from the local copy `{path}`: {what}").into()
            }),
        })
    }

    /// The hashes with which later reads of the file are compared.
    fn into_compared(self) -> ComparedFile {
        let hashed = unpoisoned(self.hashed.into_inner());
        ComparedFile { len: self.len, checksum: hex(&self.expected), chunks: hashed.chunks }
    }
}

/// Reads files concurrently, each in order. The number of readers grows while that raises the
/// throughput.
fn compare(
    files: &[ChecksumComparison<'_>],
    memory: MemoryLimit,
    options: &LoadOptions,
    cancel: &dyn Cancel,
) -> Result<()> {
    let sources: Vec<&dyn ReadAt> = files.iter().map(|file| file.source).collect();
    let Some(capabilities) = Capabilities::combined(&sources) else { return Ok(()) };
    let (count, next) = (files.len() as u64, AtomicU64::new(0));
    let rounds = files.iter().map(ChecksumComparison::pieces).max().unwrap_or(0);
    let range = WorkerRange::of(&capabilities, options.readers);
    let piece = files.iter().map(|file| file.piece).max().unwrap_or(0);
    let reader = capabilities.reader_memory.saturating_add(piece);
    let needs = LoadNeeds { readers: range.max, reader_bytes: reader, ..LoadNeeds::default() };
    let range = range.limited_to(memory.load(&needs)?.readers);
    workers::run_adapting(range, cancel, |control, _| {
        let mut buffer = Vec::new();
        while !control.stopped() && !control.is_retired() {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let piece = turn / count;
            if piece >= rounds {
                break;
            }
            let file = files.get(to_usize(turn % count));
            if let Some(file) = file.filter(|file| piece < file.pieces()) {
                file.piece(piece, &mut buffer, control)?;
            }
        }
        Ok(())
    })?;
    files.iter().try_for_each(ChecksumComparison::finish)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
