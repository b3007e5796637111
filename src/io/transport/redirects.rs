//! Redirects: followed with the headers of the request to the same host, without them elsewhere,
//! and never from `https://` to `http://`.

use std::io::ErrorKind;
use std::sync::Arc;

use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, LOCATION,
};
use reqwest::{Method, Request, Response, StatusCode, Url};

use super::{Client, Failure};

/// Characters of the shortest text that is taken for a secret.
const SHORTEST_SECRET: usize = 8;
/// The most redirects of one request.
const MAX_REDIRECTS: usize = 10;

/// Adds credentials to a request that depend on the rest of it, such as a signature.
pub type Authorize = Arc<dyn Fn(&mut Request) -> Result<(), Failure> + Send + Sync>;

/// Fields of queries of AWS whose values refusals name, too: the operation, the role, the account.
const NO_SECRETS: [&str; 3] = ["x-id", "role_name", "account_id"];

/// Texts that a message must not have: values of these headers, credentials, values of the query.
pub fn secrets<'h>(request: &'h Request, headers: impl Iterator<Item = &'h str>) -> Vec<String> {
    let added = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let headers = headers.chain(added).flat_map(|value| value.split(' '));
    let query = request.url().query_pairs().filter(|(name, _)| !NO_SECRETS.contains(&&**name));
    let query = query.map(|(_, value)| value.into_owned());
    let password = request.url().password().map(str::to_owned);
    let all = headers.map(str::to_owned).chain(query).chain(password);
    all.filter(|text| text.len() >= SHORTEST_SECRET).collect()
}

/// The headers of a caller. They may be secrets.
pub fn header_map(headers: &[(String, String)]) -> Result<HeaderMap, Failure> {
    let header = |(name, value): &(String, String)| {
        let mut value: HeaderValue = value.parse().ok()?;
        value.set_sensitive(true);
        Some((name.parse::<HeaderName>().ok()?, value))
    };
    let headers: Option<HeaderMap> = headers.iter().map(header).collect();
    headers.ok_or_else(|| {
        let what = "a request header, such as that with the token, has an invalid name or value";
        Failure::permanent(ErrorKind::InvalidInput, what)
    })
}

/// A URL, and the headers and credentials that are sent there.
#[derive(Clone)]
pub struct RequestTarget {
    pub url: Url,
    headers: Vec<(String, String)>,
    authorize: Option<Authorize>,
}

impl RequestTarget {
    pub fn new(url: Url, headers: Vec<(String, String)>) -> Self {
        RequestTarget { url, headers, authorize: None }
    }

    /// The same location, whose requests are authorized.
    pub fn authorized(self, authorize: Authorize) -> Self {
        RequestTarget { authorize: Some(authorize), ..self }
    }

    /// Texts that a message must not have.
    pub fn secrets(&self) -> Vec<String> {
        let mut request = Request::new(Method::GET, self.url.clone());
        if let Some(authorize) = &self.authorize {
            // Credentials that cannot be added were not sent.
            let _ = authorize(&mut request);
        }
        secrets(&request, self.headers.iter().map(|(_, value)| value.as_str()))
    }

    /// A file in the same folder, requested in the same way.
    pub fn sibling(&self, name: &str) -> Option<RequestTarget> {
        let mut url = self.url.clone();
        url.path_segments_mut().ok()?.pop().extend(name.split('/'));
        Some(RequestTarget { url, ..self.clone() })
    }

    /// The location that a redirect names, which may have letters of UTF-8.
    fn redirected(&self, response: &Response) -> Result<RequestTarget, Failure> {
        let refused = |what: &str| Failure::permanent(ErrorKind::InvalidData, what);
        let to = response.headers().get(LOCATION);
        let to = to.and_then(|to| std::str::from_utf8(to.as_bytes()).ok()).ok_or_else(|| {
            refused(&format!("redirect ({}) without a Location header", response.status()))
        })?;
        let url = self.url.join(to).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let mut url = url.ok_or_else(|| {
            refused("the server redirects to an address that is not http:// or https://")
        })?;
        if self.url.scheme() == "https" && url.scheme() == "http" {
            return Err(refused("the server redirects from https:// to http://, which is refused"));
        }
        if url.origin() != self.url.origin() {
            return Ok(RequestTarget::new(url, Vec::new()));
        }
        if url.username().is_empty() {
            // Neither can fail: the address has a host.
            let _ = url.set_username(self.url.username());
            let _ = url.set_password(self.url.password());
        }
        Ok(RequestTarget { url, ..self.clone() })
    }

    /// A request for this location, with some headers beside its own. User and password of the URL
    /// become a header.
    fn request(
        &self,
        client: &Client,
        method: Method,
        more: &HeaderMap,
    ) -> Result<Request, Failure> {
        let mut headers = header_map(&self.headers)?;
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.extend(more.clone());
        let request = client.requests.request(method, self.url.clone());
        let mut request = request.headers(headers).build()?;
        if let Some(authorize) = &self.authorize {
            authorize(&mut request)?;
        }
        Ok(request)
    }
}

/// Sends a request, and follows redirects except those for which `is_answer` is true. Returns the
/// last location, too.
pub async fn follow(
    client: &Client,
    method: Method,
    from: &RequestTarget,
    headers: &HeaderMap,
    is_answer: impl Fn(&RequestTarget, &HeaderMap) -> bool,
) -> Result<(RequestTarget, Response), Failure> {
    let mut at = from.clone();
    for _ in 0..=MAX_REDIRECTS {
        let response = client.send(at.request(client, method.clone(), headers)?, None).await?;
        let status = response.status();
        // The status 304 names no other address.
        let is_redirect = status.is_redirection() && status != StatusCode::NOT_MODIFIED;
        if !is_redirect || is_answer(&at, response.headers()) {
            return Ok((at, response));
        }
        at = at.redirected(&response)?;
    }
    let what = format!("more than {MAX_REDIRECTS} redirects");
    Err(Failure::permanent(ErrorKind::InvalidData, what))
}
