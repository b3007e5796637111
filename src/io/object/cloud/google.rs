//! Objects of Google Cloud Storage by its XML API: the JSON API has no parallel parts.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::Method;

use super::request::{CloudObject, CloudResponse, UploadRequest};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::object::checksum::for_google;
use crate::io::object::upload::{SentPart, UploadLimits, UploadProtocol, new_mark};

const LIMITS: UploadLimits =
    UploadLimits { max_parts: 10_000, min_part_len: 5 << 20, max_part_len: 5 << 30 };
const CHECKSUM: &str = "x-goog-hash";
/// The metadata with the mark of an object.
const MARK: &str = "x-goog-meta-tensorizer-upload";

/// An object of Google Cloud Storage.
pub struct GoogleObject {
    object: CloudObject,
    mark: String,
}

impl GoogleObject {
    pub fn new(object: CloudObject) -> Result<Self> {
        Ok(GoogleObject { object, mark: new_mark()? })
    }
}

/// The server's name of a part; it is copied into an XML document.
fn tag_of(response: &CloudResponse) -> Option<&str> {
    response.field("etag").filter(|tag| !tag.contains(['<', '>', '&']))
}

fn crc32c(bytes: &[u8]) -> String {
    format!("crc32c={}", for_google(bytes))
}

impl UploadProtocol for GoogleObject {
    fn display_address(&self) -> &str {
        &self.object.requests.display_address
    }

    fn target(&self) -> String {
        self.object.url.to_string()
    }

    fn stall(&self) -> Duration {
        self.object.requests.options.stall
    }

    fn limits(&self) -> UploadLimits {
        LIMITS
    }

    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let request = UploadRequest::new(Method::PUT, bytes)
            .field(MARK, &*self.mark)
            .checksum(CHECKSUM, crc32c(bytes));
        let sent = self.object.send(&request, cancel).map(drop);
        sent.or_else(|error| {
            self.object.confirm_completed(error, (MARK, &self.mark), bytes.len() as u64, cancel)
        })
    }

    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>> {
        let nothing = Bytes::new();
        let request = UploadRequest::new(Method::POST, &nothing)
            .query("uploads", "")
            .field(MARK, &*self.mark)
            .complete_if(|response| response.element("UploadId").is_some());
        let response = self.object.send(&request, cancel)?;
        response
            .element("UploadId")
            .map(Arc::from)
            .ok_or_else(|| self.object.refusal_error(&response))
    }

    fn part(
        &self,
        upload: &str,
        number: u64,
        bytes: &Bytes,
        cancel: &dyn Cancel,
    ) -> Result<SentPart> {
        let request = UploadRequest::new(Method::PUT, bytes)
            .query("partNumber", number.to_string())
            .query("uploadId", upload)
            .checksum(CHECKSUM, crc32c(bytes))
            .complete_if(|response| tag_of(response).is_some());
        let response = self.object.send(&request, cancel)?;
        let tag = tag_of(&response).ok_or_else(|| self.object.refusal_error(&response))?.to_owned();
        Ok(SentPart { number, tag, checksum: None })
    }

    fn complete(
        &self,
        upload: &str,
        parts: &[SentPart],
        len: u64,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let mut text = "<CompleteMultipartUpload>".to_owned();
        for SentPart { number, tag, .. } in parts {
            text += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>");
        }
        text += "</CompleteMultipartUpload>";
        let text = Bytes::from(text);
        let request = UploadRequest::new(Method::POST, &text)
            .query("uploadId", upload)
            .field("content-type", "application/xml")
            .complete_if(|response| response.is_document("CompleteMultipartUploadResult"))
            .with_long_limit();
        let done = self.object.send(&request, cancel).map(drop);
        done.or_else(|error| self.object.confirm_completed(error, (MARK, &self.mark), len, cancel))
    }

    fn abort(&self, upload: &str, cancel: &dyn Cancel) -> Result<()> {
        let nothing = Bytes::new();
        let request = UploadRequest::new(Method::DELETE, &nothing).query("uploadId", upload);
        self.object.send(&request, cancel).map(drop)
    }
}
