//! What decides which credentials a cloud's chain finds, and what is known of them in this process.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::environment::reading;
use crate::sys::process::PerProcess;
use crate::sys::{Stamp, stamp};

/// Places of which something is kept.
const MOST_KNOWN: usize = 16;

/// Variables of the environment, and files that they name, at one moment.
#[derive(PartialEq, Eq, Hash)]
pub struct Place {
    name: String,
    variables: Vec<(OsString, OsString)>,
    files: Vec<(PathBuf, Option<Stamp>)>,
}

impl Place {
    /// That of now: `counts` says which variables are looked at, `files` which files they name.
    pub fn now(
        name: String,
        counts: impl Fn(&[u8]) -> bool,
        files: impl FnOnce(&Place) -> Vec<PathBuf>,
    ) -> Self {
        reading(move || {
            let mut variables: Vec<_> =
                std::env::vars_os().filter(|(name, _)| counts(name.as_encoded_bytes())).collect();
            variables.sort();
            let mut place = Place { name, variables, files: Vec::new() };
            let stamped = files(&place).into_iter().map(|path| {
                let found = stamp(&path);
                (path, found)
            });
            place.files = stamped.collect();
            place
        })
    }

    /// What tells it from others with the same variables.
    #[cfg(feature = "s3")]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What a variable is set to.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        let mut all = self.variables.iter();
        all.find(|(found, _)| found == name).map(|(_, value)| value.as_os_str())
    }

    /// The variables that are text, and not empty, without space around it.
    #[cfg(feature = "clouds")]
    pub fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        let texts = self.variables.iter();
        let texts = texts.filter_map(|(name, to)| Some((name.to_str()?, to.to_str()?.trim())));
        texts.filter(|(_, value)| !value.is_empty())
    }

    /// Whether the environment is still as it was.
    #[cfg(feature = "s3")]
    pub fn has_the_variables_of(&self, other: &Place) -> bool {
        self.variables == other.variables
    }
}

/// What is known of places in this process. One that was forked off finds it out anew.
pub struct Places<T: 'static>(PerProcess<Mutex<Kept<T>>>);

type Kept<T> = HashMap<Arc<Place>, Arc<T>>;

impl<T: Default + Send + Sync> Places<T> {
    pub const fn new() -> Self {
        Places(PerProcess::new())
    }

    /// What is known of a place.
    pub fn of(&'static self, place: &Arc<Place>) -> Arc<T> {
        let mut all = locked(self.0.get());
        if all.len() >= MOST_KNOWN && !all.contains_key(place) {
            all.clear();
        }
        Arc::clone(all.entry(Arc::clone(place)).or_default())
    }
}

/// A lock of what stays sound whoever panics.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
