//! Blobs of Azure: blocks, and the list of those that become the blob.

use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use reqwest::Method;

use super::request::{COMBINE_LIMIT, CloudObject, CloudResponse, UploadRequest, done};
use crate::cancel::Cancel;
use crate::error::{Error, Escaped, Result};
use crate::io::object::checksum::Checksum;
use crate::io::object::upload::{SentPart, UploadLimits, UploadProtocol};

/// A fifth of the 50,000 blocks of a blob: blocks of failed uploads count too, up to 100,000.
pub const LIMITS: UploadLimits =
    UploadLimits { max_parts: 10_000, min_part_len: 1, max_part_len: 4000 << 20 };
/// The metadata with the mark of a blob. Its name may have letters and digits only.
pub const MARK: &str = "x-ms-meta-tensorizerupload";
/// The error code for blocks that do not exist, or no longer exist, in this blob.
const OTHER_BLOCKS: &str = "InvalidBlockList";
/// The error code for a blob with blocks whose names have another length.
const OTHER_NAMES: &str = "InvalidBlobOrBlock";
/// The error code for a blob with too many blocks.
const TOO_MANY_BLOCKS: &str = "BlockCountExceedsLimit";

/// A blob.
pub struct Blob(pub CloudObject);

/// The header with the checksum of a body.
fn checksum(bytes: &[u8]) -> Option<(&'static str, String)> {
    Some(("x-ms-content-crc64", Checksum::of(bytes).for_azure()))
}

impl Blob {
    /// The error of an upload that another one has disturbed.
    fn disturbed_error(&self, why: &str, response: &CloudResponse) -> Error {
        let (status, code) = (response.status.as_u16(), Escaped(response.code()));
        let what = format!("the server answered {status}: {code}: {why}");
        Error::io("writing", &self.0.requests.display_address, std::io::Error::other(what))
    }
}

impl UploadProtocol for Blob {
    fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        let request = UploadRequest {
            fields: &[("x-ms-blob-type", "BlockBlob"), self.0.mark()],
            checksum: checksum(bytes),
            ..UploadRequest::new(Method::PUT, bytes.clone())
        };
        self.0.send_last(&request, bytes.len() as u64, cancel, done)
    }

    fn begin(&self, _cancel: &dyn Cancel) -> Result<Arc<str>> {
        // The blocks of concurrent uploads lie together: the mark tells them apart.
        Ok(self.0.mark().1.into())
    }

    fn part(&self, id: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<SentPart> {
        let tag = BASE64_STANDARD.encode(format!("{id}-{number:05}"));
        let request = UploadRequest {
            query: &[("comp", "block"), ("blockid", &tag)],
            checksum: checksum(bytes),
            ..UploadRequest::new(Method::PUT, bytes.clone())
        };
        self.0.send(&request, cancel, |response| {
            let why = match response.code() {
                OTHER_NAMES => {
                    "another program has begun an upload of this blob, and left uncommitted blocks"
                }
                code if code.ends_with(TOO_MANY_BLOCKS) => {
                    "failed uploads of this blob have left too many uncommitted blocks"
                }
                _ => return done(response),
            };
            let forgets = "which Azure deletes a week after the last of them, or when the blob is \
                           replaced";
            Some(Err(self.disturbed_error(&format!("{why}, {forgets}"), response)))
        })?;
        Ok(SentPart { number, tag, checksum: None })
    }

    fn complete(&self, _id: &str, parts: &[SentPart], len: u64, cancel: &dyn Cancel) -> Result<()> {
        let mut text = "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>".to_owned();
        for SentPart { tag, .. } in parts {
            text += &format!("<Uncommitted>{tag}</Uncommitted>");
        }
        let text = Bytes::from(text + "</BlockList>");
        let request = UploadRequest {
            query: &[("comp", "blocklist")],
            fields: &[self.0.mark()],
            checksum: checksum(&text),
            stall_limit: COMBINE_LIMIT,
            ..UploadRequest::new(Method::PUT, text.clone())
        };
        self.0.send_last(&request, len, cancel, |response| {
            if response.code() != OTHER_BLOCKS {
                return done(response);
            }
            let why = "another program has written this blob during the upload, and Azure has \
                       deleted the blocks of this upload: the blob has the content of the other \
                       program";
            Some(Err(self.disturbed_error(why, response)))
        })
    }

    fn abort(&self, _id: &str, _cancel: &dyn Cancel) -> Result<()> {
        // Azure has no such call; it deletes uncommitted blocks after a week.
        Ok(())
    }
}
