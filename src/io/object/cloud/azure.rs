//! Blobs of Azure: blocks, and the list of those that become the blob.

use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use reqwest::Method;

use super::request::{COMBINE_LIMIT, CloudObject, CloudResponse, UploadRequest, done};
use crate::cancel::Cancel;
use crate::error::{Error, Escaped, Result};
use crate::io::object::checksum::Checksum;
use crate::io::object::upload::{SentPart, UploadProtocol};

/// Bytes of the longest block.
pub const MAX_PART_LEN: u64 = 4000 << 20;
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

/// A request that sends a body and its checksum.
fn put(bytes: &Bytes) -> UploadRequest<'static> {
    let checksum = Some(("x-ms-content-crc64", Checksum::of(bytes).for_azure()));
    UploadRequest { checksum, ..UploadRequest::new(Method::PUT, bytes.clone()) }
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
        let fields = &[("x-ms-blob-type", "BlockBlob"), self.0.mark()];
        let request = UploadRequest { fields, ..put(bytes) };
        self.0.send_last(&request, bytes.len() as u64, cancel, done)
    }

    fn begin(&self, _cancel: &dyn Cancel) -> Result<Arc<str>> {
        // The blocks of concurrent uploads lie together: the mark tells them apart.
        Ok(self.0.mark().1.into())
    }

    fn part(&self, id: &str, number: u64, bytes: &Bytes, cancel: &dyn Cancel) -> Result<SentPart> {
        let tag = BASE64_STANDARD.encode(format!("{id}-{number:05}"));
        let query = &[("comp", "block"), ("blockid", &*tag)];
        let request = UploadRequest { query, ..put(bytes) };
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
            stall_limit: COMBINE_LIMIT,
            ..put(&text)
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
