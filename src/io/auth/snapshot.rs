//! Snapshots of the environment: the variables and files that decide which credentials are found.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::environment::read_guarded;
use crate::sys::process::PerProcess;
use crate::sys::sync::unpoisoned;
use crate::sys::{FileStamp, file_stamp};

/// The most snapshots for which something is cached.
const MAX_CACHED: usize = 16;

/// Variables of the environment, and the state of files that they name, at one moment.
#[derive(PartialEq, Eq, Hash)]
pub struct Snapshot {
    scope: String,
    variables: Vec<(OsString, OsString)>,
    files: Vec<(PathBuf, Option<FileStamp>)>,
}

impl Snapshot {
    /// Takes a snapshot of the variables for which `is_relevant` is true, and of the files whose
    /// paths `files` returns for it. Snapshots of different scopes are never equal.
    pub fn take(
        scope: String,
        is_relevant: impl Fn(&[u8]) -> bool,
        files: impl FnOnce(&Snapshot) -> Vec<PathBuf>,
    ) -> Self {
        let mut snapshot = Snapshot { scope, variables: Vec::new(), files: Vec::new() };
        let paths = read_guarded(|| {
            let variables = std::env::vars_os();
            let relevant = variables.filter(|(name, _)| is_relevant(name.as_encoded_bytes()));
            snapshot.variables.extend(relevant);
            snapshot.variables.sort();
            files(&snapshot)
        });
        // Without the guard, which holds Python's lock: a file may be on a server that is gone.
        let stamped = paths.into_iter().map(|path| (file_stamp(&path), path));
        snapshot.files = stamped.map(|(stamp, path)| (path, stamp)).collect();
        snapshot
    }

    /// The value of a variable.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        let mut all = self.variables.iter();
        all.find(|(found, _)| found == name).map(|(_, value)| value.as_os_str())
    }

    /// The variables that are text and not empty, without spaces around them.
    #[cfg(feature = "clouds")]
    pub fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        let texts = self.variables.iter();
        let texts = texts.filter_map(|(name, to)| Some((name.to_str()?, to.to_str()?.trim())));
        texts.filter(|(_, value)| !value.is_empty())
    }

    /// True if the variables of both are the same.
    #[cfg(feature = "s3")]
    pub fn has_same_variables(&self, other: &Snapshot) -> bool {
        self.variables == other.variables
    }
}

/// Values cached for each snapshot in this process. A forked child starts without any.
pub struct PerSnapshot<T: 'static>(PerProcess<Mutex<HashMap<Arc<Snapshot>, Arc<T>>>>);

impl<T: Default + Send + Sync> PerSnapshot<T> {
    pub const fn new() -> Self {
        PerSnapshot(PerProcess::new())
    }

    /// The value of a snapshot; a new one if there was none.
    pub fn get(&'static self, snapshot: &Arc<Snapshot>) -> Arc<T> {
        let mut all = unpoisoned(self.0.get().lock());
        if all.len() >= MAX_CACHED && !all.contains_key(snapshot) {
            all.clear();
        }
        Arc::clone(all.entry(Arc::clone(snapshot)).or_default())
    }
}
