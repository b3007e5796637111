//! Writing objects of S3: multipart uploads by AWS's SDK.

use std::io::ErrorKind;
use std::sync::{Arc, OnceLock};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sdk_s3::types::{ChecksumAlgorithm, ChecksumType, CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;

use super::address::S3Address;
use super::resolve::{S3Bucket, find};
use crate::cancel::Cancel;
use crate::environment::read_guarded;
use crate::error::{Error, Result};
use crate::io::OpenOptions;
use crate::io::object::checksum::Checksum;
use crate::io::object::upload::{
    SentPart, UploadProtocol, UploadRequests, UploadSink, confirm_if_present, new_mark,
};
use crate::io::transport::{Failure, SdkClient, sdk_client, with_guarded_polls};

/// Bytes of the longest part.
const MAX_PART_LEN: u64 = 5 << 30;

/// Creates an object. Finds the server and the credentials; nothing is sent before a part is
/// complete.
pub fn create(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<UploadSink> {
    let address = S3Address::parse(uri)?;
    let display_address = address.display_address();
    if address.version.is_some() {
        let what = format!("`{display_address}`: a version of an object cannot be written");
        return Err(Error::InvalidArgument(what));
    }
    let (options, resolved) = find(options, &address, false, cancel)?;
    if resolved.credentials.is_none() && !resolved.is_endpoint_named {
        let what = format!(
            "no credentials were found, and the object is not sent to {} anonymously: {}",
            resolved.host(),
            super::refusal::WAYS
        );
        return Err(Error::failed("opening", &display_address, ErrorKind::PermissionDenied, what));
    }
    let names = (display_address.clone(), format!("{:?} {display_address}", resolved.server));
    let object = S3Object {
        requests: UploadRequests::new(display_address, options.clone(), resolved.server.is_tls())?,
        address,
        resolved,
        mark: new_mark()?,
        checksum_support: OnceLock::new(),
    };
    UploadSink::new(Arc::new(object), names, MAX_PART_LEN, &options)
}

/// An object of S3.
pub struct S3Object {
    requests: UploadRequests<Client>,
    address: S3Address,
    resolved: S3Bucket,
    /// The mark by which this upload's object is recognised.
    mark: String,
    /// The server's support for checksums, as found at the beginning.
    checksum_support: OnceLock<ChecksumSupport>,
}

/// The name of the metadata with the mark of an object that was sent in parts.
const MARK: &str = "tensorizer-upload";

/// A server's use of checksums of uploads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChecksumSupport {
    /// The server is sent none.
    None,
    /// The server is sent those of parts, and may ignore them.
    Parts,
    /// The server compares those of parts, and that of the object.
    All,
}

impl S3Object {
    fn checksum_support(&self) -> ChecksumSupport {
        self.checksum_support.get().copied().unwrap_or(ChecksumSupport::None)
    }

    fn request<T, F: Future<Output = Result<T, Failure>>>(
        &self,
        cancel: &dyn Cancel,
        make: impl Fn(Client) -> F,
    ) -> Result<T> {
        let wrap = |client| {
            let connector = SdkClient::new(client, self.requests.options.headers.clone());
            let sent = Arc::clone(&connector.sent);
            (self.resolved.client(sdk_client(connector)), sent)
        };
        let region = self.resolved.region();
        let invalidate = |used| {
            // Credentials are valid in every region.
            if let Some(keys) = &self.resolved.credentials
                && self.resolved.region() == region
            {
                keys.invalidate(used);
            }
        };
        let sent = self.requests.send(cancel, wrap, invalidate, |client, _| async {
            // The SDK looks into the environment before it sends anything.
            let mut request = std::pin::pin!(make(client));
            let mut polled = false;
            let first_guarded = std::future::poll_fn(|context| {
                if std::mem::replace(&mut polled, true) {
                    return request.as_mut().poll(context);
                }
                read_guarded(|| request.as_mut().poll(context))
            });
            first_guarded.await
        });
        sent.map_err(|error| error.at_host(&self.resolved.host()))
    }

    /// True if the object comes from this upload.
    fn is_complete(&self, len: u64, cancel: &dyn Cancel) -> Result<bool> {
        let S3Address { bucket, key, .. } = &self.address;
        let found = self.request(cancel, |client| async move {
            let head = client.head_object().bucket(bucket).key(key);
            let head = head.set_request_payer(self.resolved.payer());
            head.send().await.map_err(|e| self.resolved.failure(e))
        })?;
        let mark = found.metadata().and_then(|all| all.get(MARK));
        let size = found.content_length().and_then(|size| u64::try_from(size).ok());
        Ok(mark == Some(&self.mark) && size == Some(len))
    }
}

impl UploadProtocol for S3Object {
    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let S3Address { bucket, key, .. } = &self.address;
        let checksum = self.resolved.checksums.then(|| Checksum::of(bytes));
        self.request(cancel, |client| async move {
            let sent = send_checked(checksum, true, |checksum| {
                let (encryption, kms_key) = self.resolved.encryption.clone();
                let put = client.put_object().bucket(bucket).key(key).body(body(bytes));
                let put = put.set_server_side_encryption(encryption).set_ssekms_key_id(kms_key);
                let put = put.set_request_payer(self.resolved.payer());
                let put = put.set_checksum_crc64_nvme(checksum);
                put.customize().disable_payload_signing().send()
            });
            sent.await.map(drop).map_err(|e| self.resolved.failure(e))
        })
    }

    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>> {
        let S3Address { bucket, key, .. } = &self.address;
        self.request(cancel, |client| async move {
            let begin = client.create_multipart_upload().bucket(bucket).key(key);
            let begin = begin.metadata(MARK, &self.mark).set_request_payer(self.resolved.payer());
            let (encryption, kms_key) = self.resolved.encryption.clone();
            let begin = begin.set_server_side_encryption(encryption).set_ssekms_key_id(kms_key);
            let mut response = None;
            if self.resolved.checksums {
                let begin = begin.clone().checksum_algorithm(ChecksumAlgorithm::Crc64Nvme);
                response = Some(begin.checksum_type(ChecksumType::FullObject).send().await);
            }
            let response = response.filter(|sent| !sent.as_ref().is_err_and(may_reject_checksums));
            let is_checked = response.is_some();
            let begun = match response {
                Some(response) => response,
                None => with_guarded_polls(begin.send()).await,
            };
            let begun = begun.map_err(|e| self.resolved.failure(e))?;
            let agrees = begun.checksum_algorithm == Some(ChecksumAlgorithm::Crc64Nvme)
                && begun.checksum_type == Some(ChecksumType::FullObject);
            let checksum_support = match (is_checked, agrees) {
                (false, _) => ChecksumSupport::None,
                (true, false) => ChecksumSupport::Parts,
                (true, true) => ChecksumSupport::All,
            };
            let upload = begun.upload_id.ok_or_else(|| {
                let what = "the server's response to CreateMultipartUpload has no UploadId";
                Failure::permanent(ErrorKind::InvalidData, what)
            })?;
            let _ = self.checksum_support.set(checksum_support);
            Ok(upload.into())
        })
    }

    fn part(&self, id: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<SentPart> {
        let S3Address { bucket, key, .. } = &self.address;
        let support = self.checksum_support();
        let sdk_number = sdk_part_number(number)?;
        let checksum = (support != ChecksumSupport::None).then(|| Checksum::of(bytes));
        self.request(cancel, |client| async move {
            // A server that has agreed to checksums does not refuse them.
            let sent = send_checked(checksum, support == ChecksumSupport::Parts, |checksum| {
                let part = client.upload_part().bucket(bucket).key(key).upload_id(id);
                let part = part.part_number(sdk_number).body(body(bytes));
                let part = part.set_request_payer(self.resolved.payer());
                let part = part.set_checksum_crc64_nvme(checksum);
                part.customize().disable_payload_signing().send()
            });
            let (done, checksum) = sent.await.map_err(|e| self.resolved.failure(e))?;
            let tag = done.e_tag.ok_or_else(|| {
                let what = "the server's response to UploadPart has no ETag";
                Failure::transient(ErrorKind::InvalidData, what)
            })?;
            Ok(SentPart { number, tag, checksum })
        })
    }

    fn complete(&self, id: &str, parts: &[SentPart], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let S3Address { bucket, key, .. } = &self.address;
        let all = self.checksum_support() == ChecksumSupport::All;
        let checksums = parts.iter().filter_map(|part| part.checksum);
        let checksum =
            all.then(|| checksums.fold(Checksum::default(), Checksum::combined_with).for_s3());
        let parts = parts.iter().map(|SentPart { number, tag, checksum }| {
            let part = CompletedPart::builder().part_number(sdk_part_number(*number)?).e_tag(tag);
            Ok(part.set_checksum_crc64_nvme(checksum.map(Checksum::for_s3)).build())
        });
        let parts = parts.collect::<Result<_>>()?;
        let parts = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
        let completed = self.request(cancel, |client| {
            let complete = client.complete_multipart_upload().bucket(bucket).key(key);
            let complete = complete.upload_id(id).multipart_upload(parts.clone());
            let complete = complete
                .set_checksum_crc64_nvme(checksum.clone())
                .set_checksum_type(all.then_some(ChecksumType::FullObject))
                .set_request_payer(self.resolved.payer());
            async move { complete.send().await.map(drop).map_err(|e| self.resolved.failure(e)) }
        });
        // If the object has the mark of this upload, it is complete: only the response was lost.
        completed.or_else(|error| match &error {
            Error::Io { error: lost, .. } if lost.kind() == ErrorKind::NotFound => {
                confirm_if_present(error, || self.is_complete(len, cancel))
            }
            _ => Err(error),
        })
    }

    fn abort(&self, id: &str, cancel: &dyn Cancel) -> Result<()> {
        let S3Address { bucket, key, .. } = &self.address;
        self.request(cancel, |client| async move {
            let abort = client.abort_multipart_upload().bucket(bucket).key(key).upload_id(id);
            let abort = abort.set_request_payer(self.resolved.payer());
            abort.send().await.map(drop).map_err(|e| self.resolved.failure(e))
        })
    }
}

/// The number of a part in the SDK, which counts from 1.
fn sdk_part_number(number: u64) -> Result<i32> {
    i32::try_from(number).map_err(|_| Error::Bug(format!("a part with the number {number}")))
}

/// Sends a request with a checksum, and returns it if it was sent. A request that is refused because
/// of it is repeated if `may_omit` says so: first with the same, because bytes that were damaged in
/// transit are refused too; then without.
async fn send_checked<T, E: ProvideErrorMetadata, F>(
    checksum: Option<Checksum>,
    may_omit: bool,
    send: impl Fn(Option<String>) -> F,
) -> Result<(T, Option<Checksum>), SdkError<E, HttpResponse>>
where
    F: Future<Output = Result<T, SdkError<E, HttpResponse>>>,
{
    let mut sent = checksum;
    let mut response = send(sent.map(Checksum::for_s3)).await;
    for repeated in [checksum, None] {
        if may_omit && sent.is_some() && response.as_ref().is_err_and(may_reject_checksums) {
            sent = repeated;
            response = with_guarded_polls(send(sent.map(Checksum::for_s3))).await;
        }
    }
    Ok((response?, sent))
}

/// True if a server may have refused a request because it does not know checksums.
fn may_reject_checksums<E: ProvideErrorMetadata>(error: &SdkError<E, HttpResponse>) -> bool {
    match error.raw_response().map(|response| response.status().as_u16()) {
        Some(400) => error.code().is_some_and(|code| code.starts_with("Invalid")),
        status => status == Some(501),
    }
}

fn body(bytes: &Bytes) -> ByteStream {
    ByteStream::new(SdkBody::from(bytes.clone()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cancel::Never;
    use crate::io::S3Options;
    use crate::io::auth::simulated;
    use crate::io::transport::simulated::{SimulatedCloud, options};

    #[test]
    fn hours_of_writing_are_never_refused() {
        let (simulated_cloud, transport, region) =
            (SimulatedCloud::new(3600, 180), options(), "write".to_owned());
        simulated::aws(&simulated_cloud, &region, &transport);
        let s3 = S3Options {
            endpoint: Some(simulated_cloud.serve()),
            force_http: Some(true),
            region: Some(region),
            ..S3Options::default()
        };
        let environment = OpenOptions::from_environment().unwrap();
        let options = OpenOptions { transport, s3, cache: None, ..environment };
        let address = S3Address::parse("s3://bucket/key").unwrap();
        let (options, resolved) = find(&options, &address, false, &Never).unwrap();
        let requests = UploadRequests::new("an object".to_owned(), options, false).unwrap();
        let (mark, checksum_support) = (String::new(), OnceLock::new());
        let object = S3Object { requests, address, resolved, mark, checksum_support };
        for number in 1..=12 * 60 {
            let bytes = Bytes::from_static(b"some bytes");
            assert_eq!(object.part("one", number, &bytes, &Never).unwrap().tag, "\"e\"");
            simulated_cloud.advance(60);
        }
        assert_eq!(simulated_cloud.refused.load(Ordering::Relaxed), 0);
        assert_eq!(simulated_cloud.served.load(Ordering::Relaxed), 12 * 60);
        assert!((13..16).contains(&simulated_cloud.issued()), "{} times", simulated_cloud.issued());
    }
}
