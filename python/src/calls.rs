//! The calls of a thread: what they wait for, and what ends them.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use pyo3::exceptions::{PyGeneratorExit, PyStopIteration, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use tensorizer::error::{Error, Result};
use tensorizer::stats::Counters;
use tensorizer::traffic::{self, Traffic};
use tensorizer::{ForkSafeMutex, PerProcess};

use crate::errors::Outcome;
use crate::reports::{set_fields, since_1970};
use crate::{gil, logs};

/// The interval at which a thread checks for signals: a check takes the GIL, which other threads
/// may hold for long.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which progress is reported while nothing arrives.
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// The work of a part of a call that writes.
pub const SAVING: &str = "saving";

/// A call that is under way.
struct Running {
    /// The name of the function.
    function: String,
    saves: bool,
    begun: SystemTime,
    /// The work that it waits for, its file, and the time since when.
    waiting: ForkSafeMutex<(String, String, SystemTime)>,
    counters: Counters,
    /// Reports progress to the caller.
    heartbeat: ForkSafeMutex<Option<Py<PyAny>>>,
}

impl Running {
    fn describe(&self) -> String {
        let failure = self.counters.traffic().last_failure();
        let failure = failure.map_or(String::new(), |it| format!("; the last failure was: {it}"));
        self.waiting.lock().0.clone() + &failure
    }
}

type RunningCalls = ForkSafeMutex<Vec<Arc<Running>>>;

static RUNNING: PerProcess<RunningCalls> = PerProcess::new();

/// The end of a time limit, and its seconds.
type TimeLimit = (Instant, f64);

thread_local! {
    static CURRENT: RefCell<Option<Arc<Running>>> = const { RefCell::new(None) };
    static LIMIT: Cell<Option<TimeLimit>> = const { Cell::new(None) };
    static LAST_CHECK: Cell<Option<Instant>> = const { Cell::new(None) };
    static LAST_HEARTBEAT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Looks at the call that this thread is in, if it is in one.
fn current<T>(look: impl FnOnce(&Running) -> T) -> Option<T> {
    CURRENT.with_borrow(|running| running.as_deref().map(look))
}

/// True once this interval has passed since the last time.
fn is_due(last: Option<Instant>, interval: Duration) -> bool {
    last.is_none_or(|last| last.elapsed() >= interval)
}

fn time_limit(seconds: f64) -> TimeLimit {
    let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    // A limit of centuries is none.
    let far = || Instant::now() + Duration::from_secs(u32::MAX.into());
    (Instant::now().checked_add(time).unwrap_or_else(far), seconds)
}

/// This thread is in a call until this is dropped, on the same thread.
pub struct Entered {
    /// The call, and the list that it is in, unless this is a part of another call.
    outermost: Option<(Arc<Running>, &'static RunningCalls)>,
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
    // A file that is finished while a load ends has a time of its own.
    let is_other = current(|running| !running.saves) == Some(true);
    let applies = outer_limit.filter(|_| !(saves && is_other));
    let earliest = |one: TimeLimit, other: TimeLimit| if one.0 < other.0 { one } else { other };
    LIMIT.set(applies.zip(limit).map(|(o, l)| earliest(o, l)).or(limit).or(applies));
    let traffic = traffic.map_or_else(traffic::current, Arc::clone);
    let outer_traffic = traffic::set_current(Some(traffic));
    let outermost = CURRENT.with_borrow(Option::is_none).then(|| {
        let begun = SystemTime::now();
        let running = Arc::new(Running {
            function: function.to_owned(),
            saves,
            begun,
            waiting: ForkSafeMutex::new(("beginning".to_owned(), String::new(), begun)),
            counters: Counters::default(),
            heartbeat: ForkSafeMutex::default(),
        });
        let all = RUNNING.get();
        all.lock().push(Arc::clone(&running));
        CURRENT.set(Some(Arc::clone(&running)));
        LAST_HEARTBEAT.set(Some(Instant::now()));
        (running, all)
    });
    Entered { outermost, outer_limit, outer_traffic }
}

/// Begins a part of a call that reads or writes a file, for some seconds at most.
pub fn enter_part(
    what: &'static str,
    uri: &str,
    seconds: Option<f64>,
    traffic: &Arc<Traffic>,
) -> Entered {
    let entered = enter(what, what == SAVING, seconds.map(time_limit), Some(traffic));
    waits_for(format!("{what} `{uri}`"), uri);
    entered
}

/// Begins a part of a call that ends it, and has no time limit.
pub fn enter_end() -> Entered {
    let (outer_limit, current) = (LIMIT.replace(None), traffic::current());
    Entered { outermost: None, outer_limit, outer_traffic: traffic::set_current(Some(current)) }
}

/// Notes what the call of this thread waits for from now on, and of which file.
pub fn waits_for(what: String, uri: &str) {
    current(|running| *running.waiting.lock() = (what, uri.to_owned(), SystemTime::now()));
}

impl Entered {
    /// True if this is not a part of another call.
    pub fn is_outermost(&self) -> bool {
        self.outermost.is_some()
    }

    /// Publishes the failure of the call, unless it is a part of another call.
    pub fn failed(&self, error: &dyn std::fmt::Display) {
        if let Some((running, _)) = &self.outermost {
            let Running { saves, waiting, counters, .. } = &**running;
            let what = if *saves { "save" } else { "load" };
            counters.publish_failure(what, &waiting.lock().1, error.to_string());
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        LIMIT.set(self.outer_limit);
        traffic::set_current(self.outer_traffic.take());
        if let Some((running, all)) = &self.outermost {
            CURRENT.set(None);
            all.lock().retain(|other| !Arc::ptr_eq(other, running));
        }
    }
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
            let what = "timeout must be a positive number of seconds or None, not";
            return Err(PyValueError::new_err(format!("{what} {seconds}")));
        }
        let (limit, entered) = (seconds.map(time_limit), ForkSafeMutex::default());
        Ok(Call { function, saves, limit, entered })
    }

    fn __enter__(&self) {
        *self.entered.lock() = Some(enter(&self.function, self.saves, self.limit, None));
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyType>>,
        error: Option<&Bound<'_, PyAny>>,
        _trace: &Bound<'_, PyAny>,
    ) {
        let entered = self.entered.lock().take();
        let ends = [py.get_type::<PyStopIteration>(), py.get_type::<PyGeneratorExit>()];
        let is_end = kind.is_some_and(|kind| ends.iter().any(|end| kind.is(end)));
        if let (Some(entered), Some(error), false) = (&entered, error, is_end) {
            entered.failed(error);
        }
    }
}

/// Makes a callable report the progress of the call that this thread is in.
#[pyfunction]
pub fn set_heartbeat(callback: Py<PyAny>) {
    current(|running| *running.heartbeat.lock() = Some(callback));
}

/// Returns what can be seen of the calls that are under way.
#[pyfunction]
pub fn running(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let row = |running: Arc<Running>| {
        let (out, count) = (PyDict::new(py), running.counters.traffic().count(false));
        set_fields!(out, running, function);
        set_fields!(out, count, requests retries network_bytes);
        out.set_item("begun", since_1970(running.begun))?;
        out.set_item("waits_for", running.describe())?;
        let (_, uri, since) = &*running.waiting.lock();
        out.set_item("uri", uri)?;
        out.set_item("since", since_1970(*since))?;
        Ok(out)
    };
    let all = RUNNING.get().lock().clone();
    all.into_iter().map(row).collect()
}

/// Returns the seconds until the time limit of the call that this thread is in; None without one.
#[pyfunction]
pub fn time_left() -> Option<f64> {
    LIMIT.get().map(|(end, _)| end.saturating_duration_since(Instant::now()).as_secs_f64())
}

/// Ends a call whose time limit has passed.
fn check_limit() -> Result<()> {
    let Some((_, seconds)) = LIMIT.get().filter(|(end, _)| *end <= Instant::now()) else {
        return Ok(());
    };
    let found = current(|running| (running.function.clone(), running.describe()));
    let (function, waits) = found.unwrap_or(("call".to_owned(), String::new()));
    let what = format!("{function}: timeout={seconds} s passed while {waits}");
    Err(Error::Caller(Box::new(PyTimeoutError::new_err(what))))
}

/// Checks with the GIL what ends a call. True if nothing waits for the result of one that reads.
fn check_with_gil(py: Python<'_>, reads: bool) -> PyResult<bool> {
    static IS_ENDING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    py.check_signals()?;
    logs::warn_of_repeats(py)?;
    let heartbeat = current(|running| Some(running.heartbeat.lock().as_ref()?.clone_ref(py)));
    let is_late = is_due(LAST_HEARTBEAT.get(), HEARTBEAT);
    if let Some(heartbeat) = heartbeat.flatten().filter(|_| is_late) {
        LAST_HEARTBEAT.set(Some(Instant::now()));
        heartbeat.call0(py)?;
    }
    if !reads || gil::is_main() {
        return Ok(false);
    }
    let is_ending = IS_ENDING.get_or_try_init(py, || {
        py.import("tensorizer._calls")?.getattr("is_ending").map(Bound::unbind)
    })?;
    is_ending.call0(py)?.extract(py)
}

fn check(reads: bool) -> Result<()> {
    if !is_due(LAST_CHECK.get(), CHECK_INTERVAL) {
        return Ok(());
    }
    check_limit()?;
    let found = match gil::with(|py| check_with_gil(py, reads)) {
        // The thread that ends the interpreter also finishes files that were never closed: it goes
        // on.
        Ok(Ok(false)) | Err(_) => Ok(()),
        Ok(Ok(true)) => {
            let what = "the call was ended, because the program ends and nothing waits for it";
            Err(Error::Closed(what.to_owned()))
        }
        Ok(Err(error)) => Err(Error::Caller(Box::new(error))),
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

/// The same for Python code that waits for other members of a group, or for its own threads.
#[pyfunction]
pub fn check_wait(what: &str) -> Outcome<()> {
    let saves = current(|running| {
        let mut waiting = running.waiting.lock();
        if waiting.0 != what {
            (waiting.0, waiting.2) = (what.to_owned(), SystemTime::now());
        }
        running.saves
    });
    Ok(check(saves != Some(true))?)
}

/// Does the same for operators, whose errors are text only: their caller sees a `RuntimeError`.
pub fn signals_in_operator(saves: bool) -> Result<()> {
    check(!saves).map_err(|_| Error::Cancelled)
}
