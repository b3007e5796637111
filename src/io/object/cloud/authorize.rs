//! The identity of requests to Google and Azure: its credentials in a request.

use std::fmt::Display;
use std::io::ErrorKind;

use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::header::{AUTHORIZATION, HeaderName, HeaderValue};
use reqwest::{Request, Url};

use crate::io::auth::{CloudCredential, CloudIdentity};
use crate::io::transport::Failure;

/// The header with the version of Azure's API, for requests that are not signed.
pub const AZURE_VERSION: (&str, &str) = ("x-ms-version", "2023-11-03");
/// Google's header with the project that pays.
const QUOTA_PROJECT: HeaderName = HeaderName::from_static("x-goog-user-project");
/// The code with which Google refuses a request for a bucket whose requester pays.
const PROJECT_MISSING: &str = "UserProjectMissing";

impl CloudIdentity {
    /// The function that adds the current credentials to requests.
    pub async fn authorization(
        &self,
    ) -> Result<impl Fn(&mut Request) -> Result<(), Failure> + use<>, Failure> {
        let (credential, identity) = (self.credentials.get().await?, self.clone());
        Ok(move |request: &mut Request| identity.authorize(&credential, request))
    }

    /// Adds credentials to a request. Azure's keys sign all other headers.
    fn authorize(&self, found: &CloudCredential, request: &mut Request) -> Result<(), Failure> {
        if let Some(project) = &self.quota_project {
            request.headers_mut().insert(QUOTA_PROJECT, header_value(project)?);
        }
        match found {
            #[cfg(feature = "s3")]
            CloudCredential::Aws(_) => Err(malformed(&"the credentials are of AWS")),
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
    if let AzureCredential::BearerToken(bearer) = credential {
        header_value(bearer)?;
    }
    let mut signed = HttpRequest::new(HttpRequestBody::empty());
    *signed.method_mut() = request.method().clone();
    *signed.uri_mut() = request.url().as_str().parse().map_err(|e| malformed(&e))?;
    *signed.headers_mut() = std::mem::take(request.headers_mut());
    let authorizer = AzureAuthorizer::new(credential, account);
    authorizer.try_authorize(&mut signed).map_err(|e| malformed(&e))?;
    if let Some(value) = signed.headers_mut().get_mut(AUTHORIZATION) {
        value.set_sensitive(true);
    }
    // A shared access signature is in the address.
    *request.url_mut() = Url::parse(&signed.uri().to_string()).map_err(|e| malformed(&e))?;
    *request.headers_mut() = std::mem::take(signed.headers_mut());
    Ok(())
}

/// The failure of a request that cannot be signed.
fn malformed(error: &dyn Display) -> Failure {
    Failure::permanent(ErrorKind::InvalidInput, format!("signing a request: {error}"))
}

/// A text as the value of a header.
fn header_value(text: &str) -> Result<HeaderValue, Failure> {
    HeaderValue::from_str(text).map_err(|_| {
        let what = "the access token has characters that a header cannot hold";
        Failure::permanent(ErrorKind::InvalidData, what)
    })
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
