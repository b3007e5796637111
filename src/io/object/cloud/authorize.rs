//! The identity of requests to Google and Azure: its credentials in a request.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Instant;

use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::header::{AUTHORIZATION, HeaderName, HeaderValue};
use reqwest::{Request, Url};

use crate::io::auth::{CloudCredential, CredentialProvider};
use crate::io::transport::Failure;

/// The header with the version of Azure's API, for requests that are not signed.
pub const AZURE_VERSION: (&str, &str) = ("x-ms-version", "2023-11-03");
/// Google's header with the project that pays.
const QUOTA_PROJECT: HeaderName = HeaderName::from_static("x-goog-user-project");
/// The code with which Google refuses a request for a bucket whose requester pays.
const PROJECT_MISSING: &str = "UserProjectMissing";

/// The identity of requests.
#[derive(Clone)]
pub struct CloudIdentity {
    /// The storage account, of Azure only.
    pub account: Arc<str>,
    /// The project that pays for requests, of Google only.
    pub quota_project: Option<Arc<str>>,
    pub credentials: Arc<CredentialProvider>,
}

impl CloudIdentity {
    /// The function that adds the current credentials to requests.
    pub async fn authorization(
        &self,
    ) -> Result<impl Fn(&mut Request) -> Result<(), Failure> + use<>, Failure> {
        let (credential, identity) = (self.credentials.get().await?, self.clone());
        Ok(move |request: &mut Request| identity.authorize(&credential, request))
    }

    /// Drops the credentials that were in use at that time, because a server has refused them.
    pub fn invalidate(&self, used: Instant) {
        self.credentials.invalidate(used);
    }

    /// Adds credentials to a request. Azure's keys sign all other headers.
    fn authorize(
        &self,
        credential: &CloudCredential,
        request: &mut Request,
    ) -> Result<(), Failure> {
        if let Some(project) = &self.quota_project {
            request.headers_mut().insert(QUOTA_PROJECT, header_value(project)?);
        }
        match credential {
            #[cfg(feature = "s3")]
            CloudCredential::Aws(_) => {
                let what = "AWS credentials cannot sign a request to another cloud";
                Err(Failure::permanent(ErrorKind::InvalidInput, what))
            }
            // A service account for emulators has no token.
            CloudCredential::Google(found) if found.bearer.is_empty() => Ok(()),
            CloudCredential::Google(found) => {
                let mut value = header_value(&format!("Bearer {}", found.bearer))?;
                value.set_sensitive(true);
                request.headers_mut().insert(AUTHORIZATION, value);
                Ok(())
            }
            CloudCredential::Azure(credential) => {
                sign_for_azure(credential, &self.account, request)
            }
        }
    }
}

fn sign_for_azure(
    credential: &AzureCredential,
    account: &str,
    request: &mut Request,
) -> Result<(), Failure> {
    let malformed = |what: String| Failure::permanent(ErrorKind::InvalidInput, what);
    if let AzureCredential::BearerToken(bearer) = credential {
        header_value(bearer)?;
    }
    let mut signed_request = HttpRequest::new(HttpRequestBody::empty());
    *signed_request.method_mut() = request.method().clone();
    *signed_request.uri_mut() = request
        .url()
        .as_str()
        .parse()
        .map_err(|_| malformed("cannot sign a request: its address is invalid".to_owned()))?;
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

/// A text as the value of a header.
fn header_value(text: &str) -> Result<HeaderValue, Failure> {
    let malformed = |_| {
        Failure::permanent(
            ErrorKind::InvalidData,
            "the access token has characters that a header cannot hold",
        )
    };
    HeaderValue::from_str(text).map_err(malformed)
}

/// The failure that a refusal with this code means, with the setting that would have helped.
pub fn with_project_hint(failure: Failure, code: &str) -> Failure {
    if code != PROJECT_MISSING {
        return failure;
    }
    let what = format!(
        "{failure} (the requester pays for this bucket: set GOOGLE_CLOUD_QUOTA_PROJECT to the \
         project that pays)"
    );
    failure.with_text(what)
}
