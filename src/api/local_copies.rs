//! Local copies of a server's files, which may be damaged.

use std::sync::Arc;

use super::file::TensorFile;
use crate::error::{Error, Result};
use crate::io::{LocalCopy, ReadAt};

impl TensorFile {
    /// Runs some work on its files. See [`with_intact_copies`]. Work that has found a tensor whose
    /// data must not be cut runs again, and cuts none.
    pub(super) fn with_intact_copies<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        let work = || {
            let uncut = self.has_long_pieces();
            match work() {
                Err(Error::Crypt(_)) if uncut != self.has_long_pieces() && self.is_seekable() => {
                    work()
                }
                done => done,
            }
        };
        with_intact_copies(&|error| self.suspects(error), work)
    }

    /// Returns the files whose bytes an error may be about.
    fn suspects(&self, error: &Error) -> Vec<Arc<dyn ReadAt>> {
        let sources = self.sources();
        let number = match error {
            Error::Format { uri, .. } | Error::Truncated { uri, .. } => {
                sources.iter().position(|source| source.uri() == uri)
            }
            Error::HashMismatch { name, .. } => {
                let entry = self.entries().iter().find(|entry| entry.name.to_string() == *name);
                entry.map(|entry| entry.file)
            }
            _ => None,
        };
        match number {
            Some(number) => sources.get(number).cloned().into_iter().collect(),
            None => sources.to_vec(),
        }
    }
}

/// Runs some work. If it fails because local copies of a server's files are damaged, removes these
/// copies and runs the work once more with bytes from the server.
pub fn with_intact_copies<T>(
    suspects: &dyn Fn(&Error) -> Vec<Arc<dyn ReadAt>>,
    mut work: impl FnMut() -> Result<T>,
) -> Result<T> {
    let error = match work() {
        Err(error) if may_be_damage(&error) => error,
        done => return done,
    };
    // A wrong key causes the same error as damage. The second run, with bytes from the server,
    // distinguishes them.
    let sure = !matches!(error, Error::Crypt(_));
    let sources = suspects(&error);
    // After the first call, the facts are those of the server.
    let found: Vec<LocalCopy> =
        sources.iter().filter_map(|source| source.facts().local_copy().cloned()).collect();
    let discard = |copy: &&LocalCopy, remove: bool| {
        copy.discard.as_ref().is_some_and(|discard| discard(remove))
    };
    let copies: Vec<&LocalCopy> = found.iter().filter(|copy| discard(copy, sure)).collect();
    if copies.is_empty() {
        return Err(error);
    }
    sources.iter().filter_map(|source| source.facts().pin.as_ref()).for_each(|pin| pin.reset());
    let second_run = work();
    if second_run.is_ok() && !sure {
        for copy in &found {
            discard(&copy, true);
        }
    }
    second_run.map_err(|second_run| {
        if may_be_damage(&second_run) {
            second_run
        } else {
            not_fetched(&copies, &error, second_run)
        }
    })
}

/// Returns the file that is being opened, if an error is about it and not about another file that
/// it names.
pub fn suspects_of_open(source: &Arc<dyn ReadAt>, error: &Error) -> Vec<Arc<dyn ReadAt>> {
    let other = match error {
        Error::Format { uri, .. } | Error::Truncated { uri, .. } => uri != source.uri(),
        _ => false,
    };
    if other { Vec::new() } else { vec![Arc::clone(source)] }
}

fn may_be_damage(error: &Error) -> bool {
    matches!(
        error,
        Error::HashMismatch { .. }
            | Error::Format { .. }
            | Error::Truncated { .. }
            | Error::Crypt(_)
    )
}

/// Returns the error for a damaged copy whose bytes could not be fetched again.
fn not_fetched(copies: &[&LocalCopy], damage: &Error, second_run: Error) -> Error {
    let Error::Io { action, uri, error } = second_run else { return second_run };
    let copies: Vec<String> =
        copies.iter().map(|copy| format!("`{}`", copy.path.display())).collect();
    let what = format!(
        "{error}; the cached copy {} was damaged and has been removed: {damage}",
        copies.join(", ")
    );
    Error::io(action, &uri, std::io::Error::new(error.kind(), what))
}
