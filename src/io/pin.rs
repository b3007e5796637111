//! The SHA-256 of a file while it is read: the state of its hash, and the ranges that are being read.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use crate::cancel::{POLL, ProcessLock};
use crate::codec::sha256::{Sha256, hex};
use crate::mem::FilledPart;
use crate::sys::process::PerProcess;
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Bytes of a chunk, which has a state of the hash at its beginning and its end.
pub const CHUNK: u64 = 128 << 10;
/// The SHA-256 that a file must have, and that of its bytes so far. Handles of the file share it.
pub struct Pin {
    expected: [u8; 32],
    /// The one that expects it, for messages: `the hub publishes`.
    by: &'static str,
    /// A forked child has none of the threads that read.
    state: PerProcess<PinState>,
}

#[derive(Default)]
struct PinState {
    hashed: Mutex<Hashed>,
    turn: Condvar,
}

/// The bytes that are hashed: those before a position.
pub struct Hashed {
    pub position: u64,
    sha: Sha256,
    /// The states at the beginning of each chunk, up to the position.
    states: Vec<[u32; 8]>,
    /// The ranges that are being read to be hashed: their starts and ends.
    pub reading: BTreeMap<u64, u64>,
    /// The time at which the position changed last.
    pub moved: Instant,
    agreed: bool,
}

impl Default for Hashed {
    fn default() -> Self {
        let (sha, moved) = (Sha256::default(), Instant::now());
        let states = vec![sha.state()];
        Hashed { position: 0, sha, states, reading: BTreeMap::new(), moved, agreed: false }
    }
}

impl Hashed {
    /// Hashes the next bytes, which end with a chunk, if not before.
    fn update(&mut self, bytes: &[u8]) {
        self.sha.update(bytes);
        self.position += bytes.len() as u64;
        if self.position.is_multiple_of(CHUNK) {
            self.states.push(self.sha.state());
        }
        self.moved = Instant::now();
    }
}

impl Pin {
    pub fn new(expected: [u8; 32], by: &'static str) -> Arc<Self> {
        Arc::new(Pin { expected, by, state: PerProcess::new() })
    }

    pub fn hashed(&self) -> MutexGuard<'_, Hashed> {
        unpoisoned(self.state.get().hashed.lock())
    }

    /// Waits until another reader has ended, or for a moment.
    pub fn wait(&self) {
        let PinState { hashed, turn } = self.state.get();
        drop(unpoisoned(turn.wait_timeout(unpoisoned(hashed.lock()), POLL)));
    }

    /// Hashes the file anew.
    pub fn reset(&self) {
        let mut hashed = self.hashed();
        let reading = std::mem::take(&mut hashed.reading);
        *hashed = Hashed { reading, ..Hashed::default() };
    }

    /// The number of bytes that were hashed, from the first on.
    pub fn position(&self) -> u64 {
        self.hashed().position
    }

    /// True once the whole file was compared.
    pub fn has_agreed(&self) -> bool {
        self.hashed().agreed
    }

    /// Returns the hash of all bytes, in hexadecimal, if it is another one.
    pub fn disagrees(&self) -> Option<String> {
        let mut hashed = self.hashed();
        let found = hashed.sha.clone().finish();
        hashed.agreed = found == self.expected;
        (!hashed.agreed).then(|| hex(&found))
    }

    /// The expected hash, and its origin.
    pub fn expected(&self) -> String {
        format!("{} {}", self.by, hex(&self.expected))
    }

    /// Hashes the next bytes.
    pub fn advance(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let mut hashed = self.hashed();
            let in_chunk = to_usize(CHUNK - hashed.position % CHUNK);
            let (now, later) = bytes.split_at(in_chunk.min(bytes.len()));
            hashed.update(now);
            bytes = later;
        }
    }

    /// Returns the position of the first chunk that differs, of those from `start` to `stop`.
    pub fn difference(&self, start: u64, stop: u64, filled: &FilledPart<'_>) -> Option<u64> {
        (start..stop).step_by(to_usize(CHUNK)).find(|&at| {
            let (number, end) = (to_usize(at / CHUNK), stop.min(at + CHUNK));
            let (from, to) = {
                let hashed = self.hashed();
                let state = |number: usize| hashed.states.get(number).copied();
                (state(number), state(number + 1).unwrap_or_else(|| hashed.sha.state()))
            };
            let mut sha = Sha256::resumed(from.unwrap_or([0; 8]), at);
            let bytes = filled.bytes(to_usize(at - start)..to_usize(end - start));
            bytes.iter().for_each(|part| sha.update(part));
            // The last chunk may end within a block, of which the state knows nothing.
            let is_same =
                if end == at + CHUNK { sha.state() == to } else { sha.finish() == self.expected };
            !is_same
        })
    }
}

/// A range that is being read, until this is dropped.
pub struct Range<'p> {
    pub pin: &'p Pin,
    pub start: u64,
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        self.pin.hashed().reading.remove(&self.start);
        self.pin.state.get().turn.notify_all();
    }
}

/// The pins of the files of a hub, which handles of the same checkpoint share.
#[derive(Default)]
pub struct HubPins {
    /// Held by the thread that requests them.
    pub requesting: ProcessLock,
    pub pins: OnceLock<Vec<Option<Arc<Pin>>>>,
}
