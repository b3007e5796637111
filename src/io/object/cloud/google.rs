//! Objects of Google Cloud Storage by its XML API: the JSON API has no parallel parts.

use std::sync::Arc;

use bytes::Bytes;
use reqwest::Method;

use super::request::{COMBINE_LIMIT, CloudObject, UploadRequest, done};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::object::checksum::for_google;
use crate::io::object::upload::{SentPart, UploadProtocol};

/// Bytes of the longest part.
pub const MAX_PART_LEN: u64 = 5 << 30;
/// The metadata with the mark of an object.
pub const MARK: &str = "x-goog-meta-tensorizer-upload";

/// An object of Google Cloud Storage.
pub struct GoogleObject(pub CloudObject);

/// A request that sends a body and its checksum.
fn put(bytes: &Bytes) -> UploadRequest<'static> {
    let checksum = Some(("x-goog-hash", format!("crc32c={}", for_google(bytes))));
    UploadRequest { checksum, ..UploadRequest::new(Method::PUT, bytes.clone()) }
}

impl UploadProtocol for GoogleObject {
    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let request = UploadRequest { fields: &[self.0.mark()], ..put(bytes) };
        self.0.send_last(&request, bytes.len() as u64, cancel, done)
    }

    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>> {
        let request = UploadRequest {
            query: &[("uploads", "")],
            fields: &[self.0.mark()],
            ..UploadRequest::new(Method::POST, Bytes::new())
        };
        self.0.send(&request, cancel, |response| {
            Some(Ok(response.success()?.element("UploadId")?.into()))
        })
    }

    fn part(&self, id: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<SentPart> {
        let request = UploadRequest {
            query: &[("partNumber", &number.to_string()), ("uploadId", id)],
            ..put(bytes)
        };
        self.0.send(&request, cancel, |response| {
            // It is copied into an XML document.
            let tag =
                response.success()?.field("etag").filter(|tag| !tag.contains(['<', '>', '&']));
            Some(Ok(SentPart { number, tag: tag?.to_owned(), checksum: None }))
        })
    }

    fn complete(&self, id: &str, parts: &[SentPart], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let mut text = "<CompleteMultipartUpload>".to_owned();
        for SentPart { number, tag, .. } in parts {
            text += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>");
        }
        let text = Bytes::from(text + "</CompleteMultipartUpload>");
        let request = UploadRequest {
            query: &[("uploadId", id)],
            fields: &[("content-type", "application/xml")],
            stall_limit: COMBINE_LIMIT,
            ..UploadRequest::new(Method::POST, text)
        };
        self.0.send_last(&request, len, cancel, |response| {
            done(response).filter(|_| response.text.contains("<CompleteMultipartUploadResult"))
        })
    }

    fn abort(&self, id: &str, cancel: &dyn Cancel) -> Result<()> {
        let request = UploadRequest::new(Method::DELETE, Bytes::new());
        self.0.send(&UploadRequest { query: &[("uploadId", id)], ..request }, cancel, done)
    }
}
