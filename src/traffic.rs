//! The requests of one call to its servers: they are counted, and repeated ones are reported.
#![cfg_attr(not(any(feature = "http", feature = "redis")), allow(dead_code))]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// Minimum time between two reports of one call.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Reports that wait for a caller that logs them. A program without one loses further ones.
const MAX_REPORTS: usize = 64;

/// The counters of a call, which all of its sources and sinks share.
#[derive(Debug, Default)]
pub struct Traffic {
    requests: AtomicU64,
    retries: AtomicU64,
    network_bytes: AtomicU64,
    /// The last failure after which a request was repeated, and the time of the last report.
    last: ForkSafeMutex<Option<(String, Instant)>>,
    /// Bytes per second; 0 for no limit.
    limit: AtomicU64,
    /// The time at which the bytes so far are allowed.
    allowed: ForkSafeMutex<Option<Instant>>,
}

/// The time for which a call may be ahead of its limit.
const BURST: Duration = Duration::from_millis(100);

/// The counters at one time.
#[derive(Debug, Clone, Copy)]
pub struct TrafficCount {
    /// Requests to servers, repeated ones included.
    pub requests: u64,
    /// Requests that repeat a failed one.
    pub retries: u64,
    /// Bytes of bodies that servers have sent or taken.
    pub network_bytes: u64,
}

/// A request that has failed and is repeated.
#[derive(Debug, Clone, thiserror::Error)]
#[error("`{uri}`: {error}; repeated at byte {byte}, try {attempt} of {limit}")]
pub struct RepeatedRequest {
    /// The address, without its secrets.
    pub uri: String,
    /// The failure.
    pub error: String,
    /// The number of the next attempt.
    pub attempt: u32,
    /// The most attempts, or the time for which it is repeated.
    pub limit: String,
    /// The next byte wanted.
    pub byte: u64,
}

static REPORTS: ForkSafeMutex<Vec<RepeatedRequest>> = ForkSafeMutex::new(Vec::new());

/// Takes the reports of repeated requests that were not taken before.
pub fn take_reports() -> Vec<RepeatedRequest> {
    std::mem::take(&mut *REPORTS.lock())
}

impl Traffic {
    /// Counts a request.
    pub(crate) fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes of bodies.
    pub(crate) fn bytes(&self, bytes: u64) {
        self.network_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Limits the bytes per second of the call.
    pub fn set_limit(&self, bytes_per_second: u64) {
        self.limit.store(bytes_per_second, Ordering::Relaxed);
    }

    /// The same, unless there is a limit.
    pub(crate) fn set_default_limit(&self, bytes_per_second: u64) {
        let relaxed = Ordering::Relaxed;
        let _ = self.limit.compare_exchange(0, bytes_per_second, relaxed, relaxed);
    }

    /// The pause after some bytes of bodies, so that the limit is kept: that of a token bucket.
    pub(crate) fn pause_after(&self, bytes: u64) -> Option<Duration> {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == 0 {
            return None;
        }
        let (now, mut allowed) = (Instant::now(), self.allowed.lock());
        let from = allowed.map_or(now, |allowed| allowed.max(now));
        #[allow(clippy::cast_precision_loss)] // A pause need not be exact.
        let until = from + Duration::from_secs_f64(bytes as f64 / limit as f64);
        *allowed = Some(until);
        until.duration_since(now).checked_sub(BURST)
    }

    /// Counts a request that is repeated, and reports it unless another one was just reported.
    pub(crate) fn repeated(&self, request: RepeatedRequest) {
        self.retries.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last.lock();
        let reported = last.as_ref().map(|(_, at)| *at);
        let is_due = reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL);
        let now = reported.filter(|_| !is_due).unwrap_or_else(Instant::now);
        *last = Some((request.error.clone(), now));
        let mut reports = REPORTS.lock();
        if is_due && reports.len() < MAX_REPORTS {
            reports.push(request);
        }
    }

    /// The failure after which a request was repeated last.
    pub fn last_failure(&self) -> Option<String> {
        Some(self.last.lock().as_ref()?.0.clone())
    }

    /// The counters; `take`: they begin again at 0.
    pub fn count(&self, take: bool) -> TrafficCount {
        let count = |counter: &AtomicU64| {
            if take { counter.swap(0, Ordering::Relaxed) } else { counter.load(Ordering::Relaxed) }
        };
        let [requests, retries, network_bytes] =
            [&self.requests, &self.retries, &self.network_bytes].map(count);
        TrafficCount { requests, retries, network_bytes }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Traffic>>> = const { RefCell::new(None) };
}

/// The traffic of the call that this thread makes; new traffic if there is no call.
pub fn current() -> Arc<Traffic> {
    CURRENT.with_borrow(Option::clone).unwrap_or_else(Arc::default)
}

/// Makes some traffic that of the call that this thread makes, and returns the earlier one.
pub fn set_current(traffic: Option<Arc<Traffic>>) -> Option<Arc<Traffic>> {
    CURRENT.replace(traffic)
}
