//! The calls of a thread: what they wait for, and what ends them.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use pyo3::exceptions::{PyGeneratorExit, PyStopIteration, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use tensorizer::ForkSafeMutex;
use tensorizer::error::{Error, Result};
use tensorizer::stats::Counters;
use tensorizer::traffic::{self, Traffic};

use crate::errors::Outcome;
use crate::reports::since_1970;
use crate::{gil, logs};

/// The interval at which a thread checks for signals: a check takes the GIL, which other threads
/// may hold for long.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The work of a part of a call that writes.
pub const SAVING: &str = "saving";
/// The interval at which progress is reported while nothing arrives.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// The time limit of a call.
#[derive(Debug, Clone, Copy)]
struct TimeLimit {
    end: Instant,
    seconds: f64,
}

/// A call that is under way.
struct Running {
    /// The name of the function.
    function: String,
    begun: SystemTime,
    waiting: ForkSafeMutex<Waiting>,
    traffic: Arc<Traffic>,
    /// Reports progress to the caller.
    heartbeat: ForkSafeMutex<Option<Py<PyAny>>>,
}

/// The work that a call waits for.
struct Waiting {
    what: &'static str,
    uri: String,
    since: SystemTime,
}

impl Running {
    fn describe(&self) -> String {
        let waiting = self.waiting.lock();
        let uri =
            if waiting.uri.is_empty() { String::new() } else { format!(" `{}`", waiting.uri) };
        let failure = self.traffic.last_failure();
        let failure = failure.map_or(String::new(), |it| format!("; the last failure was: {it}"));
        format!("{}{uri}{failure}", waiting.what)
    }
}

static RUNNING: ForkSafeMutex<Vec<Arc<Running>>> = ForkSafeMutex::new(Vec::new());

thread_local! {
    static CURRENT: RefCell<Option<Arc<Running>>> = const { RefCell::new(None) };
    static LIMIT: Cell<Option<TimeLimit>> = const { Cell::new(None) };
    static LAST_CHECK: Cell<Option<Instant>> = const { Cell::new(None) };
    static LAST_HEARTBEAT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// This thread is in a call until this is dropped, on the same thread.
pub struct Entered {
    /// The call and its counters, unless it is a part of another call.
    outermost: Option<(Arc<Running>, Counters)>,
    saves: bool,
    outer_limit: Option<TimeLimit>,
    outer_traffic: Option<Arc<Traffic>>,
}

/// Begins a call of a function, or a part of the call that this thread is in. `traffic`: that of the
/// file that was opened before.
fn enter(
    function: &str,
    saves: bool,
    limit: Option<TimeLimit>,
    traffic: Option<&Arc<Traffic>>,
) -> Entered {
    let outer_limit = LIMIT.get();
    let earlier = |limit: TimeLimit| match outer_limit {
        Some(outer) if outer.end < limit.end => outer,
        _ => limit,
    };
    LIMIT.set(limit.map(earlier).or(outer_limit));
    let is_outermost = CURRENT.with_borrow(Option::is_none);
    let traffic = traffic.map_or_else(traffic::current, Arc::clone);
    let outer_traffic = traffic::set_current(Some(Arc::clone(&traffic)));
    let outermost = is_outermost.then(|| {
        let begun = SystemTime::now();
        let waiting = Waiting { what: "beginning", uri: String::new(), since: begun };
        let (function, waiting) = (function.to_owned(), ForkSafeMutex::new(waiting));
        let heartbeat = ForkSafeMutex::default();
        let running = Arc::new(Running { function, begun, waiting, traffic, heartbeat });
        RUNNING.lock().push(Arc::clone(&running));
        CURRENT.set(Some(Arc::clone(&running)));
        LAST_HEARTBEAT.set(Some(Instant::now()));
        (running, Counters::default())
    });
    Entered { outermost, saves, outer_limit, outer_traffic }
}

/// Begins a part of a call that reads or writes a file.
pub fn enter_part(
    what: &'static str,
    uri: &str,
    seconds: Option<f64>,
    traffic: &Arc<Traffic>,
) -> Entered {
    let limit = seconds.map(TimeLimit::of);
    let entered = enter(what, what == SAVING, limit, Some(traffic));
    waits_for(what, uri);
    entered
}

impl TimeLimit {
    fn of(seconds: f64) -> Self {
        let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let now = Instant::now();
        // A limit of centuries is none.
        let end = now.checked_add(time).unwrap_or(now + Duration::from_secs(u32::MAX.into()));
        TimeLimit { end, seconds }
    }
}

impl Entered {
    /// True if this is not a part of another call.
    pub fn is_outermost(&self) -> bool {
        self.outermost.is_some()
    }

    /// Publishes the failure of the call, unless it is a part of another call.
    pub fn failed(&self, error: &dyn std::fmt::Display) {
        let Some((running, counters)) = &self.outermost else { return };
        let uri = running.waiting.lock().uri.clone();
        counters.publish_failure(if self.saves { "save" } else { "load" }, &uri, error.to_string());
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        LIMIT.set(self.outer_limit);
        traffic::set_current(self.outer_traffic.take());
        if let Some((running, _)) = &self.outermost {
            CURRENT.set(None);
            RUNNING.lock().retain(|other| !Arc::ptr_eq(other, running));
        }
    }
}

/// Notes what the call of this thread waits for from now on, such as `opening`, and of which file.
pub fn waits_for(what: &'static str, uri: &str) {
    CURRENT.with_borrow(|running| {
        if let Some(running) = running {
            let (uri, since) = (uri.to_owned(), SystemTime::now());
            *running.waiting.lock() = Waiting { what, uri, since };
        }
    });
}

/// A call of a function of Python as a context manager. It may be entered again, one thread at a
/// time; its time limit counts from the beginning.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Call {
    function: String,
    saves: bool,
    limit: Option<TimeLimit>,
    entered: ForkSafeMutex<Option<Entered>>,
}

#[pymethods]
impl Call {
    #[new]
    #[pyo3(signature = (function, seconds, saves = false))]
    fn new(function: String, seconds: Option<f64>, saves: bool) -> PyResult<Self> {
        if let Some(seconds) = seconds.filter(|seconds| seconds.is_nan() || *seconds <= 0.0) {
            let what =
                format!("timeout must be a positive number of seconds or None, not {seconds}");
            return Err(PyValueError::new_err(what));
        }
        let limit = seconds.map(TimeLimit::of);
        Ok(Call { function, saves, limit, entered: ForkSafeMutex::default() })
    }

    fn __enter__(&self) {
        *self.entered.lock() = Some(enter(&self.function, self.saves, self.limit, None));
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyType>>,
        error: Option<&Bound<'_, PyAny>>,
        _trace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let entered = self.entered.lock().take();
        let is_end = |kind: &Bound<'_, PyType>| {
            let ends = [py.get_type::<PyStopIteration>(), py.get_type::<PyGeneratorExit>()];
            ends.iter().any(|end| kind.is(end))
        };
        if let (Some(entered), Some(error)) = (&entered, error)
            && !kind.is_some_and(is_end)
        {
            entered.failed(error);
        }
        Ok(())
    }
}

/// Makes a callable report the progress of the call that this thread is in.
#[pyfunction]
pub fn set_heartbeat(callback: Py<PyAny>) {
    CURRENT.with_borrow(|running| {
        if let Some(running) = running {
            *running.heartbeat.lock() = Some(callback);
        }
    });
}

/// Returns what can be seen of the calls that are under way.
#[pyfunction]
pub fn running(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let all = RUNNING.lock().clone();
    let row = |running: Arc<Running>| {
        let out = PyDict::new(py);
        let (waits_for, count) = (running.describe(), running.traffic.count(false));
        let waiting = running.waiting.lock();
        out.set_item("function", &running.function)?;
        out.set_item("begun", since_1970(running.begun))?;
        out.set_item("uri", &waiting.uri)?;
        out.set_item("waits_for", waits_for)?;
        out.set_item("since", since_1970(waiting.since))?;
        out.set_item("requests", count.requests)?;
        out.set_item("retries", count.retries)?;
        out.set_item("network_bytes", count.network_bytes)?;
        Ok(out)
    };
    all.into_iter().map(row).collect()
}

/// Ends a call whose time limit has passed.
fn check_limit() -> Result<()> {
    let Some(limit) = LIMIT.get().filter(|limit| limit.end <= Instant::now()) else {
        return Ok(());
    };
    let what = CURRENT.with_borrow(|running| {
        let running = running.as_ref();
        let function = running.map_or("call", |running| &running.function);
        let waits = running.map_or_else(String::new, |running| running.describe());
        format!("{function}: timeout={} s passed while {waits}", limit.seconds)
    });
    Err(Error::Caller(Box::new(PyTimeoutError::new_err(what))))
}

/// Checks with the GIL what ends a call; `reads`: also whether its result is still wanted.
fn check_with_gil(py: Python<'_>, reads: bool) -> PyResult<bool> {
    py.check_signals()?;
    logs::warn_of_repeats(py)?;
    let now = Instant::now();
    let heartbeat = CURRENT.with_borrow(|running| {
        let heartbeat = running.as_ref()?.heartbeat.lock();
        Some(heartbeat.as_ref()?.clone_ref(py))
    });
    let is_due = |last: Instant| now.duration_since(last) >= HEARTBEAT;
    if let Some(heartbeat) = heartbeat.filter(|_| LAST_HEARTBEAT.get().is_none_or(is_due)) {
        LAST_HEARTBEAT.set(Some(now));
        heartbeat.call0(py)?;
    }
    static IS_ENDING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if !reads || gil::is_main() {
        return Ok(false);
    }
    let is_ending = IS_ENDING.get_or_try_init(py, || {
        py.import("tensorizer.file.ends")?.getattr("is_ending").map(Bound::unbind)
    })?;
    is_ending.call0(py)?.extract(py)
}

fn check(reads: bool) -> Result<()> {
    if LAST_CHECK.get().is_some_and(|last_check| last_check.elapsed() < CHECK_INTERVAL) {
        return Ok(());
    }
    check_limit()?;
    let found = match gil::with(|py| check_with_gil(py, reads)) {
        Ok(Ok(false)) => Ok(()),
        Ok(Ok(true)) => Err(Error::Closed(
            "the call was ended, because the program ends and nothing waits for it".to_owned(),
        )),
        Ok(Err(error)) => Err(Error::Caller(Box::new(error))),
        // The thread that ends the interpreter also finishes files that were never closed: it goes
        // on.
        Err(_) => Ok(()),
    };
    LAST_CHECK.set(Some(Instant::now()));
    found
}

/// Checks whether a call that reads is to end: by Ctrl-C, its time limit, or the end of the program.
/// Long work calls it at intervals.
pub fn signals() -> Result<()> {
    check(true)
}

/// The same for a call that writes, which goes on while the interpreter ends.
pub fn signals_in_save() -> Result<()> {
    check(false)
}

/// The same for Python code that waits; `what` it does.
#[pyfunction]
pub fn check_wait() -> Outcome<()> {
    waits_for("waiting for the other members of the group", "");
    Ok(signals()?)
}

/// Does the same for operators, whose errors are text only: their caller sees a `RuntimeError`.
pub fn signals_in_operator(saves: bool) -> Result<()> {
    check(!saves).map_err(|_| Error::Cancelled)
}
