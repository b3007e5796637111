//! Credentials of Google and Azure in a request.

use std::io::ErrorKind;

use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Request, Url};

use super::CloudCredential;
use crate::io::transport::Failure;

/// The header with the version of Azure's API, for requests that are not signed.
pub const AZURE_VERSION: (&str, &str) = ("x-ms-version", "2023-11-03");

impl CloudCredential {
    /// Adds credentials to a request. Azure's keys sign all other headers.
    pub fn authorize(&self, account: &str, request: &mut Request) -> Result<(), Failure> {
        let credential = match self {
            #[cfg(feature = "s3")]
            CloudCredential::Aws(_) => {
                let what = "AWS credentials cannot sign a request to another cloud";
                return Err(Failure::permanent(ErrorKind::InvalidInput, what));
            }
            // A service account for emulators has no token.
            CloudCredential::Google(found) if found.bearer.is_empty() => return Ok(()),
            CloudCredential::Google(found) => {
                let mut value = header_value(&format!("Bearer {}", found.bearer))?;
                value.set_sensitive(true);
                request.headers_mut().insert(AUTHORIZATION, value);
                return Ok(());
            }
            CloudCredential::Azure(credential) => credential,
        };
        let malformed = |what: String| Failure::permanent(ErrorKind::InvalidInput, what);
        if let AzureCredential::BearerToken(bearer) = &**credential {
            header_value(bearer)?;
        }
        let mut signed_request = HttpRequest::new(HttpRequestBody::empty());
        *signed_request.method_mut() = request.method().clone();
        *signed_request.uri_mut() =
            request.url().as_str().parse().map_err(|_| {
                malformed("cannot sign a request: its address is invalid".to_owned())
            })?;
        *signed_request.headers_mut() = request.headers().clone();
        let signed = AzureAuthorizer::new(credential, account).try_authorize(&mut signed_request);
        signed.map_err(|error| malformed(format!("signing a request: {error}")))?;
        if let Some(value) = signed_request.headers_mut().get_mut(AUTHORIZATION) {
            value.set_sensitive(true);
        }
        // A shared access signature is in the address.
        let url =
            Url::parse(&signed_request.uri().to_string()).map_err(|e| malformed(e.to_string()))?;
        *request.url_mut() = url;
        *request.headers_mut() = std::mem::take(signed_request.headers_mut());
        Ok(())
    }
}

/// A token as the value of a header.
fn header_value(text: &str) -> Result<HeaderValue, Failure> {
    let malformed = |_| {
        Failure::permanent(
            ErrorKind::InvalidData,
            "the access token has characters that a header cannot hold",
        )
    };
    HeaderValue::from_str(text).map_err(malformed)
}
