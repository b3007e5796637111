//! Helpers for requests: stall time limit, size limits of responses, and failures without a response.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::Response;

use super::failure::{lookup_failure, refused_socket};
use super::tls_failure::{causes, tls_failure};
use super::{Failure, timer};

/// Maximum bytes of an API's document that is held in memory.
const DOCUMENT_LIMIT: usize = 4 << 20;
/// Maximum bytes that are read of an error response.
const REFUSAL_LIMIT: usize = 16 << 10;

/// Waits for a server; fails if it sends nothing for `stall`, nor takes bytes, which `sent` counts.
pub async fn unless_stalled<T>(
    stall: Duration,
    sent: Option<&AtomicU64>,
    wait: impl Future<Output = T>,
) -> Result<T, Failure> {
    let mut wait = std::pin::pin!(wait);
    let count = || sent.map_or(0, |sent| sent.load(Ordering::Relaxed));
    loop {
        let before = count();
        if let Ok(result) = timer::timeout(stall, &mut wait).await {
            return Ok(result);
        }
        if count() == before {
            let what = format!(
                "the server neither sent nor accepted a byte for {} s",
                stall.as_secs_f64()
            );
            return Err(Failure::transient(ErrorKind::TimedOut, what));
        }
    }
}

/// Reads the next bytes of a body; none at its end.
pub async fn read_chunk(response: &mut Response, stall: Duration) -> Result<Bytes, Failure> {
    Ok(unless_stalled(stall, None, response.chunk()).await??.unwrap_or(Bytes::new()))
}

/// Reads the whole body of an API's response into memory.
pub async fn read_document(response: &mut Response, stall: Duration) -> Result<Vec<u8>, Failure> {
    let body = read_until(response, stall, DOCUMENT_LIMIT + 1).await?;
    if body.len() > DOCUMENT_LIMIT {
        let what =
            format!("the server's response is too long: expected at most {DOCUMENT_LIMIT} bytes");
        return Err(Failure::permanent(ErrorKind::InvalidData, what));
    }
    Ok(body)
}

/// Reads the beginning of a body that says why the server refuses; nothing if that fails.
pub async fn read_beginning(response: &mut Response, stall: Duration) -> Vec<u8> {
    read_until(response, stall, REFUSAL_LIMIT).await.unwrap_or(Vec::new())
}

/// Reads a body until it has this many bytes or more, or to its end.
async fn read_until(
    response: &mut Response,
    stall: Duration,
    len: usize,
) -> Result<Vec<u8>, Failure> {
    let mut body = Vec::new();
    while body.len() < len {
        match read_chunk(response, stall).await? {
            more if more.is_empty() => break,
            more => body.extend_from_slice(&more),
        }
    }
    Ok(body)
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        // Its text has the whole URL.
        let error = error.without_url();
        if error.is_builder() {
            return Failure::permanent(ErrorKind::InvalidInput, causes_of(&error).0);
        }
        connection_failure(&error, "give the certificate of the authority that signed it")
    }
}

/// The texts of an error and of its causes, and the kind of the innermost error of the system.
fn causes_of(error: &(dyn Error + 'static)) -> (String, ErrorKind) {
    let io = causes(error).filter_map(|cause| cause.downcast_ref()).map(io::Error::kind);
    let kind = io.filter(|kind| *kind != ErrorKind::Other).last().unwrap_or(ErrorKind::Other);
    let mut texts: Vec<_> = causes(error).map(ToString::to_string).collect();
    texts.dedup();
    // The outermost says little.
    let outermost = usize::from(texts.len() > 1);
    (texts.split_off(outermost).join(": "), kind)
}

/// The failure of a request without a response; `hint` says what helps if the server's certificate
/// is not trusted.
pub fn connection_failure(error: &(dyn Error + 'static), hint: &str) -> Failure {
    if let Some(failure) = causes(error).find_map(|cause| cause.downcast_ref::<Failure>()) {
        return failure.copy();
    }
    let (text, kind) = causes_of(error);
    let known = tls_failure(error, hint)
        .or_else(|| lookup_failure(&text))
        .or_else(|| refused_socket(kind, &text));
    known.unwrap_or_else(|| {
        let is_known = kind != ErrorKind::Other;
        Failure::transient(if is_known { kind } else { ErrorKind::ConnectionAborted }, text)
    })
}

#[cfg(test)]
mod tests {
    use super::super::timer::{elapsed, pause, sleep};
    use super::*;

    const STALL: Duration = Duration::from_secs(60);

    /// Runs work on a simulated clock, which advances whenever all of the work waits.
    fn run<T>(work: impl Future<Output = T>) -> T {
        pause();
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn slow_upload_of_a_day_is_not_stalled() {
        let sent = AtomicU64::new(0);
        let (result, took) = run(async {
            let request = async {
                for _ in 0..24 * 60 {
                    sleep(STALL - Duration::from_millis(1)).await;
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                "done"
            };
            (unless_stalled(STALL, Some(&sent), request).await.unwrap(), elapsed())
        });
        assert_eq!((result, took.as_secs() / 3600), ("done", 23));
    }

    #[test]
    fn upload_fails_if_no_byte_is_accepted_within_the_limit() {
        let sent = AtomicU64::new(0);
        let (outcome, took) = run(async {
            let request = async {
                sleep(STALL / 2).await;
                sent.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<()>().await
            };
            (unless_stalled(STALL, Some(&sent), request).await, elapsed())
        });
        assert_eq!(outcome.unwrap_err().error.kind(), ErrorKind::TimedOut);
        assert_eq!(took.as_secs(), 120);
    }

    #[test]
    fn request_waits_for_a_response_up_to_the_limit() {
        let hour = Duration::from_secs(3600);
        let [late, never] = [hour - Duration::from_secs(1), 24 * hour].map(|time| {
            run(async { (unless_stalled(hour, None, sleep(time)).await, elapsed().as_secs()) })
        });
        assert!(late.0.is_ok());
        let (failure, waited) = (never.0.unwrap_err(), never.1);
        assert_eq!((failure.error.kind(), waited), (ErrorKind::TimedOut, 3600));
        assert_eq!(
            failure.error.to_string(),
            "the server neither sent nor accepted a byte for 3600 s"
        );
    }
}
