//! The environment that credentials come from. Their providers are kept per process while it stays
//! the same.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::provider::CredentialProvider;
use crate::environment::read_guarded;
use crate::sys::process::PerProcess;
use crate::sys::sync::unpoisoned;
use crate::sys::{FileStamp, file_stamp};

/// The most environments for which something is kept.
const MAX_KEPT: usize = 16;

/// Variables, and the state of files that they name, at one moment.
#[derive(PartialEq, Eq, Hash)]
pub struct CredentialEnvironment {
    scope: String,
    pub(super) variables: Vec<(OsString, OsString)>,
    files: Vec<(PathBuf, Option<FileStamp>)>,
}

impl CredentialEnvironment {
    /// Reads `HOME` and the variables whose names begin with one of `names`, and the state of the
    /// files whose paths `files` returns for them. Those of different scopes are never equal.
    pub fn read(
        scope: String,
        names: &[&str],
        files: impl FnOnce(&CredentialEnvironment) -> Vec<PathBuf>,
    ) -> Arc<Self> {
        let mut read = CredentialEnvironment { scope, variables: Vec::new(), files: Vec::new() };
        let paths = read_guarded(|| {
            let is_relevant = |name: &OsStr| {
                let mut begins = names.iter().map(|begin| begin.as_bytes());
                name == "HOME" || begins.any(|begin| name.as_encoded_bytes().starts_with(begin))
            };
            read.variables.extend(std::env::vars_os().filter(|(name, _)| is_relevant(name)));
            read.variables.sort();
            files(&read)
        });
        // Without the guard, which holds Python's lock: a file may be on a server that is gone.
        let stamped = paths.into_iter().map(|path| (file_stamp(&path), path));
        read.files = stamped.map(|(stamp, path)| (path, stamp)).collect();
        Arc::new(read)
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

    /// The value of such a variable.
    #[cfg(feature = "clouds")]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.texts().find(|(found, _)| *found == name).map(|(_, value)| value)
    }
}

/// Values kept for each environment in this process. A forked child starts without any.
pub struct PerEnvironment<T: 'static>(
    PerProcess<Mutex<HashMap<Arc<CredentialEnvironment>, Arc<T>>>>,
);

impl<T: Send + Sync> PerEnvironment<T> {
    pub const fn new() -> Self {
        PerEnvironment(PerProcess::new())
    }

    /// The value of an environment, made if there was none.
    pub fn get(
        &'static self,
        environment: &Arc<CredentialEnvironment>,
        make: impl FnOnce() -> T,
    ) -> Arc<T> {
        let mut all = unpoisoned(self.0.get().lock());
        if all.len() >= MAX_KEPT && !all.contains_key(environment) {
            all.clear();
        }
        let kept = all.entry(Arc::clone(environment));
        Arc::clone(kept.or_insert_with(|| Arc::new(make())))
    }
}

/// The credential providers.
pub static PROVIDERS: PerEnvironment<CredentialProvider> = PerEnvironment::new();
