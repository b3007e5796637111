//! CUDA devices, by way of the driver. One of the few doors to `unsafe`.
//!
//! The driver is looked for at run time: the same library serves machines with and without one.
//! Everything happens in the device's primary context, which is the one that torch uses.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CStr;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::{Consumer, Device, Event, Stream};
use crate::error::{Error, Result};

/// A CUDA device and the streams that nobody uses at the moment. Lives as long as the process.
pub struct CudaDevice {
    name: String,
    context: sys::CUcontext,
    idle: Mutex<Vec<RawStream>>,
}

// SAFETY: contexts of the driver may be used on any thread that makes them current, as `enter`
// does.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; the streams are behind a lock.
unsafe impl Sync for CudaDevice {}

#[derive(Clone, Copy)]
struct RawStream(sys::CUstream);

// SAFETY: streams may be used on any thread in whose current context they are.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// Whether this process can have a CUDA driver.
fn driver_is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    // SAFETY: only opens the driver's library, whose initialisers may run at any time.
    *THERE.get_or_init(|| unsafe { sys::is_culib_present() })
}

impl CudaDevice {
    /// The device that torch calls `cuda:<index>`.
    pub fn find(index: u32) -> Result<Arc<dyn Device>> {
        static KNOWN: Mutex<Option<HashMap<u32, Arc<CudaDevice>>>> = Mutex::new(None);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.get_or_insert_default();
        if let Some(device) = known.get(&index) {
            return Ok(Arc::clone(device) as Arc<dyn Device>);
        }
        let name = format!("cuda:{index}");
        if !driver_is_there() {
            let what = "this process finds no CUDA driver (libcuda.so.1)".to_owned();
            return Err(Error::Device { device: name, what });
        }
        let check = |what: &str, code| check(&name, what, code);
        let ordinal = i32::try_from(index).unwrap_or(i32::MAX);
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: each call writes to the variables given, which live until it returns.
        unsafe {
            check("starting the driver", sys::cuInit(0))?;
            check("finding the device", sys::cuDeviceGet(&mut device, ordinal))?;
            let retained = sys::cuDevicePrimaryCtxRetain(&mut context, device);
            check("opening the device", retained)?;
        }
        let device = Arc::new(CudaDevice { name, context, idle: Mutex::default() });
        known.insert(index, Arc::clone(&device));
        Ok(device)
    }

    fn check(&self, what: &str, code: sys::CUresult) -> Result<()> {
        check(&self.name, what, code)
    }

    /// A stream that nobody uses and on which nothing is left to be done: who got another would wait
    /// for what its last user waits for. So many are kept; beyond that, the oldest one serves.
    fn idle(&self) -> Option<RawStream> {
        const MOST: usize = 64;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the stream is open, and of the device that was entered.
        let has_ended = |stream: &RawStream| unsafe { sys::cuStreamQuery(stream.0) };
        let ended = |stream: &RawStream| has_ended(stream) == sys::CUresult::CUDA_SUCCESS;
        let found = idle.iter().rposition(ended);
        found.or((idle.len() >= MOST).then_some(0)).map(|at| idle.remove(at))
    }

    /// Calls something with the device's context as the current one.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> Result<T> {
        let _entered = self.enter()?;
        Ok(call())
    }

    /// Makes the device's context the current one of this thread, until the result is dropped.
    fn enter(&self) -> Result<Entered> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the context lives as long as the process; the mode is written back into the
        // variable.
        unsafe {
            self.check("entering the device", sys::cuCtxPushCurrent_v2(self.context))?;
            // Nothing that happens here belongs to a graph that another thread captures, and
            // nothing of it may spoil that graph.
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut mode);
        }
        Ok(Entered { mode })
    }
}

/// The current context of a thread, to be put back as it was.
struct Entered {
    mode: sys::CUstreamCaptureMode,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut before = ptr::null_mut();
        // SAFETY: undoes what `enter` did on this thread; both variables are only written to.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut self.mode);
            let _ = sys::cuCtxPopCurrent_v2(&mut before);
        }
    }
}

fn check(device: &str, what: &str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: gives a pointer to a constant of the driver, or leaves the null.
    unsafe {
        let _ = sys::cuGetErrorString(code, &mut text);
    }
    let said = if text.is_null() {
        format!("error {code:?}")
    } else {
        // SAFETY: not null, so a constant of the driver that ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Device { device: device.to_owned(), what: format!("{what}: {said}") })
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> bool {
        let Ok(_entered) = self.enter() else { return false };
        // For all devices of the process, because all of them share the pool.
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise that the memory stays mapped.
        let code = unsafe { sys::cuMemHostRegister_v2(memory.cast(), len, flags) };
        code == sys::CUresult::CUDA_SUCCESS
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        if let Ok(_entered) = self.enter() {
            // SAFETY: the caller's promise that it was pinned. What fails here leaves it pinned
            // until the process ends, which costs memory only.
            let _ = unsafe { sys::cuMemHostUnregister(memory.cast()) };
        }
    }

    #[cfg(target_os = "linux")]
    fn file(self: Arc<Self>, file: &std::fs::File) -> Option<Box<dyn super::DeviceFile>> {
        let file = super::gds::GdsFile::open(self, file)?;
        Some(Box::new(file))
    }

    fn stream(self: Arc<Self>, consumer: Consumer) -> Result<Arc<dyn Stream>> {
        let _entered = self.enter()?;
        let consumer = RawStream(ptr::with_exposed_provenance_mut(consumer.0));
        let mut capture = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the consumer's stream is torch's and open, or null for the default one; the
        // status is written to the variable.
        let code = unsafe { sys::cuStreamIsCapturing(consumer.0, &mut capture) };
        self.check("asking for the current stream", code)?;
        if capture != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::InvalidArgument(format!(
                "{}: the current stream captures a CUDA graph, of which loading and saving cannot \
                 be part: do it before the capture",
                self.name
            )));
        }
        let own = match self.idle() {
            Some(own) => own,
            None => {
                let mut own = ptr::null_mut();
                let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
                // SAFETY: the new stream is written to the variable.
                let code = unsafe { sys::cuStreamCreate(&mut own, flags) };
                self.check("creating a stream", code)?;
                RawStream(own)
            }
        };
        let stream = CudaStream { device: Arc::clone(&self), own, consumer };
        // What the consumer has begun may still use the memory that we are to fill or read.
        stream.wait_for(consumer, own)?;
        Ok(Arc::new(stream))
    }
}

/// One of our streams, on loan.
struct CudaStream {
    device: Arc<CudaDevice>,
    own: RawStream,
    consumer: RawStream,
}

impl CudaStream {
    fn mark(&self, stream: RawStream) -> Result<CudaEvent> {
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the new event is written to the variable.
        let code = unsafe { sys::cuEventCreate(&mut raw, flags) };
        self.device.check("creating an event", code)?;
        let event = CudaEvent { device: Arc::clone(&self.device), raw };
        // SAFETY: both are open and of this context.
        let code = unsafe { sys::cuEventRecord(event.raw, stream.0) };
        self.device.check("recording an event", code)?;
        Ok(event)
    }

    /// Has what is put on `later` from now on wait for what was put on `sooner` until now.
    fn wait_for(&self, sooner: RawStream, later: RawStream) -> Result<()> {
        let event = self.mark(sooner)?;
        // SAFETY: both are open; a driver keeps an event that is waited for beyond its end.
        let code = unsafe { sys::cuStreamWaitEvent(later.0, event.raw, 0) };
        self.device.check("ordering streams", code)
    }
}

impl Drop for CudaStream {
    /// Copies may still be under way: the stream is given to nobody before they have ended.
    fn drop(&mut self) {
        self.device.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.own);
    }
}

impl Stream for CudaStream {
    fn handle(&self) -> usize {
        self.own.0.expose_provenance()
    }

    unsafe fn upload(&self, to: usize, from: *const u8, len: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        let to = to as sys::CUdeviceptr;
        // SAFETY: the caller's promise about both ranges.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, self.own.0) };
        self.device.check("copying to the device", code)
    }

    unsafe fn download(&self, to: *mut u8, from: usize, len: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        let from = from as sys::CUdeviceptr;
        // SAFETY: the caller's promise about both ranges.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, self.own.0) };
        self.device.check("copying from the device", code)
    }

    fn record(&self) -> Result<Box<dyn Event>> {
        let _entered = self.device.enter()?;
        Ok(Box::new(self.mark(self.own)?))
    }

    fn hand_over(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        self.wait_for(self.own, self.consumer)
    }

    fn finish(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream is open.
        let code = unsafe { sys::cuStreamSynchronize(self.own.0) };
        self.device.check("waiting for copies", code)
    }
}

struct CudaEvent {
    device: Arc<CudaDevice>,
    raw: sys::CUevent,
}

// SAFETY: events may be used on any thread in whose current context they are.
unsafe impl Send for CudaEvent {}

impl Event for CudaEvent {
    fn passed(&self) -> Result<bool> {
        let _entered = self.device.enter()?;
        // SAFETY: the event is open.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.device.check("copying", code).map(|()| true),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: open, and nobody else knows it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
