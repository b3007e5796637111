//! `az://container/blob`: blocks, and the list of those that become the blob.

use std::sync::Arc;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use reqwest::{Method, StatusCode};

use super::clouds::{Ask, CloudObject};
use super::object::{Object, Sent, new_mark};
use super::plan::Limits;
use super::sum::Sum;
use crate::cancel::Cancel;
use crate::error::{Error, Result};

const LIMITS: Limits = Limits { parts: 50_000, least: 1, longest: 4000 << 20 };
const SUM: &str = "x-ms-content-crc64";
/// The metadata with the mark of a blob that was sent in blocks. No other signs are taken there.
const MARK: &str = "x-ms-meta-tensorizerupload";
/// Blocks that are not, or are no longer, those of this blob.
const OTHER_BLOCKS: &str = "InvalidBlockList";
/// Blocks with names of another length wait there.
const OTHER_NAMES: &str = "InvalidBlobOrBlock";

/// A blob.
pub struct Blob {
    at: CloudObject,
}

impl Blob {
    pub fn new(at: CloudObject) -> Self {
        Blob { at }
    }

    /// The error of who is not alone; `what` is what the server said.
    fn disturbed(&self, why: &str, what: &str) -> Error {
        let what = format!("the server answered 400: {what}: {why}");
        Error::io("writing", self.shown(), std::io::Error::other(what))
    }

    /// Whether the blob is the one of this upload.
    fn is_there(&self, upload: &str, len: u64, cancel: &dyn Cancel) -> Result<bool> {
        let nothing = Bytes::new();
        let ask = Ask::new(Method::HEAD, &nothing)
            .answered_by(|status, _| status == StatusCode::NOT_FOUND);
        let answer = self.at.ask(&ask, cancel)?;
        let is_whole = |size: &str| size.parse::<u64>() == Ok(len);
        Ok(answer.field(MARK) == Some(upload)
            && answer.field("content-length").is_some_and(is_whole))
    }
}

impl Object for Blob {
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
        let ask = Ask::new(Method::PUT, bytes)
            .field("x-ms-blob-type", "BlockBlob")
            .sum(SUM, Sum::of(bytes).for_azure());
        self.at.ask(&ask, cancel).map(drop)
    }

    fn begin(&self, _cancel: &dyn Cancel) -> Result<Arc<str>> {
        // The blocks of all who write a blob lie together: theirs have other names.
        new_mark().map(Arc::from)
    }

    fn part(&self, upload: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<Sent> {
        let tag = BASE64_STANDARD.encode(format!("{upload}-{number:05}"));
        let ask = Ask::new(Method::PUT, bytes)
            .query("comp", "block")
            .query("blockid", &*tag)
            .sum(SUM, Sum::of(bytes).for_azure())
            .answered_by(|_, code| code == OTHER_NAMES);
        let answer = self.at.ask(&ask, cancel)?;
        if !answer.status.is_success() {
            let why = "another program has begun to write this blob, and left blocks there, which \
                       Azure forgets a week later, or when the blob is written as a whole";
            return Err(self.disturbed(why, OTHER_NAMES));
        }
        Ok(Sent { number, tag, sum: None })
    }

    fn complete(&self, upload: &str, parts: &[Sent], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let mut text = "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>".to_owned();
        for Sent { tag, .. } in parts {
            text += &format!("<Uncommitted>{tag}</Uncommitted>");
        }
        text += "</BlockList>";
        let text = Bytes::from(text);
        let ask = Ask::new(Method::PUT, &text)
            .query("comp", "blocklist")
            .field(MARK, upload)
            .sum(SUM, Sum::of(&text).for_azure())
            .answered_by(|_, code| code == OTHER_BLOCKS);
        let answer = self.at.ask(&ask, cancel)?;
        // It was done, and the answer lost, if what is there now is what was sent.
        if answer.status.is_success() || self.is_there(upload, len, cancel)? {
            return Ok(());
        }
        let why = "another program has written this blob meanwhile, and Azure has forgotten blocks \
                   of this one: the blob is that of the other";
        Err(self.disturbed(why, OTHER_BLOCKS))
    }

    fn abort(&self, _upload: &str, _cancel: &dyn Cancel) -> Result<()> {
        // There is no such call: Azure forgets blocks that nobody has listed a week later.
        Ok(())
    }
}
