//! `az://container/blob`: blocks, and the list of those that become the blob.

use std::sync::Arc;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use reqwest::Method;

use super::clouds::{Answer, Ask, CloudObject};
use super::object::{Object, Sent, new_mark};
use super::plan::Limits;
use super::sum::Sum;
use crate::cancel::Cancel;
use crate::error::{Error, Result, Shown};

/// Of the 50,000 blocks that a blob may have, as many as those of some uploads that failed leave room
/// for: 100,000 blocks may wait for one blob.
const LIMITS: Limits = Limits { parts: 10_000, least: 1, longest: 4000 << 20 };
const SUM: &str = "x-ms-content-crc64";
/// The metadata with the mark of a blob. No other signs are taken there.
const MARK: &str = "x-ms-meta-tensorizerupload";
/// Blocks that are not, or are no longer, those of this blob.
const OTHER_BLOCKS: &str = "InvalidBlockList";
/// Blocks with names of another length wait there.
const OTHER_NAMES: &str = "InvalidBlobOrBlock";
/// More blocks wait there than may.
const TOO_MANY: &str = "BlockCountExceedsLimit";

/// A blob.
pub struct Blob {
    at: CloudObject,
    mark: String,
}

impl Blob {
    pub fn new(at: CloudObject) -> Result<Self> {
        Ok(Blob { at, mark: new_mark()? })
    }

    /// The error of who is not alone.
    fn disturbed(&self, why: &str, answer: &Answer) -> Error {
        let (status, code) = (answer.status.as_u16(), Shown(answer.code()));
        let what = format!("the server answered {status}: {code}: {why}");
        Error::io("writing", self.shown(), std::io::Error::other(what))
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
            .field(MARK, &*self.mark)
            .sum(SUM, Sum::of(bytes).for_azure());
        let sent = self.at.ask(&ask, cancel).map(drop);
        sent.or_else(|error| self.at.ended(error, (MARK, &self.mark), bytes.len() as u64, cancel))
    }

    fn begin(&self, _cancel: &dyn Cancel) -> Result<Arc<str>> {
        // The blocks of all who write a blob lie together: theirs have other names.
        Ok(Arc::from(&*self.mark))
    }

    fn part(&self, upload: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<Sent> {
        let tag = BASE64_STANDARD.encode(format!("{upload}-{number:05}"));
        let ask = Ask::new(Method::PUT, bytes)
            .query("comp", "block")
            .query("blockid", &*tag)
            .sum(SUM, Sum::of(bytes).for_azure())
            .answered_by(|_, code| code == OTHER_NAMES || code.ends_with(TOO_MANY));
        let answer = self.at.ask(&ask, cancel)?;
        if !answer.status.is_success() {
            let forgets = "which Azure forgets a week after the last of them, or when the blob is \
                           written as a whole";
            let why = match answer.code() {
                OTHER_NAMES => {
                    "another program has begun to write this blob, and left blocks there"
                }
                _ => "uploads of this blob that failed have left too many blocks there",
            };
            return Err(self.disturbed(&format!("{why}, {forgets}"), &answer));
        }
        Ok(Sent { number, tag, sum: None })
    }

    fn complete(&self, _upload: &str, parts: &[Sent], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let mut text = "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>".to_owned();
        for Sent { tag, .. } in parts {
            text += &format!("<Uncommitted>{tag}</Uncommitted>");
        }
        text += "</BlockList>";
        let text = Bytes::from(text);
        let ask = Ask::new(Method::PUT, &text)
            .query("comp", "blocklist")
            .field(MARK, &*self.mark)
            .sum(SUM, Sum::of(&text).for_azure())
            .answered_by(|_, code| code == OTHER_BLOCKS)
            .takes_long();
        let refused = match self.at.ask(&ask, cancel) {
            Ok(answer) if answer.status.is_success() => return Ok(()),
            Ok(answer) => {
                let why = "another program has written this blob meanwhile, and Azure has forgotten \
                           blocks of this one: the blob is that of the other";
                self.disturbed(why, &answer)
            }
            Err(error) => error,
        };
        self.at.ended(refused, (MARK, &self.mark), len, cancel)
    }

    fn abort(&self, _upload: &str, _cancel: &dyn Cancel) -> Result<()> {
        // There is no such call: Azure forgets blocks that nobody has listed a week later.
        Ok(())
    }
}
