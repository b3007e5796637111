//! What goes wrong with a request.

use std::error::Error as _;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::time::Duration;

use crate::io::net::{Failure, timer};

/// What a wait gives, unless it takes too long.
pub async fn timed<T>(
    stall: Duration,
    wait: impl Future<Output = T>,
) -> std::result::Result<T, Failure> {
    timer::timeout(stall, wait).await.map_err(|_| {
        let what = format!("the server sent nothing for {} s", stall.as_secs_f64());
        Failure::passing(ErrorKind::TimedOut, what)
    })
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        // The texts of all causes: the outermost says little, and would show the whole address.
        let error = error.without_url();
        let mut causes = Vec::new();
        let mut kind = io::ErrorKind::Other;
        let mut cause = error.source();
        while let Some(found) = cause {
            if let Some(io) = found.downcast_ref::<io::Error>() {
                kind = io.kind();
            }
            causes.push(found.to_string());
            cause = found.source();
        }
        causes.dedup();
        let text = if causes.is_empty() { error.to_string() } else { causes.join(": ") };
        let lower = text.to_lowercase();
        if lower.contains("dns error") {
            let what = format!("the name of the server is not known: {text}; check the address");
            return Failure::lasting(io::ErrorKind::NotFound, what);
        }
        if lower.contains("certificate") || lower.contains("invalid peer") {
            let what = format!(
                "the server's certificate is not trusted: {text}; name the authority that signed \
                 it with certificate_handling=CAInfo(cacert=...)"
            );
            return Failure::lasting(io::ErrorKind::PermissionDenied, what);
        }
        if error.is_builder() {
            return Failure::lasting(io::ErrorKind::InvalidInput, text);
        }
        if error.is_timeout() {
            kind = io::ErrorKind::TimedOut;
        }
        if kind == io::ErrorKind::Other {
            kind = io::ErrorKind::ConnectionAborted;
        }
        Failure::passing(kind, text)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::io::net::timer::{elapsed, pause, sleep};

    #[test]
    fn a_server_is_waited_for_up_to_its_limit() {
        let hour = Duration::from_secs(3600);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let [late, never] = [hour - Duration::from_secs(1), 24 * hour].map(|time| {
            runtime.block_on(async {
                pause();
                (timed(hour, sleep(time)).await, elapsed().as_secs())
            })
        });
        assert!(late.0.is_ok());
        let (failure, waited) = (never.0.unwrap_err(), never.1);
        assert_eq!((failure.error.kind(), waited), (ErrorKind::TimedOut, 3600));
        assert_eq!(failure.error.to_string(), "the server sent nothing for 3600 s");
    }
}
