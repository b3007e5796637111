//! The failure of a request, and whether it is repeated.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::error::Error;

/// How long a failed request is repeated.
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

    /// How long the request is repeated.
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
    #[cfg(feature = "clouds")]
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
