//! Requests to Google Cloud Storage and Azure by which an object is written.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Body, Client, Method, Request, Response, StatusCode, Url};

use super::object::unless_there;
use super::requests::Requests;
use crate::cancel::Cancel;
use crate::error::{Brief, Error, Result, Shown};
use crate::io::net::clouds::{
    AZURE_VERSION, Cloud, Keys, Object as Name, Resolved, address, as_anybody, resolve,
};
use crate::io::net::{Counted, Failure, NetOptions, unless_silent, wait_for};
use crate::io::source::http::reply::{refusal, says_expired};

/// Bytes of the longest answer that is read.
const LONGEST_ANSWER: usize = 1 << 20;
/// Azure gives its own Put Block List a minute, and a second more for each 1,000 blocks or so.
const PATIENCE: Duration = Duration::from_secs(120);
/// What servers say of bytes that are not what was sent.
const SPOILED: [&str; 3] = ["BadDigest", "Crc64Mismatch", "Md5Mismatch"];
/// What servers say that do not know the field with a sum.
const UNKNOWN: [&str; 3] = ["FeatureNotSupported", "NotImplemented", "UnsupportedHeader"];

/// What is asked of a server.
pub struct Ask<'a> {
    pub method: Method,
    pub query: Vec<(&'static str, String)>,
    pub fields: Vec<(&'static str, String)>,
    pub body: &'a Bytes,
    /// The field with the sum of the body. It is left out where the server does not know it.
    pub sum: Option<(&'static str, String)>,
    /// Which refusals, by status and code, are answers to go by.
    pub answers: fn(StatusCode, &str) -> bool,
    /// Whether a success says what it is to say.
    pub good: fn(&Answer) -> bool,
    /// How long the server may work on it without a word, if that is longer than usual.
    pub patience: Duration,
}

impl<'a> Ask<'a> {
    pub fn new(method: Method, body: &'a Bytes) -> Self {
        let (query, fields) = (Vec::new(), Vec::new());
        Ask {
            method,
            query,
            fields,
            body,
            sum: None,
            answers: |_, _| false,
            good: |_| true,
            patience: Duration::ZERO,
        }
    }

    pub fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    pub fn field(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, value.into()));
        self
    }

    pub fn sum(self, name: &'static str, value: String) -> Self {
        Ask { sum: Some((name, value)), ..self }
    }

    pub fn answered_by(self, answers: fn(StatusCode, &str) -> bool) -> Self {
        Ask { answers, ..self }
    }

    pub fn only_if(self, good: fn(&Answer) -> bool) -> Self {
        Ask { good, ..self }
    }

    /// It has the server put thousands of parts together.
    pub fn takes_long(self) -> Self {
        Ask { patience: PATIENCE, ..self }
    }

    fn request(&self, url: &Url, sums: bool, sent: &Arc<AtomicU64>) -> Result<Request, Failure> {
        let mut url = url.clone();
        if !self.query.is_empty() {
            url.query_pairs_mut().extend_pairs(&self.query);
        }
        let mut request = Request::new(self.method.clone(), url);
        for (name, value) in self.fields.iter().chain(self.sum.iter().filter(|_| sums)) {
            let odd = |_| Failure::lasting(ErrorKind::InvalidInput, format!("`{name}`: {value:?}"));
            let value = HeaderValue::from_str(value).map_err(odd)?;
            request.headers_mut().insert(HeaderName::from_static(name), value);
        }
        if matches!(self.method, Method::PUT | Method::POST) {
            request.headers_mut().insert(CONTENT_LENGTH, self.body.len().into());
            let body = Body::from(self.body.clone());
            *request.body_mut() = Some(Body::wrap(Counted::new(body, Arc::clone(sent))));
        }
        Ok(request)
    }
}

/// What a server has answered.
pub struct Answer {
    pub status: StatusCode,
    pub fields: HeaderMap,
    text: String,
}

impl Answer {
    /// The text of an element of XML without others in it, such as there are in documents of which
    /// the form is known. None where it has what would have to be resolved.
    pub fn element(&self, name: &str) -> Option<&str> {
        let (_, rest) = self.text.split_once(&format!("<{name}>"))?;
        let (found, _) = rest.split_once(&format!("</{name}>"))?;
        Some(found.trim()).filter(|found| !found.is_empty() && !found.contains(['<', '&']))
    }

    /// Whether its document is of that name.
    pub fn is(&self, name: &str) -> bool {
        self.text.contains(&format!("<{name}"))
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).and_then(|value| value.to_str().ok())
    }

    /// What a refusal is called. Answers without a body have it as a field.
    pub fn code(&self) -> &str {
        self.field("x-ms-error-code").or_else(|| self.element("Code")).unwrap_or("")
    }

    /// What is wrong with it, and whether to try again.
    fn failure(&self) -> Failure {
        let line = |text: &str| text.lines().next().unwrap_or("").to_owned();
        let said = match (self.code(), self.element("Message")) {
            ("", _) => String::new(),
            (code, None) => format!(": {}", Shown(code)),
            (code, Some(message)) => format!(": {}: {}", Shown(code), Brief(&line(message))),
        };
        let what = format!("the server answered {}{said}", self.status);
        if self.status.is_success() {
            // It reports an error, or does not say what it is to say.
            return Failure::passing(ErrorKind::InvalidData, what + ", and not what was asked for");
        }
        if SPOILED.contains(&self.code()) {
            return Failure::passing(ErrorKind::InvalidData, what);
        }
        let refused = [StatusCode::BAD_REQUEST, StatusCode::FORBIDDEN].contains(&self.status);
        let expired = self.status == StatusCode::UNAUTHORIZED
            || (refused && says_expired(self.text.as_bytes()));
        refusal(self.status, &self.fields, what).if_renewable(expired)
    }
}

/// An object or blob, and who writes it.
pub struct CloudObject {
    pub requests: Requests<Client>,
    pub cloud: Cloud,
    url: Url,
    account: String,
    keys: Option<Keys>,
    /// Whether the server knows sums, as far as is known.
    sums: AtomicBool,
}

impl CloudObject {
    /// Finds out where it is and who may write it. Nothing is sent there yet.
    pub fn new(uri: &str, options: NetOptions, cancel: &dyn Cancel) -> Result<Self> {
        let name = Name::parse(uri)?;
        // Finding credentials may need the network, on machines of a cloud.
        let found = wait_for(&name.shown, &options, cancel, resolve(&name, &options))?;
        let Resolved { bucket, account, keys } = found;
        let url = address(&bucket, &name.key).map_err(Error::InvalidArgument)?;
        let tls = url.scheme() == "https";
        Ok(CloudObject {
            requests: Requests::new(name.shown, options, tls)?,
            cloud: name.cloud,
            url,
            account,
            keys,
            sums: AtomicBool::new(true),
        })
    }

    /// Asks until there is an answer that is no refusal, or one to go by.
    pub fn ask(&self, ask: &Ask<'_>, cancel: &dyn Cancel) -> Result<Answer> {
        let refused = |used| {
            if let Some(keys) = &self.keys {
                keys.refused(used);
            }
        };
        let wrap = |client| (client, Arc::default());
        let answer = self.requests.ask(cancel, wrap, refused, |client, sent| async move {
            let sums = self.sums.load(Ordering::Relaxed);
            let mut answer = self.once(ask, sums, &client, &sent).await?;
            if sums && ask.sum.is_some() && UNKNOWN.contains(&answer.code()) {
                answer = self.once(ask, false, &client, &sent).await?;
                if answer.status.is_success() {
                    self.sums.store(false, Ordering::Relaxed);
                }
            }
            let good = if answer.status.is_success() {
                (ask.good)(&answer)
            } else {
                (ask.answers)(answer.status, answer.code())
            };
            if good { Ok(answer) } else { Err(answer.failure()) }
        });
        answer.map_err(|error| self.named(error))
    }

    /// What came of the last request of an upload that has failed, of which the answer may have been
    /// lost: the object is there if it has so many bytes, and the mark of this upload in its field.
    pub fn ended(
        &self,
        error: Error,
        (field, mark): (&str, &str),
        len: u64,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        unless_there(error, || {
            let nothing = Bytes::new();
            let ask = Ask::new(Method::HEAD, &nothing)
                .answered_by(|status, _| status == StatusCode::NOT_FOUND);
            let answer = self.ask(&ask, cancel)?;
            let is_whole = |size: &str| size.parse::<u64>() == Ok(len);
            Ok(answer.field(field) == Some(mark)
                && answer.field("content-length").is_some_and(is_whole))
        })
    }

    /// The error of a refusal that was an answer.
    pub fn refused(&self, answer: &Answer) -> Error {
        self.named(Error::io("writing", &self.requests.shown, answer.failure().error))
    }

    fn named(&self, error: Error) -> Error {
        match self.keys {
            Some(_) => error,
            None => as_anybody(error, self.cloud),
        }
    }

    async fn once(
        &self,
        ask: &Ask<'_>,
        sums: bool,
        client: &Client,
        sent: &Arc<AtomicU64>,
    ) -> Result<Answer, Failure> {
        let mut request = ask.request(&self.url, sums, sent)?;
        match &self.keys {
            Some(keys) => keys.get().await?.sign(&self.account, &mut request)?,
            None if self.cloud == Cloud::Azure => {
                let (name, value) = AZURE_VERSION;
                request.headers_mut().insert(name, HeaderValue::from_static(value));
            }
            None => {}
        }
        let stall = self.requests.options.stall.max(ask.patience);
        let silent = || {
            let what = format!("the server said nothing for {} s", stall.as_secs_f64());
            Err(Failure::passing(ErrorKind::TimedOut, what))
        };
        unless_silent(stall, sent, answered(client, request)).await.unwrap_or_else(silent)
    }
}

async fn answered(client: &Client, request: Request) -> Result<Answer, Failure> {
    let mut response: Response = client.execute(request).await?;
    let (status, fields) = (response.status(), response.headers().clone());
    let mut text = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if text.len() + chunk.len() > LONGEST_ANSWER {
            let what = format!("an answer of more than {LONGEST_ANSWER} bytes");
            return Err(Failure::lasting(ErrorKind::InvalidData, what));
        }
        text.extend_from_slice(&chunk);
    }
    Ok(Answer { status, fields, text: String::from_utf8_lossy(&text).into_owned() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::io::net::simulated::{Day, options};

    #[test]
    fn a_day_of_writing_is_never_refused() {
        for cloud in [Cloud::Google, Cloud::Azure] {
            let (day, net) = (Day::new(3600, 180), options());
            let keys = Some(Keys::on(&day, cloud, &net));
            let url: Url = format!("{}/bucket/key", day.serve()).parse().unwrap();
            let requests = Requests::new("an object".to_owned(), net, false).unwrap();
            let (account, sums) = ("account".to_owned(), AtomicBool::new(true));
            let object = CloudObject { requests, cloud, url, account, keys, sums };
            let bytes = Bytes::from_static(b"some bytes");
            while day.now() < 24 * 3600 {
                // A token that was taken back is asked for anew, once.
                if day.now() == 43_320 {
                    day.expire();
                }
                object.ask(&Ask::new(Method::PUT, &bytes), &Never).unwrap();
                day.pass(60);
            }
            assert_eq!(day.refused.load(Ordering::Relaxed), 1, "{cloud:?}");
            assert!((25..32).contains(&day.given()), "{cloud:?}: {} times", day.given());
        }
    }
}
