//! The failure of a request, and whether it is repeated.

use std::io::{self, ErrorKind};
use std::time::Duration;

use crate::error::Error;

/// The time for which a failed request is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Repeat {
    /// Not at all: another attempt would fail, too.
    Never,
    /// For a number of attempts: another one may succeed.
    Attempts,
    /// For as long as the request may take: the server asks for patience.
    Time,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    pub error: io::Error,
    /// The time for which the request is repeated.
    pub repeat: Repeat,
    /// A new signature may help, once: credentials or a signed URL have expired, or the bucket is
    /// in another region.
    pub renewable: bool,
    /// The status of the response, if there was one.
    pub status: Option<u16>,
    /// The pause that the server asked for.
    pub retry_after: Option<Duration>,
    /// The error with which the caller has ended the call.
    pub ended: Option<Error>,
}

impl Failure {
    /// A permanent failure: a retry would fail, too.
    pub fn permanent(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        let error = io::Error::new(kind, what.into());
        let (repeat, renewable) = (Repeat::Never, false);
        Failure { error, repeat, renewable, status: None, retry_after: None, ended: None }
    }

    /// A transient failure: a retry may succeed.
    pub fn transient(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Failure { repeat: Repeat::Attempts, ..Self::permanent(kind, what) }
    }

    /// A cancelled call.
    pub fn ended(error: Error) -> Self {
        Failure { ended: Some(error), ..Self::permanent(io::ErrorKind::Interrupted, "ended") }
    }

    /// The same failure, repeated for so long.
    pub fn with_repeat(self, repeat: Repeat) -> Self {
        Failure { repeat, ..self }
    }

    /// The same failure; `renewable`: a new signature may help.
    pub fn if_renewable(self, renewable: bool) -> Self {
        Failure { renewable, ..self }
    }

    /// The same failure, of a request to the target of an earlier redirect. A refusal there is
    /// retried from the first address.
    pub fn if_redirected(self, redirected: bool) -> Self {
        use io::ErrorKind::{InvalidInput, NotFound, Other, PermissionDenied};
        let refused =
            matches!(self.error.kind(), NotFound | PermissionDenied | Other | InvalidInput);
        if redirected && refused && self.repeat == Repeat::Never {
            return Failure { repeat: Repeat::Attempts, ..self };
        }
        self
    }

    /// True if the caller has ended the call.
    pub fn is_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// The same failure with another text.
    pub fn with_text(self, what: String) -> Self {
        Failure { error: io::Error::new(self.error.kind(), what), ..self }
    }

    /// A copy of the failure, for libraries that return only references to errors.
    pub fn copy(&self) -> Self {
        let error = io::Error::new(self.error.kind(), self.error.to_string());
        let Failure { repeat, renewable, status, retry_after, .. } = *self;
        Failure { error, repeat, renewable, status, retry_after, ended: None }
    }
}

/// An address in a message: without user, password, query and fragment, which may be secrets.
pub fn show_text(address: &str) -> &str {
    if address.contains('@') {
        return "...";
    }
    address.split(['?', '#']).next().unwrap_or(address)
}

/// The failure to look up the name of a server, if the text of an error tells of one. It is not that
/// of a missing file, after which callers would look for another one.
pub fn lookup_failure(text: &str) -> Option<Failure> {
    let lower = text.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    if !has(&["dns error", "failed to lookup", "name or service"]) {
        return None;
    }
    if has(&["temporary failure", "try again"]) {
        let what = format!("the name of the server cannot be looked up at present: {text}");
        return Some(Failure::transient(ErrorKind::HostUnreachable, what));
    }
    let what = format!("the name of the server is not known: {text}; check the address");
    Some(Failure::permanent(ErrorKind::HostUnreachable, what))
}

/// The failure of a socket that this machine refuses to open or to connect, as its firewall or a
/// sandbox may. It is not retried, and is not the refusal of a server, after which callers would
/// look for another file.
pub fn refused_socket(kind: ErrorKind, text: &str) -> Option<Failure> {
    (kind == ErrorKind::PermissionDenied).then(|| {
        let what = format!("this machine refuses the connection: {text}; check its firewall");
        Failure::permanent(ErrorKind::ConnectionRefused, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_lookup_is_repeated_only_if_it_may_succeed_later() {
        let of = |text: &str| lookup_failure(&format!("dns error: {text}")).unwrap();
        let unknown = of("failed to lookup address information: Name or service not known");
        assert!(
            unknown.repeat == Repeat::Never
                && unknown.error.to_string().contains("check the address")
        );
        let later =
            of("failed to lookup address information: Temporary failure in name resolution");
        assert_eq!(later.repeat, Repeat::Attempts);
        for failure in [unknown, later] {
            assert_eq!(failure.error.kind(), ErrorKind::HostUnreachable);
        }
        assert!(lookup_failure("connection refused").is_none());
    }

    #[test]
    fn a_socket_that_the_machine_refuses_is_not_retried() {
        for errno in [1, 13] {
            let error = io::Error::from_raw_os_error(errno);
            let failure = refused_socket(error.kind(), &error.to_string()).unwrap();
            assert_eq!(failure.repeat, Repeat::Never);
            assert_eq!(failure.error.kind(), ErrorKind::ConnectionRefused);
            assert!(failure.error.to_string().contains("this machine refuses"), "{failure}");
        }
        assert!(refused_socket(ErrorKind::ConnectionReset, "").is_none());
    }
}
