//! `gs://bucket/name`: the calls of the XML API. The other API has no parts that are sent at once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::Method;

use super::clouds::{Answer, Ask, CloudObject};
use super::object::{Object, Sent, new_mark};
use super::plan::Limits;
use super::sum::for_google;
use crate::cancel::Cancel;
use crate::error::Result;

const LIMITS: Limits = Limits { parts: 10_000, least: 5 << 20, longest: 5 << 30 };
const SUM: &str = "x-goog-hash";
/// The metadata with the mark of an object.
const MARK: &str = "x-goog-meta-tensorizer-upload";

/// An object of Google Cloud Storage.
pub struct GoogleObject {
    at: CloudObject,
    mark: String,
}

impl GoogleObject {
    pub fn new(at: CloudObject) -> Result<Self> {
        Ok(GoogleObject { at, mark: new_mark()? })
    }
}

/// What the server calls a part; it goes into a document as it is.
fn tag_of(answer: &Answer) -> Option<&str> {
    answer.field("etag").filter(|tag| !tag.contains(['<', '>', '&']))
}

fn sum_of(bytes: &[u8]) -> String {
    format!("crc32c={}", for_google(bytes))
}

impl Object for GoogleObject {
    fn shown(&self) -> &str {
        &self.at.requests.shown
    }

    fn stall(&self) -> Duration {
        self.at.requests.options.stall
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let ask = Ask::new(Method::PUT, bytes).field(MARK, &*self.mark).sum(SUM, sum_of(bytes));
        let sent = self.at.ask(&ask, cancel).map(drop);
        sent.or_else(|error| self.at.ended(error, (MARK, &self.mark), bytes.len() as u64, cancel))
    }

    fn begin(&self, cancel: &dyn Cancel) -> Result<Arc<str>> {
        let nothing = Bytes::new();
        let ask = Ask::new(Method::POST, &nothing)
            .query("uploads", "")
            .field(MARK, &*self.mark)
            .only_if(|answer| answer.element("UploadId").is_some());
        let answer = self.at.ask(&ask, cancel)?;
        answer.element("UploadId").map(Arc::from).ok_or_else(|| self.at.refused(&answer))
    }

    fn part(&self, upload: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<Sent> {
        let ask = Ask::new(Method::PUT, bytes)
            .query("partNumber", number.to_string())
            .query("uploadId", upload)
            .sum(SUM, sum_of(bytes))
            .only_if(|answer| tag_of(answer).is_some());
        let answer = self.at.ask(&ask, cancel)?;
        let tag = tag_of(&answer).ok_or_else(|| self.at.refused(&answer))?.to_owned();
        Ok(Sent { number, tag, sum: None })
    }

    fn complete(&self, upload: &str, parts: &[Sent], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let mut text = "<CompleteMultipartUpload>".to_owned();
        for Sent { number, tag, .. } in parts {
            text += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>");
        }
        text += "</CompleteMultipartUpload>";
        let text = Bytes::from(text);
        let ask = Ask::new(Method::POST, &text)
            .query("uploadId", upload)
            .field("content-type", "application/xml")
            .only_if(|answer| answer.is("CompleteMultipartUploadResult"))
            .takes_long();
        let done = self.at.ask(&ask, cancel).map(drop);
        done.or_else(|error| self.at.ended(error, (MARK, &self.mark), len, cancel))
    }

    fn abort(&self, upload: &str, cancel: &dyn Cancel) -> Result<()> {
        let nothing = Bytes::new();
        let ask = Ask::new(Method::DELETE, &nothing).query("uploadId", upload);
        self.at.ask(&ask, cancel).map(drop)
    }
}
