//! Streams and events of a CUDA device. `unsafe` is allowed in this file: it calls the driver.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::context::Context;
use super::driver;
use crate::error::{Error, Result};
use crate::mem::device::{Consumer, Event, HostToDeviceCopy, Stream};
use crate::sys::sync::unpoisoned;

#[derive(Clone, Copy)]
struct RawStream(driver::Stream);

// SAFETY: a stream may be used on any thread whose current context is the stream's.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// The streams of a device that this library has created. They are never destroyed.
pub struct OwnStreams {
    context: Arc<Context>,
    /// Streams that are not lent.
    idle: Mutex<Vec<RawStream>>,
    /// Unused events.
    events: Mutex<Vec<RawEvent>>,
}

/// Maximum number of unused events that are kept: more than there are staging buffers in flight.
const MAX_UNUSED_EVENTS: usize = 256;

/// True once the driver has refused a batch of copies. From then on they are begun one by one.
static NO_BATCHES: AtomicBool = AtomicBool::new(false);

struct RawEvent(driver::Event);

// SAFETY: an event may be used on any thread whose current context is the event's.
unsafe impl Send for RawEvent {}
// SAFETY: as above; the driver's calls are safe on several threads at once.
unsafe impl Sync for RawEvent {}

impl OwnStreams {
    /// Creates the set without streams or events.
    pub fn new(context: Arc<Context>) -> Self {
        OwnStreams { context, idle: Mutex::default(), events: Mutex::default() }
    }

    fn events(&self) -> MutexGuard<'_, Vec<RawEvent>> {
        unpoisoned(self.events.lock())
    }

    /// Returns an unused event. The device must be entered.
    fn event(self: &Arc<Self>) -> Result<CudaEvent> {
        if let Some(raw) = self.events().pop() {
            return Ok(CudaEvent::new(self, raw));
        }
        let mut raw = ptr::null_mut();
        let create = self.context.driver.create_event;
        // SAFETY: the new event is written to the variable.
        let code = unsafe { create(&mut raw, driver::WITHOUT_TIMING) };
        self.context.check("creating an event", code)?;
        Ok(CudaEvent::new(self, RawEvent(raw)))
    }

    /// Records an event after all work that is on a stream now. The device must be entered.
    fn record_event(self: &Arc<Self>, stream: RawStream) -> Result<CudaEvent> {
        let event = self.event()?;
        // SAFETY: both are open and of this context.
        let code = unsafe { (self.context.driver.record_event)(event.raw.0, stream.0) };
        self.context.check("recording an event", code)?;
        Ok(event)
    }

    /// Records an event after all work that is on the consumer's stream now.
    pub fn record_consumer_event(self: &Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Event>> {
        let _entered = self.context.enter()?;
        let consumer = self.consumer_stream(consumer)?;
        Ok(Arc::new(self.record_event(consumer)?))
    }

    fn idle(&self) -> MutexGuard<'_, Vec<RawStream>> {
        unpoisoned(self.idle.lock())
    }

    /// Takes an idle stream without unfinished work: with another, the new user would wait for the
    /// work of the last one. With `MAX_IDLE` idle streams or more, none is created: the oldest is
    /// reused in any case.
    fn take(&self) -> Option<RawStream> {
        const MAX_IDLE: usize = 64;
        let mut idle = self.idle();
        // SAFETY: the stream is open, and of the device that was entered.
        let has_ended = |stream: &RawStream| unsafe {
            (self.context.driver.query_stream)(stream.0) == driver::SUCCESS
        };
        let found = idle.iter().rposition(has_ended);
        found.or((idle.len() >= MAX_IDLE).then_some(0)).map(|at| idle.remove(at))
    }

    /// Returns the consumer's stream; an error if it captures a graph. The device must be entered.
    fn consumer_stream(&self, consumer: Consumer) -> Result<RawStream> {
        let context = &self.context;
        let consumer = RawStream(ptr::with_exposed_provenance_mut(consumer.0));
        let mut capture = driver::NOT_CAPTURING;
        // SAFETY: the consumer's stream is torch's and open, or null for the default one; the
        // status is written to the variable.
        let code = unsafe { (context.driver.is_capturing)(consumer.0, &mut capture) };
        context.check("asking for the current stream", code)?;
        if capture != driver::NOT_CAPTURING {
            return Err(Error::InvalidArgument(format!(
                "{}: the current stream is capturing a CUDA graph, in which loading and saving are \
                 not possible: load or save before the capture",
                context.name
            )));
        }
        Ok(consumer)
    }

    /// Returns an error if the consumer's stream captures a graph.
    pub fn check_consumer(&self, consumer: Consumer) -> Result<()> {
        let _entered = self.context.enter()?;
        self.consumer_stream(consumer).map(drop)
    }

    /// Lends a stream whose work begins only after the work that is on the consumer's stream now.
    pub fn lend(self: &Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Stream>> {
        let context = &self.context;
        let _entered = context.enter()?;
        let consumer = self.consumer_stream(consumer)?;
        let own = match self.take() {
            Some(own) => own,
            None => {
                let mut own = ptr::null_mut();
                // SAFETY: the new stream is written to the variable.
                let code =
                    unsafe { (context.driver.create_stream)(&mut own, driver::NON_BLOCKING) };
                context.check("creating a stream", code)?;
                RawStream(own)
            }
        };
        let stream = CudaStream { streams: Arc::clone(self), own, consumer };
        // Work of the consumer may still use the memory that will be filled or read.
        stream.wait_for(consumer, own)?;
        Ok(Arc::new(stream))
    }
}

/// A stream of [`OwnStreams`], on loan.
struct CudaStream {
    streams: Arc<OwnStreams>,
    own: RawStream,
    consumer: RawStream,
}

impl CudaStream {
    fn context(&self) -> &Arc<Context> {
        &self.streams.context
    }

    /// Makes future work on `later` wait for the work that is on `sooner` now.
    fn wait_for(&self, sooner: RawStream, later: RawStream) -> Result<()> {
        self.streams.record_event(sooner)?.delay(later)
    }
}

impl Drop for CudaStream {
    /// Copies may still be under way; `OwnStreams::take` prefers streams whose copies have ended.
    fn drop(&mut self) {
        self.streams.idle().push(self.own);
    }
}

impl Stream for CudaStream {
    fn handle(&self) -> usize {
        self.own.0.expose_provenance()
    }

    unsafe fn upload_batch(&self, copies: &[HostToDeviceCopy]) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        let batch = context.driver.copy_batch.filter(|_| copies.len() > 1);
        if let Some(batch) = batch.filter(|_| !NO_BATCHES.load(Ordering::Relaxed)) {
            let copies = copies.iter().filter(|copy| copy.len > 0);
            let mut to: Vec<_> = copies.clone().map(|copy| copy.to as driver::Address).collect();
            let from = copies.clone().map(|copy| copy.from.expose_provenance() as driver::Address);
            let mut from: Vec<_> = from.collect();
            let mut lens: Vec<usize> = copies.map(|copy| copy.len).collect();
            if to.is_empty() {
                return Ok(());
            }
            // SAFETY: the caller's promise about all ranges; lists of one length, not empty.
            let code = unsafe { batch.call(&mut to, &mut from, &mut lens, self.own.0) };
            if code == driver::SUCCESS {
                return Ok(());
            }
            // Retry one by one, which shows the error if the batch call itself is not the cause.
            NO_BATCHES.store(true, Ordering::Relaxed);
        }
        copies.iter().try_for_each(|copy| {
            let (to, from) = (copy.to as driver::Address, copy.from.cast());
            // SAFETY: the caller's promise about both ranges.
            let code = unsafe { (context.driver.copy_to_device)(to, from, copy.len, self.own.0) };
            context.check("copying to the device", code)
        })
    }

    unsafe fn download(&self, to: *mut u8, from: usize, len: usize) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        let from = from as driver::Address;
        // SAFETY: the caller's promise about both ranges.
        let code = unsafe { (context.driver.copy_to_host)(to.cast(), from, len, self.own.0) };
        context.check("copying from the device", code)
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let _entered = self.context().enter()?;
        Ok(Arc::new(self.streams.record_event(self.own)?))
    }

    fn hand_over(&self) -> Result<()> {
        let _entered = self.context().enter()?;
        self.wait_for(self.own, self.consumer)
    }

    fn finish(&self) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: the stream is open.
        let code = unsafe { (context.driver.synchronize)(self.own.0) };
        context.check("waiting for copies", code)
    }
}

struct CudaEvent {
    streams: Arc<OwnStreams>,
    raw: RawEvent,
    /// True once it has passed: the driver is not asked again.
    has_passed: AtomicBool,
}

impl CudaEvent {
    fn new(streams: &Arc<OwnStreams>, raw: RawEvent) -> Self {
        CudaEvent { streams: Arc::clone(streams), raw, has_passed: AtomicBool::new(false) }
    }

    /// Makes future work on an open stream of the device wait. The device must be entered.
    fn delay(&self, stream: RawStream) -> Result<()> {
        let context = &self.streams.context;
        // SAFETY: both are open. The wait stays as it is when the event is recorded again or destroyed.
        let code = unsafe { (context.driver.wait_for_event)(stream.0, self.raw.0, 0) };
        context.check("ordering streams", code)
    }
}

impl Event for CudaEvent {
    fn passed(&self) -> Result<bool> {
        if self.has_passed.load(Ordering::Acquire) {
            return Ok(true);
        }
        let context = &self.streams.context;
        let _entered = context.enter()?;
        // SAFETY: the event is open.
        match unsafe { (context.driver.query_event)(self.raw.0) } {
            driver::NOT_READY => Ok(false),
            code => {
                context.check("copying", code)?;
                self.has_passed.store(true, Ordering::Release);
                Ok(true)
            }
        }
    }

    fn delay_stream(&self, stream: usize) -> Result<()> {
        if self.has_passed.load(Ordering::Acquire) {
            return Ok(());
        }
        let _entered = self.streams.context.enter()?;
        self.delay(RawStream(ptr::with_exposed_provenance_mut(stream)))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let raw = RawEvent(std::mem::replace(&mut self.raw.0, ptr::null_mut()));
        let mut events = self.streams.events();
        // Even an event that has not passed: to record it again changes no wait that was begun.
        if events.len() < MAX_UNUSED_EVENTS {
            events.push(raw);
            return;
        }
        drop(events);
        let context = &self.streams.context;
        if let Ok(_entered) = context.enter() {
            // SAFETY: the event is open, and no other handle to it exists.
            let _ = unsafe { (context.driver.destroy_event)(raw.0) };
        }
    }
}
