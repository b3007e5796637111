//! Blobs of Azure: blocks, and the list of those that become the blob.

use std::sync::Arc;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use reqwest::Method;

use super::request::{CloudObject, CloudResponse, UploadRequest};
use crate::cancel::Cancel;
use crate::error::{Error, Escaped, Result};
use crate::io::object::checksum::Checksum;
use crate::io::object::upload::{SentPart, UploadLimits, UploadProtocol, new_mark};

/// A fifth of the 50,000 blocks of a blob: blocks of failed uploads count too, up to 100,000.
const LIMITS: UploadLimits =
    UploadLimits { max_parts: 10_000, min_part_len: 1, max_part_len: 4000 << 20 };
const CHECKSUM: &str = "x-ms-content-crc64";
/// The metadata with the mark of a blob. Its name may have letters and digits only.
const MARK: &str = "x-ms-meta-tensorizerupload";
/// The error code for blocks that do not exist, or no longer exist, in this blob.
const OTHER_BLOCKS: &str = "InvalidBlockList";
/// The error code for a blob with blocks whose names have another length.
const OTHER_NAMES: &str = "InvalidBlobOrBlock";
/// The error code for a blob with too many blocks.
const TOO_MANY_BLOCKS: &str = "BlockCountExceedsLimit";

/// A blob.
pub struct Blob {
    object: CloudObject,
    mark: String,
}

impl Blob {
    pub fn new(object: CloudObject) -> Result<Self> {
        Ok(Blob { object, mark: new_mark()? })
    }

    /// The error of an upload that another one has disturbed.
    fn disturbed_error(&self, why: &str, response: &CloudResponse) -> Error {
        let (status, code) = (response.status.as_u16(), Escaped(response.code()));
        let what = format!("the server answered {status}: {code}: {why}");
        Error::io("writing", self.display_address(), std::io::Error::other(what))
    }
}

impl UploadProtocol for Blob {
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
            .field("x-ms-blob-type", "BlockBlob")
            .field(MARK, &*self.mark)
            .checksum(CHECKSUM, Checksum::of(bytes).for_azure());
        let sent = self.object.send(&request, cancel).map(drop);
        sent.or_else(|error| {
            self.object.confirm_completed(error, (MARK, &self.mark), bytes.len() as u64, cancel)
        })
    }

    fn begin(&self, _cancel: &dyn Cancel) -> Result<Arc<str>> {
        // The blocks of concurrent uploads lie together: the mark tells them apart.
        Ok(Arc::from(&*self.mark))
    }

    fn part(
        &self,
        upload: &str,
        number: u64,
        bytes: &Bytes,
        cancel: &dyn Cancel,
    ) -> Result<SentPart> {
        let tag = BASE64_STANDARD.encode(format!("{upload}-{number:05}"));
        let request = UploadRequest::new(Method::PUT, bytes)
            .query("comp", "block")
            .query("blockid", &*tag)
            .checksum(CHECKSUM, Checksum::of(bytes).for_azure())
            .handling(|_, code| code == OTHER_NAMES || code.ends_with(TOO_MANY_BLOCKS));
        let response = self.object.send(&request, cancel)?;
        if !response.status.is_success() {
            let forgets = "which Azure deletes a week after the last of them, or when the blob is \
                           replaced";
            let why = match response.code() {
                OTHER_NAMES => {
                    "another program has begun an upload of this blob, and left uncommitted blocks"
                }
                _ => "failed uploads of this blob have left too many uncommitted blocks",
            };
            return Err(self.disturbed_error(&format!("{why}, {forgets}"), &response));
        }
        Ok(SentPart { number, tag, checksum: None })
    }

    fn complete(
        &self,
        _upload: &str,
        parts: &[SentPart],
        len: u64,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        let mut text = "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>".to_owned();
        for SentPart { tag, .. } in parts {
            text += &format!("<Uncommitted>{tag}</Uncommitted>");
        }
        text += "</BlockList>";
        let text = Bytes::from(text);
        let request = UploadRequest::new(Method::PUT, &text)
            .query("comp", "blocklist")
            .field(MARK, &*self.mark)
            .checksum(CHECKSUM, Checksum::of(&text).for_azure())
            .handling(|_, code| code == OTHER_BLOCKS)
            .with_long_limit();
        let refused = match self.object.send(&request, cancel) {
            Ok(response) if response.status.is_success() => return Ok(()),
            Ok(response) => {
                let why = "another program has written this blob during the upload, and Azure has \
                           deleted the blocks of this upload: the blob has the content of the \
                           other program";
                self.disturbed_error(why, &response)
            }
            Err(error) => error,
        };
        self.object.confirm_completed(refused, (MARK, &self.mark), len, cancel)
    }

    fn abort(&self, _upload: &str, _cancel: &dyn Cancel) -> Result<()> {
        // Azure has no such call; it deletes uncommitted blocks after a week.
        Ok(())
    }
}
