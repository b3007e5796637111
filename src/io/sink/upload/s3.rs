//! `s3://bucket/key`: the calls of the SDK.

use std::io::{self, ErrorKind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sdk_s3::types::{ChecksumAlgorithm, ChecksumType, CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;

use super::object::{Object, Sent, new_mark};
use super::plan::Limits;
use super::requests::Requests;
use super::sum::Sum;
use crate::cancel::Cancel;
use crate::environment::reading;
use crate::error::{Error, Result};
use crate::io::net::s3::{
    Connector, DEFAULT_WRITE_ENDPOINT, ObjectName, Resolved, S3Options, resolve,
};
use crate::io::net::{Failure, NetOptions, guarded, wait_for};

const LIMITS: Limits = Limits { parts: 10_000, least: 5 << 20, longest: 5 << 30 };

/// An object of S3.
pub struct S3Object {
    requests: Requests<Client>,
    bucket: String,
    key: String,
    resolved: Resolved,
    /// By which the object is known again.
    mark: String,
    /// What the server has agreed to when the upload began.
    sums: OnceLock<Sums>,
}

/// The name of the metadata with the mark of an object that was sent in parts.
const MARK: &str = "tensorizer-upload";

/// What a server makes of sums of what is sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sums {
    /// It is not told any.
    None,
    /// It is told those of parts, and may not look at them.
    Parts,
    /// It compares those of parts, and that of the object.
    All,
}

impl S3Object {
    /// Finds out where it is and who may write it. Nothing is sent yet.
    pub fn new(
        uri: &str,
        s3: &S3Options,
        options: NetOptions,
        cancel: &dyn Cancel,
    ) -> Result<Self> {
        let name = ObjectName::parse(uri)?;
        let shown = name.shown();
        if name.version.is_some() {
            let what = format!("`{shown}`: a version of an object cannot be written");
            return Err(Error::InvalidArgument(what));
        }
        let found = resolve(s3, &options, DEFAULT_WRITE_ENDPOINT, &name);
        let resolved = wait_for(&shown, &options, cancel, found)?;
        if resolved.credentials.is_none() && !resolved.named {
            let what = format!(
                "there are no credentials, and {} would be sent the object anonymously: give \
                 credentials, or name an endpoint that takes objects from everybody",
                resolved.host()
            );
            let error = io::Error::new(ErrorKind::PermissionDenied, what);
            return Err(Error::io("opening", &shown, error));
        }
        Ok(S3Object {
            requests: Requests::new(shown, options, resolved.server.is_tls())?,
            bucket: name.bucket,
            key: name.key,
            resolved,
            mark: new_mark()?,
            sums: OnceLock::new(),
        })
    }

    fn sums(&self) -> Sums {
        self.sums.get().copied().unwrap_or(Sums::None)
    }

    fn request<T, F: Future<Output = Result<T, Failure>>>(
        &self,
        cancel: &dyn Cancel,
        make: impl Fn(Client) -> F,
    ) -> Result<T> {
        let stall = self.requests.options.stall;
        let wrap = |client| {
            let connector = Connector::new(client, stall);
            let sent = Arc::clone(&connector.sent);
            // Tries are counted here, as for all other requests.
            let config =
                self.resolved.sdk().http_client(connector).retry_config(RetryConfig::disabled());
            (reading(|| Client::from_conf(config.build())), sent)
        };
        let region = self.resolved.region();
        let refused = |used| {
            // Credentials are as good in another region.
            if let Some(keys) = &self.resolved.credentials
                && self.resolved.region() == region
            {
                keys.refused(used);
            }
        };
        let asked = self.requests.ask(cancel, wrap, refused, |client, _| async {
            // The SDK looks into the environment before it sends anything.
            let mut request = std::pin::pin!(make(client));
            let mut polled = false;
            let first_guarded = std::future::poll_fn(|context| {
                if std::mem::replace(&mut polled, true) {
                    return request.as_mut().poll(context);
                }
                reading(|| request.as_mut().poll(context))
            });
            first_guarded.await
        });
        asked.map_err(|error| error.at_host(&self.resolved.host()))
    }

    /// Whether the object is the one of this upload.
    fn is_there(&self, len: u64, cancel: &dyn Cancel) -> Result<bool> {
        let found = self.request(cancel, |client| async move {
            let head = client.head_object().bucket(&self.bucket).key(&self.key);
            let head = head.set_request_payer(self.resolved.payer());
            match head.send().await.map_err(|e| self.resolved.failure(e)) {
                Err(failure) if failure.error.kind() == ErrorKind::NotFound => Ok(None),
                found => found.map(Some),
            }
        })?;
        let ours = found.is_some_and(|found| {
            let mark = found.metadata().and_then(|all| all.get(MARK));
            let size = found.content_length().and_then(|size| u64::try_from(size).ok());
            mark == Some(&self.mark) && size == Some(len)
        });
        Ok(ours)
    }
}

impl Object for S3Object {
    fn shown(&self) -> &str {
        &self.requests.shown
    }

    fn stall(&self) -> Duration {
        self.requests.options.stall
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let sum = self.resolved.sums.then(|| Sum::of(bytes).for_s3());
        self.request(cancel, |client| {
            let send = move |sum: Option<String>| {
                let put = client.put_object().bucket(&self.bucket).key(&self.key);
                let put = put.set_request_payer(self.resolved.payer()).body(body(bytes));
                let put = put.set_checksum_crc64_nvme(sum);
                put.customize().disable_payload_signing().send()
            };
            let sum = sum.clone();
            async move {
                let mut answer = send(sum.clone()).await;
                for again in again(&sum) {
                    if !answer.as_ref().is_err_and(knows_no_sums) {
                        break;
                    }
                    answer = guarded(send(again)).await;
                }
                answer.map(drop).map_err(|e| self.resolved.failure(e))
            }
        })
    }

    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>> {
        self.request(cancel, |client| async move {
            let begin = client.create_multipart_upload().bucket(&self.bucket).key(&self.key);
            let begin = begin.metadata(MARK, &self.mark).set_request_payer(self.resolved.payer());
            let mut sums = Sums::None;
            let mut begun = None;
            if self.resolved.sums {
                let begin = begin.clone().checksum_algorithm(ChecksumAlgorithm::Crc64Nvme);
                match begin.checksum_type(ChecksumType::FullObject).send().await {
                    Err(error) if knows_no_sums(&error) => {}
                    answer => {
                        let answer = answer.map_err(|e| self.resolved.failure(e))?;
                        let all = answer.checksum_algorithm == Some(ChecksumAlgorithm::Crc64Nvme)
                            && answer.checksum_type == Some(ChecksumType::FullObject);
                        sums = if all { Sums::All } else { Sums::Parts };
                        begun = Some(answer);
                    }
                }
            }
            let begun = match begun {
                Some(begun) => begun,
                None => guarded(begin.send()).await.map_err(|e| self.resolved.failure(e))?,
            };
            let upload = begun.upload_id.ok_or_else(|| {
                let what = "the server began an upload without a number";
                Failure::lasting(ErrorKind::InvalidData, what)
            })?;
            let _ = self.sums.set(sums);
            Ok(upload.into())
        })
    }

    fn part(&self, upload: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<Sent> {
        let sums = self.sums();
        let in_protocol = number_of(number)?;
        let sum = (sums != Sums::None).then(|| Sum::of(bytes));
        self.request(cancel, |client| async move {
            let send = |sum: Option<String>| {
                let part = client.upload_part().bucket(&self.bucket).key(&self.key);
                let part = part.upload_id(upload).part_number(in_protocol).body(body(bytes));
                let part = part.set_checksum_crc64_nvme(sum);
                let part = part.set_request_payer(self.resolved.payer());
                part.customize().disable_payload_signing().send()
            };
            let text = sum.map(Sum::for_s3);
            let mut told = sum;
            let mut answer = send(text.clone()).await;
            // One that has agreed to sums is held to that.
            for again in again(&text).into_iter().filter(|_| sums == Sums::Parts) {
                if !answer.as_ref().is_err_and(knows_no_sums) {
                    break;
                }
                told = sum.filter(|_| again.is_some());
                answer = guarded(send(again)).await;
            }
            let done = answer.map_err(|e| self.resolved.failure(e))?;
            let tag = done.e_tag.ok_or_else(|| {
                let what = "the server took a part and did not say its ETag";
                Failure::passing(ErrorKind::InvalidData, what)
            })?;
            Ok(Sent { number, tag, sum: told })
        })
    }

    fn complete(&self, upload: &str, parts: &[Sent], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let sums = self.sums();
        let all = sums == Sums::All;
        let sums = parts.iter().filter_map(|part| part.sum);
        let sum = all.then(|| sums.fold(Sum::default(), Sum::and).for_s3());
        let parts = parts.iter().map(|Sent { number, tag, sum }| {
            let part = CompletedPart::builder().part_number(number_of(*number)?).e_tag(tag);
            Ok(part.set_checksum_crc64_nvme(sum.map(Sum::for_s3)).build())
        });
        let parts = parts.collect::<Result<_>>()?;
        let parts = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
        let completed = self.request(cancel, |client| {
            let complete = client.complete_multipart_upload().bucket(&self.bucket).key(&self.key);
            let complete = complete.upload_id(upload).multipart_upload(parts.clone());
            let complete = complete
                .set_checksum_crc64_nvme(sum.clone())
                .set_checksum_type(all.then_some(ChecksumType::FullObject))
                .set_request_payer(self.resolved.payer());
            async move { complete.send().await.map(drop).map_err(|e| self.resolved.failure(e)) }
        });
        match completed {
            // It was done, and the answer lost, if what is there now is what was sent.
            Err(Error::Io { error, .. })
                if error.kind() == ErrorKind::NotFound && self.is_there(len, cancel)? =>
            {
                Ok(())
            }
            completed => completed,
        }
    }

    fn abort(&self, upload: &str, cancel: &dyn Cancel) -> Result<()> {
        self.request(cancel, |client| async move {
            let abort = client.abort_multipart_upload().bucket(&self.bucket).key(&self.key);
            let abort = abort.set_request_payer(self.resolved.payer());
            abort.upload_id(upload).send().await.map(drop).map_err(|e| self.resolved.failure(e))
        })
    }
}

/// The number of a part as the SDK has it.
fn number_of(number: u64) -> Result<i32> {
    i32::try_from(number).map_err(|_| Error::Bug(format!("a part with the number {number}")))
}

/// The sums of further tries of a request that was refused with one: the same, for bytes that were
/// spoiled on their way are refused too, and then none.
fn again(sum: &Option<String>) -> Vec<Option<String>> {
    if sum.is_some() { vec![sum.clone(), None] } else { Vec::new() }
}

/// Whether a server may refuse a request because of its sums.
fn knows_no_sums<E: ProvideErrorMetadata>(error: &SdkError<E, HttpResponse>) -> bool {
    match error.raw_response().map(|response| response.status().as_u16()) {
        Some(400) => error.code().is_some_and(|code| code.starts_with("Invalid")),
        status => status == Some(501),
    }
}

fn body(bytes: &Bytes) -> ByteStream {
    ByteStream::new(SdkBody::from(bytes.clone()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cancel::Never;
    use crate::io::net::s3::found_on;
    use crate::io::net::simulated::{Day, options};

    #[test]
    fn a_day_of_writing_is_never_refused() {
        let (day, net, region) = (Day::new(3600, 180), options(), "write".to_owned());
        found_on(&day, &region, &net);
        let s3 = S3Options {
            endpoint: Some(day.serve()),
            force_http: Some(true),
            region: Some(region),
            ..S3Options::default()
        };
        let object = S3Object::new("s3://bucket/key", &s3, net, &Never).unwrap();
        for number in 1..=24 * 60 {
            let bytes = Bytes::from_static(b"some bytes");
            assert_eq!(object.part("one", number, &bytes, &Never).unwrap().tag, "\"e\"");
            day.pass(60);
        }
        assert_eq!(day.refused.load(Ordering::Relaxed), 0);
        assert_eq!(day.answered.load(Ordering::Relaxed), 24 * 60);
        assert!((25..30).contains(&day.given()), "{} times", day.given());
    }
}
