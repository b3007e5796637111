//! The failure of a request, and whether it is repeated.

use std::fmt;
use std::io::{self, ErrorKind};
use std::time::Duration;

use crate::error::Error;

/// The time for which a failed request is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// Not at all: another attempt would fail, too.
    Never,
    /// For a number of attempts: another one may succeed.
    Attempts,
    /// For as long as the request may take: the server asks for patience.
    Time,
}

/// Why a request failed.
#[derive(Debug)]
pub struct Failure {
    pub error: io::Error,
    repeat: Repeat,
    /// A new signature may help, once: credentials or a signed URL have expired, or the bucket is
    /// in another region.
    renewable: bool,
    /// The status of the response, if there was one.
    status: Option<u16>,
    /// The pause that the server asked for.
    retry_after: Option<Duration>,
    /// The error with which the caller has ended the call.
    ended: Option<Error>,
}

impl Failure {
    /// A permanent failure: a retry would fail, too.
    pub fn permanent(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        let error = io::Error::new(kind, what.into());
        Failure {
            error,
            repeat: Repeat::Never,
            renewable: false,
            status: None,
            retry_after: None,
            ended: None,
        }
    }

    /// A transient failure: a retry may succeed.
    pub fn transient(kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Failure { repeat: Repeat::Attempts, ..Self::permanent(kind, what) }
    }

    /// The failure of a server that is too busy for this request.
    pub fn busy(what: impl Into<String>) -> Self {
        Failure { repeat: Repeat::Time, ..Self::permanent(io::ErrorKind::Other, what) }
    }

    /// A cancelled call.
    pub fn ended(error: Error) -> Self {
        Failure { ended: Some(error), ..Self::permanent(io::ErrorKind::Interrupted, "ended") }
    }

    /// The same failure with the pause that the server asked for.
    pub fn retry_after(self, retry_after: Option<Duration>) -> Self {
        Failure { retry_after, ..self }
    }

    /// The same failure, by a response of this status.
    pub fn with_status(self, status: u16) -> Self {
        Failure { status: Some(status), ..self }
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
        use io::ErrorKind::{NotFound, Other, PermissionDenied};
        let refused = matches!(self.error.kind(), NotFound | PermissionDenied | Other);
        if redirected && refused && self.repeat == Repeat::Never {
            return Failure { repeat: Repeat::Attempts, ..self };
        }
        self
    }

    /// The time for which the request is repeated.
    pub fn repeat(&self) -> Repeat {
        self.repeat
    }

    /// The status of the response, if there was one.
    pub fn status(&self) -> Option<u16> {
        self.status
    }

    /// The pause that the server asks for.
    pub fn asked_pause(&self) -> Option<Duration> {
        self.retry_after
    }

    /// True if a new signature may help.
    pub fn is_renewable(&self) -> bool {
        self.renewable
    }

    /// True if the caller has ended the call.
    pub fn is_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// The error of a call that ends with this failure; `action` is a gerund.
    pub fn into_error(self, action: &'static str, display_address: &str) -> Error {
        self.ended.unwrap_or_else(|| Error::io(action, display_address, self.error))
    }

    /// The same failure with another text.
    #[cfg(any(feature = "clouds", feature = "s3"))]
    pub fn with_text(self, what: String) -> Self {
        Failure { error: io::Error::new(self.error.kind(), what), ..self }
    }

    /// A copy of the failure, for libraries that return only references to errors.
    #[cfg(feature = "http")]
    pub fn copy(&self) -> Self {
        let error = io::Error::new(self.error.kind(), self.error.to_string());
        let Failure { repeat, renewable, status, retry_after, .. } = *self;
        Failure { error, repeat, renewable, status, retry_after, ended: None }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Failure {}

/// The failure to look up the name of a server, if the text of an error tells of one. It is not that
/// of a missing file, after which callers would look for another one.
pub fn lookup_failure(text: &str) -> Option<Failure> {
    let lower = text.to_lowercase();
    if !["dns error", "failed to lookup", "name or service"].iter().any(|part| lower.contains(part))
    {
        return None;
    }
    if lower.contains("temporary failure") || lower.contains("try again") {
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_lookup_is_repeated_only_if_it_may_succeed_later() {
        let of = |text: &str| lookup_failure(&format!("dns error: {text}")).unwrap();
        let unknown = of("failed to lookup address information: Name or service not known");
        assert!(
            unknown.repeat() == Repeat::Never
                && unknown.error.to_string().contains("check the address")
        );
        let later =
            of("failed to lookup address information: Temporary failure in name resolution");
        assert_eq!(later.repeat(), Repeat::Attempts);
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
            assert_eq!(failure.repeat(), Repeat::Never);
            assert_eq!(failure.error.kind(), ErrorKind::ConnectionRefused);
            assert!(failure.error.to_string().contains("this machine refuses"), "{failure}");
        }
        assert!(refused_socket(ErrorKind::ConnectionReset, "").is_none());
    }
}
