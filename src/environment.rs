//! The one table of the environment variables that set options, and access to the environment.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sys::fork_safe_mutex::ForkSafeMutex;

/// A guard: calls a function while, for example, no thread changes the environment.
pub type Guard = fn(&mut dyn FnMut());

static GUARD: OnceLock<Guard> = OnceLock::new();

/// Sets the guard under which the environment is read. It keeps the program from changing its
/// environment meanwhile, which would be a data race in C. Only the first call counts.
pub fn set_guard(guard: Guard) {
    GUARD.get_or_init(|| guard);
}

/// Runs code that reads the environment, within the guard.
pub fn read_guarded<T>(body: impl FnOnce() -> T) -> T {
    run_guarded(GUARD.get(), body)
}

/// Runs code within a guard. Without a guard, or if the guard does not run it, it is run without
/// one.
pub fn run_guarded<T>(guard: Option<&Guard>, body: impl FnOnce() -> T) -> T {
    let (mut body, mut result) = (Some(body), None);
    let mut run = || {
        if let Some(body) = body.take() {
            result = Some(body());
        }
    };
    if let Some(guard) = guard {
        guard(&mut run);
    }
    run();
    match result {
        Some(result) => result,
        None => unreachable!("it has run"),
    }
}

/// An environment variable that holds a number. It is read once, at its first use.
pub struct NumberVariable {
    text: ForkSafeMutex<Option<String>>,
    /// Its name.
    pub name: &'static str,
    /// The value that holds if it is not set.
    pub default: u64,
    /// The values that it can have.
    pub range: RangeInclusive<u64>,
    /// The option that it sets, with the unit.
    pub meaning: &'static str,
}

/// Any number.
const ANY: RangeInclusive<u64> = 0..=u64::MAX;
/// A time limit in seconds, of at most 31 days, so that sums cannot overflow.
const TIME: RangeInclusive<u64> = 0..=31 * 24 * 60 * 60;
/// The smallest time limit.
const SHORTEST: Duration = Duration::from_millis(10);

impl NumberVariable {
    /// Its value, or its default if it is not set; an error if that is not a whole number of its
    /// range.
    pub fn value(&self) -> Result<u64> {
        let integer = self.text().parse().ok().filter(|number| self.range.contains(number));
        integer.ok_or_else(|| {
            let (least, most) = (self.range.start(), self.range.end());
            self.invalid(&match (*least, *most) {
                (0, u64::MAX) => "a whole number".to_owned(),
                (_, u64::MAX) => format!("a whole number of at least {least}"),
                _ => format!("a whole number from {least} to {most}"),
            })
        })
    }

    /// Its value as a time in seconds, which may have a fraction.
    pub fn seconds(&self) -> Result<Duration> {
        let longest = Duration::from_secs(*self.range.end());
        let seconds = self.text().parse().ok().and_then(|of| Duration::try_from_secs_f64(of).ok());
        seconds.filter(|time| (SHORTEST..=longest).contains(time)).ok_or_else(|| {
            self.invalid(&format!("a number of seconds from 0.01 to {}", self.range.end()))
        })
    }

    fn text(&self) -> String {
        let cached = self.text.lock().clone();
        // Read without the lock: the thread that holds the guard may be waiting for it.
        let read = || match variable(self.name) {
            Some(text) => text.to_string_lossy().trim().to_owned(),
            None => self.default.to_string(),
        };
        let text = cached.unwrap_or_else(read);
        self.text.lock().get_or_insert(text).clone()
    }

    fn invalid(&self, what: &str) -> Error {
        let NumberVariable { name, meaning, .. } = self;
        let what = format!("the environment variable {name} must be {what}: {meaning}");
        Error::InvalidArgument(what)
    }
}

/// An environment variable that holds a text, such as the name of a folder. It is read at each use.
pub struct TextVariable {
    /// Its name.
    pub name: &'static str,
    /// The default, as the documentation shows it.
    pub default: &'static str,
    /// The option that it sets.
    pub meaning: &'static str,
}

impl TextVariable {
    /// Its value; None if it is not set, or empty.
    pub fn value(&self) -> Option<OsString> {
        variable(self.name)
    }

    /// Its value as a text.
    #[cfg(feature = "s3")]
    pub fn text(&self) -> Option<String> {
        Some(self.value()?.to_string_lossy().into_owned())
    }

    /// This variable, or `other` if this one is not set.
    pub fn or<'t>(&'t self, other: &'t TextVariable) -> &'t TextVariable {
        if self.value().is_some() { self } else { other }
    }

    /// Its value as a path, with the user's home folder in place of a leading `~`.
    pub fn path(&self) -> Option<PathBuf> {
        expand_home(self.value()?.into())
    }

    /// The same path, with the values of variables in place of `$NAME` and `${NAME}`.
    pub fn expanded(&self) -> Option<PathBuf> {
        let path = expand_home(self.value()?.into())?;
        let value = |name: &str| read_guarded(|| std::env::var(name)).ok();
        let expanded = path.to_str().map(|text| PathBuf::from(expand(text, value)));
        Some(expanded.unwrap_or(path))
    }

    /// True if its value means yes.
    pub fn is_true(&self) -> bool {
        let value = self.value().map(|value| value.to_ascii_uppercase());
        value.is_some_and(|value| ["1", "ON", "YES", "TRUE"].iter().any(|yes| value == *yes))
    }
}

/// The value of a variable; None if it is not set, or empty.
pub fn variable(name: &str) -> Option<OsString> {
    read_guarded(|| std::env::var_os(name)).filter(|text| !text.is_empty())
}

/// A path with the user's home folder in place of a leading `~`.
pub fn expand_home(path: PathBuf) -> Option<PathBuf> {
    match path.strip_prefix("~") {
        Ok(rest) => Some(home()?.join(rest)),
        Err(_) => Some(path),
    }
}

/// Replaces the names of variables in a text by their values; names without a value stay.
fn expand(text: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let mut parts = text.split('$');
    let mut found = parts.next().unwrap_or("").to_owned();
    for part in parts {
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let (name, rest) = match part.strip_prefix('{').and_then(|part| part.split_once('}')) {
            Some(braced) => braced,
            None => part
                .split_at_checked(part.find(|letter: char| !is_name(letter)).unwrap_or(part.len()))
                .unwrap_or(("", part)),
        };
        match value(name).filter(|_| !name.is_empty()) {
            Some(value) => found.push_str(&(value + rest)),
            None => found.extend(["$", part]),
        }
    }
    found
}

/// The user's home folder.
pub fn home() -> Option<PathBuf> {
    variable("HOME").map(PathBuf::from)
}

macro_rules! texts {
    ($($constant:ident = $name:literal, $default:literal, $meaning:literal;)+) => {
        $(
            #[doc = $meaning]
            pub static $constant: TextVariable =
                TextVariable { name: $name, default: $default, meaning: $meaning };
        )+

        /// All of them. `docs/reference/environment.md` has the same table.
        pub static TEXTS: &[&TextVariable] = &[$(&$constant),+];
    };
}

texts! {
    CACHE = "TENSORIZER_CACHE", "none",
        "the folder of the cache for files of HTTP, S3, Google, Azure and Hugging Face servers; none: no cache";
    CACHE_OFFLINE = "TENSORIZER_CACHE_OFFLINE", "0",
        "1: complete copies in the cache are used, with a warning, without asking their servers whether they are current; other files are an error";
    S3_ENDPOINT = "TENSORIZER_S3_ENDPOINT", "none",
        "the host or address of the server for `s3://`, if neither the call, `~/.s3cfg` nor the settings of AWS give one";
    S3_ADDRESSING_STYLE = "TENSORIZER_S3_ADDRESSING_STYLE", "auto",
        "where the addresses of an S3 endpoint have the bucket: `virtual`, in the host's name, `path`, or `auto`";
    S3_ENCRYPTION = "TENSORIZER_S3_ENCRYPTION", "none",
        "the encryption that the server of `s3://` is asked to use for uploads, such as `AES256` or `aws:kms`";
    S3_KMS_KEY_ID = "TENSORIZER_S3_KMS_KEY_ID", "none", "the id of the key of that encryption";
    CLIENT_CERT = "TENSORIZER_CLIENT_CERT", "none",
        "a PEM file with the certificate, and those between it and its authority, that a server is shown if it asks for one";
    CLIENT_KEY = "TENSORIZER_CLIENT_KEY", "none",
        "a PEM file with the key of that certificate, if it is not in the same file";
    HF_ENDPOINT = "HF_ENDPOINT", "`https://huggingface.co`", "the address of the hub for `hf://`";
    HF_TOKEN = "HF_TOKEN", "none", "the token for this hub; no other server gets it";
    HF_TOKEN_PATH = "HF_TOKEN_PATH", "`$HF_HOME/token`", "a file with that token";
    HF_NO_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN", "0", "1: no token is sent";
    HF_HOME = "HF_HOME", "`~/.cache/huggingface`", "the folder of Hugging Face's own client";
    HF_CACHE = "HF_HUB_CACHE", "`$HF_HOME/hub`",
        "the files that this client has downloaded; tensorizer reads them, and never changes them";
    HF_OFFLINE = "HF_HUB_OFFLINE", "0", "1: no requests to the hub; only files that were downloaded are read";
    OLD_TOKEN = "HUGGING_FACE_HUB_TOKEN", "none", "the same as `HF_TOKEN`, if that is not set";
    OLD_CACHE = "HUGGINGFACE_HUB_CACHE", "none", "the same as `HF_HUB_CACHE`, if that is not set";
    OLD_OFFLINE = "TRANSFORMERS_OFFLINE", "0", "the same as `HF_HUB_OFFLINE`, if that is not set";
    LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE", "1",
        "set by launchers such as `torchrun`: the number of processes of one job on this machine, which usually load the same files";
    XDG_CACHE = "XDG_CACHE_HOME", "`~/.cache`", "the folder that has `huggingface`, the default of `HF_HOME`";
}

/// Makes all variables be read again at their next use, for tests.
pub fn clear_cache() {
    for variable in VARIABLES {
        *variable.text.lock() = None;
    }
}

macro_rules! variables {
    ($($constant:ident = $name:literal, $default:expr, $range:expr, $meaning:literal;)+) => {
        $(
            #[doc = $meaning]
            pub static $constant: NumberVariable =
                NumberVariable {
                    text: ForkSafeMutex::new(None),
                    name: $name,
                    default: $default,
                    range: $range,
                    meaning: $meaning,
                };
        )+

        /// All of them. `docs/reference/environment.md` has the same table.
        pub static VARIABLES: &[&NumberVariable] = &[$(&$constant),+];
    };
}

variables! {
    ATTEMPTS = "TENSORIZER_ATTEMPTS", 6, 1..=u64::MAX, "attempts for one request, the first included; those that brought 64 KiB, and those that a busy server (408, 429, 503) refused, do not count";
    CONNECT_SECONDS = "TENSORIZER_CONNECT_SECONDS", 20, TIME, "timeout for opening a connection";
    STALL_SECONDS = "TENSORIZER_STALL_SECONDS", 30, TIME, "timeout while a server sends nothing";
    TOTAL_SECONDS = "TENSORIZER_TOTAL_SECONDS", 300, TIME,
        "timeout for all attempts of one request; each 64 KiB transferred adds one second";
    MAX_BYTES_PER_SECOND = "TENSORIZER_MAX_BYTES_PER_SECOND", 0, ANY,
        "bytes per second that a call may receive from servers, or send to them; 0: no limit";
    UPLOAD_MB = "TENSORIZER_UPLOAD_MB", 0, ANY,
        "memory for the parts of an upload, in MiB: less memory allows fewer connections; 0: as much as they need";
    MEMORY_LIMIT_MB = "TENSORIZER_MEMORY_LIMIT_MB", 0, ANY,
        "memory that a call may use in addition to its tensors, in MiB, unless it has a `memory_limit`; 0: as much as it needs";
    CACHE_GB = "TENSORIZER_CACHE_GB", 0, ANY,
        "maximum size of that folder, in GB: the least recently used files are removed first; 0: all but 5 % of its disk";
    PINNED_MB = "TENSORIZER_PINNED_MB", 256, ANY,
        "pinned host memory that the loads to and saves from one CUDA device share, in MiB";
    STAGING_KB = "TENSORIZER_STAGING_KB", 2052, 2052..=65536,
        "size of one buffer of that memory, which is copied at once, in KiB: 2052 to 65536";
    IN_FLIGHT_MB = "TENSORIZER_IN_FLIGHT_MB", 64, ANY,
        "copies in flight, in MiB, beyond which readers wait and take no more of that memory";
    STREAMS = "TENSORIZER_STREAMS", 2, 1..=16, "CUDA streams over which the copies of a call are distributed: 1 to 16";
    NUM_READERS = "TENSORIZER_NUM_READERS", 0, ANY,
        "readers of local files, connections of a load from a server and of an upload, unless the call has a `num_readers`; 0: chosen automatically";
    DIRECT_IO = "TENSORIZER_DIRECT_IO", 1, 0..=2,
        "whether loads read files that are not in the page cache with direct reads (`O_DIRECT`): 1, unless `LOCAL_WORLD_SIZE` or `group=` says that several processes of this machine load; 2, always; 0, never";
    NUMA = "TENSORIZER_NUMA", 1, 0..=1,
        "whether the pinned memory and the readers of loads to a CUDA device are placed on its NUMA node: 1 or 0";
    GDS = "TENSORIZER_GDS", 0, 0..=1,
        "whether loads to CUDA try GPUDirect Storage for local files: 1 or 0";
}

/// Variables of the build, the tests and the benchmarks, and of a name that 2.x had.
const OTHERS: &[&str] = &[
    "TENSORIZER_CLOUDS",
    "TENSORIZER_ENABLE_PERF_STATS",
    "TENSORIZER_OLD_PYTHON",
    "TENSORIZER_TEST_COSTS",
    "TENSORIZER_TORCH",
    "TENSORIZER_WHEEL_FOR",
];

/// Returns a warning about the variables `TENSORIZER_*` that are set and have no effect, such as
/// misspelt ones; None if there are none.
pub fn unknown_variables() -> Option<String> {
    let set = read_guarded(|| std::env::vars_os().map(|(name, _)| name).collect::<Vec<_>>());
    warning_of_unknown(set.iter().filter_map(|name| name.to_str()))
}

fn warning_of_unknown<'n>(set: impl Iterator<Item = &'n str>) -> Option<String> {
    let numbers = VARIABLES.iter().map(|variable| variable.name);
    let known: Vec<&str> = numbers.chain(TEXTS.iter().map(|text| text.name)).collect();
    let is_known = |name: &&str| known.contains(name) || OTHERS.contains(name);
    // Kubernetes sets such variables for a service of this name.
    let of_service =
        |name: &&str| name.contains("_SERVICE_") || format!("{name}_").contains("_PORT_");
    let mut unknown: Vec<&str> = set
        .filter(|name| name.starts_with("TENSORIZER_") && !is_known(name) && !of_service(name))
        .collect();
    unknown.sort_unstable();
    let described = unknown.iter().map(|name| {
        let nearest = known.iter().min_by_key(|other| edits(name, other));
        match nearest.filter(|other| edits(name, other) <= MOST_EDITS) {
            Some(other) => format!("{name} (the nearest known name is {other})"),
            None => (*name).to_owned(),
        }
    });
    let described: Vec<String> = described.collect();
    (!described.is_empty()).then(|| {
        format!(
            "tensorizer has no environment variable of this name, and ignores it: {}; see \
             docs/reference/environment.md",
            described.join(", ")
        )
    })
}

/// The most edits between a name and one that may have been meant.
const MOST_EDITS: usize = 4;

/// Returns the number of characters to insert, remove or replace to make one text of the other.
fn edits(from: &str, to: &str) -> usize {
    // The first column is not stored.
    let mut row: Vec<usize> = (1..=to.len()).collect();
    for (index, left) in from.bytes().enumerate() {
        let (mut diagonal, mut before) = (index, index + 1);
        for (cell, right) in row.iter_mut().zip(to.bytes()) {
            before = (diagonal + usize::from(left != right)).min(*cell + 1).min(before + 1);
            diagonal = std::mem::replace(cell, before);
        }
    }
    row.last().copied().unwrap_or(from.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_in_a_path_are_expanded() {
        let value = |name: &str| (name == "A_1").then(|| "$v".to_owned());
        for (text, expected) in [
            ("/a/$A_1/b", "/a/$v/b"),
            ("${A_1}x$A_1", "$vx$v"),
            ("$A_1x $B ${B} $ $$ ${A_1", "$A_1x $B ${B} $ $$ ${A_1"),
            ("", ""),
        ] {
            assert_eq!(expand(text, value), expected);
        }
    }

    #[test]
    fn a_misspelt_variable_is_named_with_the_nearest_known_one() {
        let warn = |names: &[&str]| warning_of_unknown(names.iter().copied());
        let said = warn(&["HOME", "TENSORIZER_NUM_READER", "TENSORIZER_BUFFERED_LOADS"]).unwrap();
        assert!(
            said.contains(
                "TENSORIZER_NUM_READER (the nearest known name is TENSORIZER_NUM_READERS)"
            )
        );
        assert!(said.contains("TENSORIZER_BUFFERED_LOADS,"), "{said}");
        // Another setting is no hint.
        assert!(!warn(&["TENSORIZER_CONNECTIONS"]).unwrap().contains("nearest"));
        let known =
            ["TENSORIZER_NUM_READERS", "TENSORIZER_CACHE", "TENSORIZER_TORCH", "tensorizer_x"];
        assert_eq!(warn(&known), None);
        let service = ["TENSORIZER_SERVICE_HOST", "TENSORIZER_PORT", "TENSORIZER_X_PORT_80_TCP"];
        assert_eq!(warn(&service), None);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let with = |variable: &'static NumberVariable, text: &str| NumberVariable {
            text: ForkSafeMutex::new(Some(text.to_owned())),
            range: variable.range.clone(),
            ..*variable
        };
        for (variable, least, most) in
            [(&STAGING_KB, 2052, 65536), (&STREAMS, 1, 16), (&DIRECT_IO, 0, 2), (&NUMA, 0, 1)]
        {
            assert_eq!(with(variable, &least.to_string()).value().unwrap(), least);
            assert_eq!(with(variable, &most.to_string()).value().unwrap(), most);
            let beyond = (most + 1).to_string();
            let error = with(variable, &beyond).value().unwrap_err().to_string();
            let expected = format!("must be a whole number from {least} to {most}");
            assert!(error.contains(variable.name) && error.contains(&expected), "{error}");
        }
        assert!(with(&ATTEMPTS, "0").value().is_err());
        assert!(with(&ATTEMPTS, "").value().is_err());
        for (text, millis) in [("0.01", 10), ("2678400", 2_678_400_000), ("5e0", 5000)] {
            let expected = Duration::from_millis(millis);
            assert_eq!(with(&STALL_SECONDS, text).seconds().unwrap(), expected);
        }
        for text in ["0", "0.009", "2678400.001", "-1", "nan", "inf", "", "1 s"] {
            let error = with(&STALL_SECONDS, text).seconds().unwrap_err().to_string();
            assert!(error.contains("a number of seconds from 0.01 to 2678400"), "{error}");
        }
    }

    #[test]
    fn the_document_lists_all_variables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/environment.md");
        let document = std::fs::read_to_string(path).unwrap();
        let numbers = VARIABLES.iter().map(|NumberVariable { name, default, meaning, .. }| {
            format!("| `{name}` | {default} | {meaning} |")
        });
        let texts = TEXTS.iter().map(|TextVariable { name, default, meaning }| {
            format!("| `{name}` | {default} | {meaning} |")
        });
        for line in numbers.chain(texts) {
            assert!(document.contains(&line), "{line}");
        }
    }
}
