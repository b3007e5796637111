//! Filled staging buffers on their way to a device.
//!
//! A thread that adds some submits all that wait, unless another thread is doing so. So one thread
//! at a time calls the driver, whose calls wait for each other, and a reader that needs no event
//! does not wait for it. Buffers that were added meanwhile are submitted together, with one event
//! at their end.

use std::sync::Arc;

use crate::error::Result;
use crate::mem::device::{Event, Streams};
use crate::mem::pinned::{Upload, upload_all};
use crate::sys::sync::{Mutex, unpoisoned};

/// Most uploads that share an event: their buffers return together.
const GROUP: usize = 4;

/// The uploads of one load to one device.
pub struct UploadQueue<'d> {
    streams: &'d Streams,
    waiting: Mutex<Vec<Upload<'d>>>,
    /// Held while uploads are submitted.
    submitting: Mutex<()>,
}

impl<'d> UploadQueue<'d> {
    /// Creates the queue of a device.
    pub fn new(streams: &'d Streams) -> Self {
        UploadQueue { streams, waiting: Mutex::default(), submitting: Mutex::default() }
    }

    /// Adds an upload. It is submitted by this thread, or by the one that is submitting.
    pub fn add(&self, upload: Upload<'d>) -> Result<()> {
        unpoisoned(self.waiting.lock()).push(upload);
        self.submit_waiting()
    }

    fn submit_waiting(&self) -> Result<()> {
        // An upload that was added after the last look of the submitting thread is seen here.
        while !unpoisoned(self.waiting.lock()).is_empty() {
            let Ok(_alone) = self.submitting.try_lock() else { break };
            loop {
                let mut waiting = unpoisoned(self.waiting.lock());
                let first = waiting.len().min(GROUP);
                let mut group: Vec<_> = waiting.drain(..first).collect();
                drop(waiting);
                if group.is_empty() {
                    break;
                }
                self.submit(&mut group)?;
            }
        }
        Ok(())
    }

    /// Submits an upload by itself, and returns the event at its end.
    pub fn submit_now(&self, upload: &mut Upload<'d>) -> Result<Option<Arc<dyn Event>>> {
        let event = {
            let _alone = unpoisoned(self.submitting.lock());
            self.submit(std::slice::from_mut(upload))?
        };
        // Threads that added some meanwhile have left them to this one.
        self.submit_waiting()?;
        Ok(event)
    }

    fn submit(&self, group: &mut [Upload<'d>]) -> Result<Option<Arc<dyn Event>>> {
        let _entered = self.streams.device().enter()?;
        let stream = self.streams.next()?;
        // Blocks that were allocated together share one event.
        let mut awaited: Vec<&Arc<dyn Event>> = Vec::new();
        for &after in group.iter().flat_map(|upload| &upload.after) {
            if awaited.iter().any(|listed| Arc::ptr_eq(listed, after)) {
                continue;
            }
            // An event that has passed costs later uploads no driver call.
            if !after.passed()? {
                after.delay_stream(stream.handle())?;
            }
            awaited.push(after);
        }
        upload_all(group, stream)
    }
}

#[cfg(all(test, feature = "models"))]
mod models;
