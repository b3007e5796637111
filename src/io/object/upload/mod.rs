//! Multipart uploads: parts are sent while others are still being written.
//!
//! The first part holds the prologue and the index, which are written last; it is retained until
//! then. Any other part is sent by a thread that has just completed a write. The object is
//! invisible until the server is told to combine the parts.
mod memory;
mod plan;
mod protocol;
mod requests;

use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::cancel::{Cancel, Never, run_detached};
use crate::error::{Error, Result};
use crate::fallible::{try_extend, try_resize};
use crate::io::save_order::SaveTurn;
use crate::io::transport::TransportOptions;
use crate::io::{Ending, Published, Reservation, SinkFacts, WriteAt};
use crate::sys::process::OwnerProcess;
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;
use memory::{PartMemory, UploadBudget};
use plan::{HEAD_PARTS, MAX_PARTS, PartPlan};
pub(super) use protocol::{SentPart, UploadProtocol, confirm_if_present, new_mark};
pub(super) use requests::UploadRequests;

/// Time limit for the server to abort the upload of a cancelled call.
const ABORT_LIMIT: Duration = Duration::from_millis(500);
/// The number of the first part after the head.
const FIRST_PART: u64 = HEAD_PARTS + 1;

/// An object under construction. Clones are the same object.
#[derive(Clone)]
pub struct UploadSink(Arc<MultipartUpload>);

struct MultipartUpload {
    /// The only process that may send parts, complete the object or abort it.
    owner: OwnerProcess,
    /// The address as messages show it.
    display_address: String,
    /// Bytes of the longest part that the protocol allows.
    max_part_len: u64,
    /// Time limit for a server that neither sends nor takes bytes.
    stall: Duration,
    object: Arc<dyn UploadProtocol>,
    state: Mutex<UploadState>,
    memory: PartMemory,
    /// The server's id of the upload, once it has begun.
    upload_id: Mutex<Option<Arc<str>>>,
    /// True once a request was cancelled: then the upload is aborted quickly.
    interrupted: AtomicBool,
    turn: SaveTurn,
}

#[derive(Default)]
struct UploadState {
    plan: Option<PartPlan>,
    head: Vec<u8>,
    /// Incomplete parts, by number from the head on.
    open: BTreeMap<u64, Arc<Mutex<OpenPart>>>,
    /// Complete parts that no thread sends yet, by number.
    ready: VecDeque<(u64, Vec<u8>)>,
    sent: Vec<SentPart>,
    closed_because: Option<&'static str>,
}

/// A part that is being written.
#[derive(Default)]
struct OpenPart {
    /// None before its first bytes come.
    bytes: Vec<u8>,
    filled: u64,
}

impl UploadSink {
    /// An object of a server. Nothing is sent before a part is complete. `target` names the server
    /// and the object, the same for all addresses of the object.
    pub(super) fn new(
        object: Arc<dyn UploadProtocol>,
        (display_address, target): (String, String),
        max_part_len: u64,
        options: &TransportOptions,
    ) -> Result<Self> {
        let budget = UploadBudget::new(options)?;
        Ok(UploadSink(Arc::new(MultipartUpload {
            owner: OwnerProcess::current(),
            turn: SaveTurn::begin((None, target.into())),
            display_address,
            max_part_len,
            stall: options.stall,
            object,
            state: Mutex::default(),
            memory: PartMemory::new(budget),
            upload_id: Mutex::new(None),
            interrupted: AtomicBool::new(false),
        })))
    }

    /// Aborts the upload; an earlier object of this name stays. The error is that of a cancelled
    /// call.
    pub fn abort(&self, cancel: &dyn Cancel) -> Result<()> {
        self.0.abort("its upload was aborted", cancel)
    }
}

impl MultipartUpload {
    fn state(&self) -> MutexGuard<'_, UploadState> {
        unpoisoned(self.state.lock())
    }

    /// The state of an object that is still open.
    fn open_state(&self) -> Result<MutexGuard<'_, UploadState>> {
        self.owner.check(&self.display_address)?;
        let state = self.state();
        match state.closed_because {
            Some(why) => Err(Error::Closed(format!("`{}` is closed: {why}", self.display_address))),
            None => Ok(state),
        }
    }

    /// The plan of an object of `len` bytes with a head of `head` bytes.
    fn plan(&self, head: u64, len: u64) -> PartPlan {
        PartPlan::new(self.max_part_len, head, len)
    }

    fn abort(&self, why: &'static str, cancel: &dyn Cancel) -> Result<()> {
        if !self.owner.is_current() {
            return Ok(());
        }
        let mut state = self.state();
        if state.closed_because.is_some() {
            return Ok(());
        }
        *state = UploadState { closed_because: Some(why), ..UploadState::default() };
        drop(state);
        self.memory.clear();
        let upload_id = unpoisoned(self.upload_id.lock()).take();
        let Some(upload_id) = upload_id else { return Ok(()) };
        let object = Arc::clone(&self.object);
        let interrupted = self.interrupted.load(Ordering::Relaxed);
        let limit = if interrupted { ABORT_LIMIT } else { self.stall };
        let asked = Instant::now();
        let waits = || match cancel.check() {
            Ok(()) if asked.elapsed() >= limit => Err(Error::Closed("too late".to_owned())),
            checked => checked,
        };
        match run_detached(&waits, move || object.abort(&upload_id, &Never)) {
            Err(error @ (Error::Cancelled | Error::Caller(_))) => Err(error),
            // If the server does not respond, nothing more can be done. No reader sees the parts.
            _ => Ok(()),
        }
    }

    /// Returns the outcome of a request; notes if it was cancelled.
    fn note_cancellation<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(Error::Cancelled | Error::Caller(_)) = outcome {
            self.interrupted.store(true, Ordering::Relaxed);
        }
        outcome
    }

    /// The upload at the server; the first caller begins it.
    fn upload_id(&self, cancel: &dyn Cancel) -> Result<Arc<str>> {
        let mut upload_id = unpoisoned(self.upload_id.lock());
        if let Some(upload_id) = &*upload_id {
            return Ok(Arc::clone(upload_id));
        }
        // An aborted upload is not begun again.
        drop(self.open_state()?);
        let begun = self.note_cancellation(self.object.begin(cancel))?;
        Ok(Arc::clone(upload_id.insert(begun)))
    }

    fn send(&self, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let upload_id = self.upload_id(cancel)?;
        let sent = self.note_cancellation(self.object.part(&upload_id, number, bytes, cancel))?;
        self.state().sent.push(sent);
        Ok(())
    }

    /// Copies bytes into the head, and returns how many belong there.
    fn write_head(state: &mut UploadState, head_len: u64, at: u64, bytes: &[u8]) -> Result<usize> {
        let start = to_usize(at);
        let len = bytes.len().min(to_usize(head_len - at));
        let end = state.head.len().max(start + len);
        try_resize(&mut state.head, end, "the head of an upload")?;
        copy(bytes.get(..len), &mut state.head, start)?;
        Ok(len)
    }

    /// Copies bytes into one part.
    fn write_part(&self, offset: u64, bytes: &[u8], cancel: &dyn Cancel) -> Result<usize> {
        let (range, start, part) = {
            let mut state = self.open_state()?;
            let plan = state.plan.get_or_insert_with(|| self.plan(0, 0));
            let range = plan.part_at(offset).ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "`{}` would have more than {MAX_PARTS} parts: write its tensors in fewer calls",
                    self.display_address
                ))
            })?;
            let start = to_usize(offset - plan.head_len - range.start);
            (range, start, Arc::clone(state.open.entry(range.number).or_default()))
        };
        let part_len = to_usize(range.len);
        let mut part = unpoisoned(part.lock());
        if part.bytes.is_empty() {
            part.bytes = self.memory.take(part_len, &|| self.send_ready_parts(cancel))?;
        }
        let len = bytes.len().min(part_len - start);
        copy(bytes.get(..len), &mut part.bytes, start)?;
        part.filled += len as u64;
        if part.filled < range.len {
            return Ok(len);
        }
        let complete = std::mem::take(&mut part.bytes);
        drop(part);
        self.memory.complete();
        let mut state = self.state();
        state.open.remove(&range.number);
        state.ready.push_back((range.number, complete));
        Ok(len)
    }

    /// Sends parts that are complete.
    fn send_ready_parts(&self, cancel: &dyn Cancel) -> Result<()> {
        loop {
            let next = self.open_state()?.ready.pop_front();
            let Some((number, part)) = next else { return cancel.check() };
            let sending = self.memory.sending();
            let part = Bytes::from(part);
            self.send(FIRST_PART + number, &part, cancel)?;
            // The memory is free, unless a cancelled request still has it.
            sending.done(part.try_into_mut().ok().map(Vec::from));
        }
    }

    /// Sends the remaining parts, and has the server combine all parts.
    fn publish(&self, len: u64, cancel: &dyn Cancel) -> Result<()> {
        drop(self.open_state()?);
        self.send_ready_parts(cancel)?;
        let mut state = self.open_state()?;
        let plan = state.plan.take().unwrap_or_else(|| self.plan(0, len));
        let head = std::mem::take(&mut state.head);
        let open = std::mem::take(&mut state.open);
        let sent = !state.sent.is_empty();
        drop(state);
        let mut tails = Vec::new();
        for (number, part) in open {
            let range = plan.part_range(to_usize(number));
            let range = range.ok_or_else(|| Error::Bug(format!("no part {number}")))?;
            let start = plan.head_len + range.start;
            let filled = len.saturating_sub(start).min(range.len);
            let mut part = unpoisoned(part.lock());
            if part.filled != filled {
                return Err(Error::Bug(format!(
                    "`{}`: {} of {filled} bytes from {start} on were written",
                    self.display_address, part.filled
                )));
            }
            part.bytes.truncate(to_usize(filled));
            tails.push((number, std::mem::take(&mut part.bytes)));
        }
        if head.len() as u64 != len.min(plan.head_len) {
            let address = &self.display_address;
            return Err(Error::Bug(format!("`{address}`: an incomplete head")));
        }
        if !sent {
            let mut all = head;
            for (_, tail) in tails {
                try_extend(&mut all, &tail, "what is uploaded")?;
            }
            return self.note_cancellation(self.object.put(&Bytes::from(all), cancel));
        }
        for (number, tail) in tails {
            self.send(FIRST_PART + number, &Bytes::from(tail), cancel)?;
        }
        let head = Bytes::from(head);
        let part_len = to_usize(plan.part_len);
        for (number, start) in (1..).zip((0..head.len()).step_by(part_len)) {
            let end = head.len().min(start.saturating_add(part_len));
            if number >= FIRST_PART {
                return Err(Error::InvalidArgument(format!(
                    "the index of `{}` takes {} bytes: write its tensors in fewer calls",
                    self.display_address,
                    head.len()
                )));
            }
            self.send(number, &head.slice(start..end), cancel)?;
        }
        let mut parts = std::mem::take(&mut self.state().sent);
        parts.sort_by_key(|part| part.number);
        let upload_id = self.upload_id(cancel)?;
        self.note_cancellation(self.object.complete(&upload_id, &parts, len, cancel))
    }
}

impl WriteAt for UploadSink {
    fn uri(&self) -> &str {
        &self.0.display_address
    }

    fn facts(&self) -> SinkFacts {
        let (retained, part_len) = {
            let state = self.0.state();
            let unplanned = || (0, self.0.plan(0, 0).part_len);
            state.plan.as_ref().map_or_else(unplanned, |p| (p.head_len, p.longest_part()))
        };
        let budget = self.0.memory.budget();
        let writers = budget.writers(part_len);
        SinkFacts {
            max_writers: writers,
            default_writers: writers,
            max_positions: budget.max_positions(part_len),
            is_visible_early: false,
            retained,
            part_len,
        }
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>], cancel: &dyn Cancel) -> Result<usize> {
        let mut at = offset;
        for buffer in buffers {
            let mut rest: &[u8] = buffer;
            while !rest.is_empty() {
                let mut state = self.0.open_state()?;
                let head_len = state.plan.get_or_insert_with(|| self.0.plan(0, 0)).head_len;
                let done = if at < head_len {
                    MultipartUpload::write_head(&mut state, head_len, at, rest)?
                } else {
                    drop(state);
                    self.0.write_part(at, rest, cancel)?
                };
                at += done as u64;
                rest = rest.get(done..).unwrap_or(&[]);
            }
        }
        Ok(to_usize(at - offset))
    }

    fn finish_deferred_writes(&self, cancel: &dyn Cancel) -> Result<()> {
        self.0.send_ready_parts(cancel)
    }

    fn read_back(&self, offset: u64, _buffer: &mut [u8]) -> Result<()> {
        let what = format!("byte {offset} was sent already");
        Err(Error::failed("reading back", self.uri(), ErrorKind::Unsupported, what))
    }

    fn insert(&self, at: u64, end: u64, len: u64, _cancel: &dyn Cancel) -> Result<u64> {
        let mut state = self.0.open_state()?;
        let Some(plan) = &mut state.plan else { return Ok(len) };
        // Whole parts, so that all parts but the last keep the same size.
        let len = len.next_multiple_of(plan.part_len);
        if at > plan.head_len.min(end) {
            return Err(Error::Bug(format!("{len} bytes inserted at {at}")));
        }
        plan.head_len += len;
        let start = to_usize(at).min(state.head.len());
        state.head.splice(start..start, std::iter::repeat_n(0, to_usize(len)));
        Ok(len)
    }

    fn reserve(&self, expected: &Reservation) -> Result<()> {
        let &Reservation { head, len, parts } = expected;
        self.0.open_state()?.plan.get_or_insert_with(|| self.0.plan(head, len)).announce(len);
        self.0.memory.reserve(len, parts);
        Ok(())
    }

    fn publish(&mut self, len: u64, ending: Ending, cancel: &dyn Cancel) -> Result<Published> {
        if ending == Ending::Unclosed {
            self.abort(cancel)?;
            return Ok(Published::Aborted);
        }
        if self.0.turn.publish(cancel, || self.0.publish(len, cancel))?.is_none() {
            self.0.abort("a later save to it is complete", cancel)?;
            return Ok(Published::Overtaken);
        }
        self.0.state().closed_because = Some("its upload is complete");
        Ok(Published::InPlace)
    }
}

impl Drop for MultipartUpload {
    fn drop(&mut self) {
        // Never has no error.
        let _ = self.abort("its upload was not finished", &Never);
    }
}

#[cfg(all(test, not(feature = "models")))]
mod tests;

/// Copies bytes to a position of memory that has room for them.
fn copy(bytes: Option<&[u8]>, memory: &mut [u8], start: usize) -> Result<()> {
    let bug = || Error::Bug("a write beyond memory".to_owned());
    let bytes = bytes.ok_or_else(bug)?;
    let room = memory.get_mut(start..).and_then(|rest| rest.get_mut(..bytes.len()));
    room.ok_or_else(bug)?.copy_from_slice(bytes);
    Ok(())
}
