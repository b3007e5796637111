//! The functions of the CUDA driver that are called here, with cudarc's types and constants.
//! `unsafe` is allowed in this file: it calls the driver.
//!
//! The driver is opened at run time, so that the same library serves machines with and without one.
//! It is opened only as `libcuda.so.1`, as torch does. cudarc's own loader is not used. It tries
//! `libcuda.so` first, which may be a stub for linking whose functions all fail. An error code that
//! its enumeration does not know would also be undefined behaviour.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
pub use cudarc::driver::sys::{
    CUcontext as Context, CUdeviceptr as Address, CUevent as Event, CUstream as Stream,
};

use super::library::Library;
use crate::sys::process::PerProcess;

/// `CUresult`, as an integer: a newer driver may return errors that are not known here.
pub type ResultCode = c_int;
/// No error.
pub const SUCCESS: ResultCode = sys::CUresult::CUDA_SUCCESS as ResultCode;
/// The queried stream or event has not finished.
pub const NOT_READY: ResultCode = sys::CUresult::CUDA_ERROR_NOT_READY as ResultCode;
/// Capture mode of a thread whose calls are allowed while another thread captures a graph.
pub const CAPTURE_RELAXED: c_int =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
/// Status of a stream that captures no graph.
pub const NOT_CAPTURING: c_int = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int;
/// Flag of a stream that does not synchronise with the default stream.
pub const NON_BLOCKING: c_uint = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
/// Flag of an event that records no time.
pub const WITHOUT_TIMING: c_uint = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
/// Flag of memory that is pinned for the contexts of all devices.
pub const FOR_ALL_DEVICES: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE;

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)+) => {
        /// The driver's functions.
        pub struct Driver {
            /// Begins several copies with one call; None with drivers before CUDA 12.8.
            pub copy_batch: Option<CopyBatch>,
            $(
                #[doc = concat!("`", $symbol, "`.")]
                pub $field: unsafe extern "C" fn($($argument),*) -> ResultCode,
            )+
        }

        impl Driver {
            fn open() -> Result<Self, &'static str> {
                // SAFETY: the driver's initialisers may run at any time. Each function has the
                // type that `cuda.h` gives it, since CUDA 10.1 and in all later versions.
                unsafe {
                    let library = Library::open(c"libcuda.so.1")
                        .ok_or("the CUDA driver (libcuda.so.1) was not found")?;
                    $(
                        let name = concat!($symbol, "\0").as_bytes();
                        let $field = std::ffi::CStr::from_bytes_with_nul(name)
                            .ok()
                            .and_then(|name| library.find(name))
                            .ok_or(concat!(
                                "the CUDA driver (libcuda.so.1) has no function ", $symbol,
                                ": update the driver"
                            ))?;
                    )+
                    let copy_batch = CopyBatch::find(library);
                    Ok(Driver { copy_batch, $($field),+ })
                }
            }
        }
    };
}

/// `cuMemcpyBatchAsync` in its two forms: CUDA 13 has dropped the index of the copy that failed.
#[derive(Clone, Copy)]
pub enum CopyBatch {
    /// The form of CUDA 13.
    V2(CopyBatchV2),
    /// The form of CUDA 12.8.
    V1(CopyBatchV1),
}

type CopyBatchV2 = unsafe extern "C" fn(
    *mut Address,
    *mut Address,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    Stream,
) -> ResultCode;
type CopyBatchV1 = unsafe extern "C" fn(
    *mut Address,
    *mut Address,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    Stream,
) -> ResultCode;

impl CopyBatch {
    /// # Safety
    /// The library is the driver's.
    unsafe fn find(library: Library) -> Option<Self> {
        // SAFETY: both functions have the types that `cuda.h` gives them, in all versions that have
        // them.
        unsafe {
            let newer = library.find(c"cuMemcpyBatchAsync_v2").map(CopyBatch::V2);
            newer.or_else(|| library.find(c"cuMemcpyBatchAsync").map(CopyBatch::V1))
        }
    }

    /// Begins copies on a stream, which may run in any order. The three lists are of one length.
    ///
    /// # Safety
    /// As for `cuMemcpyHtoDAsync`, for each of them; the lists are not empty.
    pub unsafe fn call(
        self,
        to: &mut [Address],
        from: &mut [Address],
        lens: &mut [usize],
        stream: Stream,
    ) -> ResultCode {
        let here = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            // Hints for managed memory only.
            srcLocHint: here,
            dstLocHint: here,
            flags: 0,
        };
        let (mut first, mut failed) = (0, 0);
        let count = to.len().min(from.len()).min(lens.len());
        let (to, from, lens) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr());
        // SAFETY: `count` elements of each list exist; one set of attributes, from the first copy
        // on.
        unsafe {
            match self {
                CopyBatch::V2(call) => {
                    call(to, from, lens, count, &mut attributes, &mut first, 1, stream)
                }
                CopyBatch::V1(call) => {
                    call(to, from, lens, count, &mut attributes, &mut first, 1, &mut failed, stream)
                }
            }
        }
    }
}

functions! {
    init = "cuInit" (c_uint);
    error_text = "cuGetErrorString" (ResultCode, *mut *const c_char);
    device = "cuDeviceGet" (*mut c_int, c_int);
    bus_id = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut Context, c_int);
    push_context = "cuCtxPushCurrent_v2" (Context);
    pop_context = "cuCtxPopCurrent_v2" (*mut Context);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_int);
    register_memory = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unregister_memory = "cuMemHostUnregister" (*mut c_void);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, Stream);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, Address, usize, Stream);
    create_stream = "cuStreamCreate" (*mut Stream, c_uint);
    query_stream = "cuStreamQuery" (Stream);
    is_capturing = "cuStreamIsCapturing" (Stream, *mut c_int);
    wait_for_event = "cuStreamWaitEvent" (Stream, Event, c_uint);
    synchronize = "cuStreamSynchronize" (Stream);
    create_event = "cuEventCreate" (*mut Event, c_uint);
    record_event = "cuEventRecord" (Event, Stream);
    query_event = "cuEventQuery" (Event);
    destroy_event = "cuEventDestroy_v2" (Event);
}

/// Returns the driver of this process, or why there is none.
pub fn driver() -> Result<&'static Driver, &'static str> {
    static DRIVER: PerProcess<OnceLock<Result<Driver, &'static str>>> = PerProcess::new();
    DRIVER.get().get_or_init(Driver::open).as_ref().map_err(|why| *why)
}
