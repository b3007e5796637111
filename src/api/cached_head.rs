//! Cached heads: the results of opening a file, for other processes that open it.

use super::catalog_part::Opening;
use crate::io::{CachedHead, ReadAt};

/// Response headers that a cached head retains, because they describe the file. Other headers may
/// contain secrets, such as a session or a signed address.
const SHARED_RESPONSE_HEADERS: [&str; 6] =
    ["accept-ranges", "content-length", "content-range", "content-type", "etag", "last-modified"];

impl Opening<'_> {
    /// Returns the cached head of a file that begins with these bytes, given in two pieces. None if
    /// heads are not requested, for local files outside a hub's cache, for servers without range
    /// requests, and for a file inside another one.
    pub(super) fn cached_head(
        &self,
        source: &dyn ReadAt,
        base: u64,
        first: &[u8],
        rest: &[u8],
    ) -> Option<CachedHead> {
        let mut head = source.facts().head().filter(|_| self.keeps_heads && base == 0)?.clone();
        head.headers.retain(|(name, _)| SHARED_RESPONSE_HEADERS.contains(&name.as_str()));
        if head.tag.is_none() && head.modified.is_none() {
            // Without a tag or a date, no later response could prove that the file still begins
            // with these bytes.
            return Some(head);
        }
        Some(CachedHead { first: [first, rest].concat().into(), ..head })
    }
}

#[cfg(test)]
#[cfg(feature = "http")]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use super::super::file::TensorFile;
    use super::*;
    use crate::cancel::Never;
    use crate::error::{Error, Result};
    use crate::io::{OpenOptions, uri};

    /// No server listens at this address.
    const ADDRESS: &str = "http://user:word@127.0.0.1:1/f?token=hidden";

    fn head() -> CachedHead {
        let json = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
        let json = format!("{json:80}");
        let first: Vec<u8> = 80u64.to_le_bytes().into_iter().chain(json.bytes()).collect();
        CachedHead {
            uri: "http://127.0.0.1:1/f?...".to_owned(),
            len: 90,
            tag: Some("\"tag\"".to_owned()),
            modified: None,
            headers: vec![("etag".to_owned(), "\"tag\"".to_owned())],
            first: first.into(),
        }
    }

    fn open_with(opening: &Opening<'_>, head: CachedHead) -> Result<TensorFile> {
        let options = OpenOptions::from_environment().unwrap();
        let cached_heads = Arc::new(HashMap::from([(head.uri.clone(), head)]));
        let options = OpenOptions { cached_heads, ..options };
        opening.source(uri::open_model(ADDRESS, &options, &Never)?, 0)
    }

    fn open(head: CachedHead) -> Result<TensorFile> {
        let opening = Opening { keeps_heads: true, ..Opening::new(&Never) };
        open_with(&opening, head)
    }

    #[test]
    fn file_is_opened_from_a_cached_head_without_its_server() {
        let file = open(head()).unwrap();
        assert_eq!(file.entry(0).unwrap().data_offset, 88);
        assert_eq!(file.source(0).unwrap().facts().head().unwrap().headers, head().headers);
        assert_eq!(file.heads(), [head()]);
    }

    #[test]
    fn only_headers_about_the_file_are_shared() {
        let names = ["set-cookie", "etag", "x-amz-security-token", "authorization", "location"];
        let headers = names.map(|name| (name.to_owned(), "value".to_owned()));
        let file = open(CachedHead { headers: headers.clone().into(), ..head() }).unwrap();
        assert_eq!(file.source(0).unwrap().facts().head().unwrap().headers, headers);
        assert_eq!(file.heads()[0].headers, [("etag".to_owned(), "value".to_owned())]);
    }

    #[test]
    fn cached_head_without_validator_is_not_used() {
        let open_with_validators = |tag: Option<&str>, modified: Option<&str>| {
            let text = |text: Option<&str>| text.map(str::to_owned);
            open(CachedHead { tag: text(tag), modified: text(modified), ..head() })
        };
        open_with_validators(Some("\"tag\""), None).unwrap();
        open_with_validators(None, Some("a date")).unwrap();
        let error = open_with_validators(None, None).err().unwrap();
        assert!(matches!(&error, Error::Io { uri, .. } if *uri == head().uri), "{error}");
    }

    #[test]
    fn heads_are_cached_only_on_request() {
        assert_eq!(open_with(&Opening::new(&Never), head()).unwrap().heads(), []);
    }

    #[test]
    fn cached_head_longer_than_its_file_is_refused() {
        let error = open(CachedHead { len: 87, ..head() }).err().unwrap();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        assert!(
            error.to_string().contains("at most the 87 bytes of the file, found 88"),
            "{error}"
        );
        assert!(matches!(open(CachedHead { len: 89, ..head() }), Err(Error::Truncated { .. })));
    }
}
