//! Requests to the hub about files, and its responses.

use std::fs;
use std::io::ErrorKind;

use reqwest::header::{HeaderMap, LOCATION};
use reqwest::{StatusCode, Url};

use super::address::{HubAddress, is_commit};
use super::local_cache::hf_home;
use crate::cancel::Cancel;
use crate::codec::sha256::parse_hex;
use crate::environment::{HF_ENDPOINT, HF_NO_TOKEN, HF_TOKEN, HF_TOKEN_PATH, OLD_TOKEN};
use crate::error::{Error, Result};
use crate::io::transport::{ErrorDocument, TransportOptions, header_text, request_ids};
use crate::io::{HubChecksum, http};

/// The address of the hub, unless the environment names another.
const ENDPOINT: &str = "https://huggingface.co";

/// The header with the hash of an LFS file.
const LINKED_ETAG: &str = "x-linked-etag";
/// The hub's message for an unknown token.
const BAD_TOKEN: &str = "Invalid credentials in Authorization header";

/// A server with repositories.
pub struct Hub {
    endpoint: Url,
    token: Option<String>,
    /// The options of requests, with the token.
    pub options: TransportOptions,
}

/// The response of the hub about a file.
pub struct HubResponse {
    /// True if there is such a file.
    pub exists: bool,
    /// The commit that the revision points to now.
    pub commit: Option<String>,
    /// The checksum that it publishes.
    pub checksum: HubChecksum,
    /// True if it refuses the token that was sent.
    pub refuses_token: bool,
    refusal: Option<Error>,
}

impl HubResponse {
    /// Returns the response, or the error of a refusal.
    pub fn into_result(self) -> Result<Self> {
        self.refusal.map_or(Ok(HubResponse { refusal: None, ..self }), Err)
    }
}

impl Hub {
    /// The hub that the environment names, with its token.
    pub fn from_environment(mut options: TransportOptions) -> Result<Self> {
        let named = HF_ENDPOINT.value().unwrap_or(ENDPOINT.into());
        let endpoint = named.to_str().and_then(|text| Url::parse(text).ok());
        let http = |url: &Url| matches!(url.scheme(), "http" | "https") && url.has_host();
        let endpoint = endpoint.filter(http).ok_or_else(|| {
            let what =
                "the environment variable HF_ENDPOINT must be an http:// or https:// address";
            Error::InvalidArgument(what.to_owned())
        })?;
        let token = token()?;
        let header =
            token.iter().map(|token| ("Authorization".to_owned(), format!("Bearer {token}")));
        options.headers.extend(header);
        Ok(Hub { endpoint, token, options })
    }

    /// The URL of a file.
    pub fn url(&self, address: &HubAddress) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(address.repo.split('/')).push("resolve");
            path.push(&address.revision).extend(address.path.split('/'));
        }
        url
    }

    /// Requests the properties of a file, without its bytes. No response is an error. `has_copy`:
    /// true for short time limits, because a local copy can be used instead.
    pub fn ask(
        &self,
        address: &HubAddress,
        has_copy: bool,
        cancel: &dyn Cancel,
    ) -> Result<HubResponse> {
        let mut options = self.options.clone();
        if has_copy {
            options.limit_all(http::LIMIT_WITH_COPY);
        }
        let display_address = address.display_address();
        let (status, headers) =
            http::headers(self.url(address), &display_address, &options, cancel)?;
        let commit = header_text(&headers, "x-repo-commit").filter(|text| is_commit(text));
        // Any URL of a server may redirect to another host, so a redirect alone proves nothing.
        let is_hub = commit.is_some() || headers.contains_key(LINKED_ETAG);
        let exists = status.is_success() || (status.is_redirection() && is_hub);
        let code = header_text(&headers, "x-error-code").unwrap_or("");
        let missing =
            code == "EntryNotFound" || (code.is_empty() && status == StatusCode::NOT_FOUND);
        let refusal = (!exists && !missing).then(|| self.refusal(address, status, &headers));
        let refuses_token = self.token.is_some()
            && matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        let (commit, checksum) = (commit.map(str::to_owned), checksum(&headers));
        Ok(HubResponse { exists, commit, checksum, refuses_token, refusal })
    }

    fn refusal(&self, address: &HubAddress, status: StatusCode, headers: &HeaderMap) -> Error {
        let failed =
            |kind, what| Error::failed("asking for", &address.display_address(), kind, what);
        if status.is_redirection() {
            let to = header_text(headers, LOCATION).and_then(|to| self.endpoint.join(to).ok());
            let to = to.map_or_else(String::new, |url| url.origin().ascii_serialization());
            let what = format!(
                "the hub redirects to {to}, and the token is not sent to another server: set \
                 HF_ENDPOINT to the final address of the hub"
            );
            return failed(ErrorKind::InvalidData, what);
        }
        let code = header_text(headers, "x-error-code").unwrap_or("");
        let reason = ErrorDocument::read(headers, &[]).without(self.token.as_slice());
        let ids = request_ids(headers);
        let answer = format!("the hub answered {status}{reason}{ids}");
        let kind = match status {
            StatusCode::NOT_FOUND | StatusCode::GONE => ErrorKind::NotFound,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::PermissionDenied,
            _ => ErrorKind::Other,
        };
        let token = match self.token {
            Some(_) => "the token (of HF_TOKEN, or of the login) has no access to it",
            None => "set HF_TOKEN to a token that has access to it",
        };
        let (repo, revision) = (&address.repo, &address.revision);
        let bad_token = header_text(headers, "x-error-message") == Some(BAD_TOKEN);
        let what = match (code, status) {
            (_, StatusCode::UNAUTHORIZED) if bad_token && self.token.is_some() => {
                "the hub rejects the token (of HF_TOKEN, or of the login): it is wrong, or has \
                 expired; public repositories can be read without a token"
                    .to_owned()
            }
            ("RevisionNotFound", _) => format!("`{repo}` has no revision `{revision}`"),
            ("GatedRepo", _) => {
                format!("`{repo}` is gated: request access on its page on the hub; {token}")
            }
            ("RepoNotFound", _) | (_, StatusCode::UNAUTHORIZED) => {
                format!("there is no repository `{repo}`, or it is private: {token}")
            }
            (_, StatusCode::FORBIDDEN) => format!("the hub refuses access to `{repo}`: {token}"),
            _ => return failed(kind, answer),
        };
        failed(kind, format!("{what}; {answer}"))
    }
}

/// The token that the hub's own client would send: that of the environment, or of the last login.
fn token() -> Result<Option<String>> {
    let non_empty = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
    if HF_NO_TOKEN.is_true() {
        return Ok(None);
    }
    if let Some(token) =
        HF_TOKEN.or(&OLD_TOKEN).value().as_ref().and_then(|text| non_empty(text.to_str()?))
    {
        return Ok(Some(token));
    }
    let Some(path) = HF_TOKEN_PATH.expanded().or_else(|| Some(hf_home()?.join("token"))) else {
        return Ok(None);
    };
    match fs::read_to_string(&path) {
        Ok(text) => Ok(non_empty(&text)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(Error::io("reading the token in", &path.display().to_string(), e)),
    }
}

/// The hub publishes the SHA-256 of LFS files, and another hash for other files.
fn checksum(headers: &HeaderMap) -> HubChecksum {
    let tag = header_text(headers, LINKED_ETAG).or_else(|| header_text(headers, "etag"));
    tag.map_or(HubChecksum::NotSha256, |tag| {
        sha256_of_tag(tag.trim_start_matches("W/").trim_matches('"'))
    })
}

/// The SHA-256 in the `ETag` of a file, if the tag is one.
pub fn sha256_of_tag(tag: &str) -> HubChecksum {
    parse_hex(tag).map_or(HubChecksum::NotSha256, HubChecksum::Sha256)
}
