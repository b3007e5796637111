//! Size, `ETag` and date of a file, and the checks of later responses by them.

use std::io::ErrorKind;

use reqwest::header::{ETAG, HeaderMap, HeaderValue, LAST_MODIFIED};
use reqwest::{Response, StatusCode};

use super::fields::{ByteRange, UNASKED, check_coding, content_length, content_range, is_of_range};
use crate::io::transport::{Failure, header_text};

/// Size, `ETag` and date of a file, which show if it changes between requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Validators {
    /// Bytes of the file, where that is known.
    pub len: Option<u64>,
    pub tag: Option<String>,
    pub modified: Option<String>,
    /// True for a file of a commit, which never changes: each machine of a hub may have its own
    /// `ETag` and date.
    pub is_immutable: bool,
}

impl Validators {
    pub fn of(headers: &HeaderMap, len: Option<u64>) -> Self {
        // Other bytes than those of ASCII are allowed in it, and tell versions apart.
        let text =
            |tag: &HeaderValue| tag.as_bytes().iter().map(|&byte| char::from(byte)).collect();
        let tag = headers.get(ETAG).map(text);
        let modified = header_text(headers, LAST_MODIFIED).map(str::to_owned);
        Validators { len, tag, modified, is_immutable: false }
    }

    /// The `ETag` for conditional requests: a strong one, which identifies the bytes, and which a
    /// request can hold. Dates are not sent, because the machines of a server may have different ones.
    pub fn strong_tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|tag| !tag.starts_with("W/") && tag.is_ascii())
    }

    /// Checks that a response holds exactly the range, of the file that was opened.
    pub fn check(&self, response: &Response, wanted: ByteRange) -> Result<(), Failure> {
        self.check_status(response)?;
        let (status, headers) = (response.status(), response.headers());
        let wrong = |what: String| Err(Failure::transient(ErrorKind::InvalidData, what));
        let ByteRange { start, end } = wanted;
        if status != StatusCode::PARTIAL_CONTENT {
            // The page of a proxy, or a server that no longer supports ranges.
            return wrong(format!(
                "expected 206 Partial Content with bytes {start} to {end}, the server answered \
                 {status} without a range"
            ));
        }
        let Some((Some((first, last)), len)) = content_range(headers) else {
            return wrong("the server's 206 response has no valid Content-Range header".to_owned());
        };
        self.check_same(&Validators::of(headers, len.or(self.len)))?;
        let stated = content_length(headers).unwrap_or(last.saturating_sub(first));
        if (first, last) != (start, end) || stated != end - start {
            return wrong(format!(
                "expected bytes {start} to {end}, the server sent {first} to {last} in a body of \
                 {stated} bytes"
            ));
        }
        Ok(())
    }

    /// True if a response is the whole file in place of a range, as from servers that ignore ranges
    /// in requests with a condition.
    pub fn is_whole(&self, response: &Response) -> bool {
        let found = Validators::of(response.headers(), content_length(response.headers()));
        response.status() == StatusCode::OK && self.strong_tag().is_some() && *self == found
    }

    /// Checks a whole file's response against the first one.
    pub fn check_whole(&self, response: &Response) -> Result<(), Failure> {
        self.check_status(response)?;
        let len = content_length(response.headers()).or(self.len);
        self.check_same(&Validators::of(response.headers(), len))
    }

    fn check_status(&self, response: &Response) -> Result<(), Failure> {
        let status = response.status();
        let failure = match (status, self.strong_tag()) {
            (StatusCode::PRECONDITION_FAILED, Some(tag)) => {
                let what = format!("the file changed since it was opened: its ETag was {tag}");
                Failure::permanent(ErrorKind::InvalidData, what)
            }
            (status, _) if is_of_range(status) => {
                let what = format!("the server answered {status} to a range inside the file");
                Failure::transient(ErrorKind::InvalidData, what)
            }
            (StatusCode::NOT_MODIFIED, _) => Failure::permanent(ErrorKind::InvalidData, UNASKED),
            _ => return check_coding(response),
        };
        Err(failure)
    }

    /// Fails if another response is about another file, and says what differs.
    pub fn check_same(&self, found: &Validators) -> Result<(), Failure> {
        let bytes = |len: Option<u64>| len.map(|len| format!("{len} bytes"));
        let opaque = |tag: &Option<String>| tag.clone().map(|tag| tag.replacen("W/", "", 1));
        let same_tags = self.tag.is_some() && opaque(&self.tag) == opaque(&found.tag);
        // The same strong tag is that of the same bytes, whatever the date.
        let is_proven = same_tags && self.strong_tag().is_some() && found.strong_tag().is_some();
        let has_version = !is_proven && !self.is_immutable;
        let facts = [
            (has_version && !same_tags, "ETag", self.tag.clone(), found.tag.clone()),
            (has_version, "Last-Modified", self.modified.clone(), found.modified.clone()),
            (true, "size", bytes(self.len), bytes(found.len)),
        ];
        let same_dates = self.modified.is_some() && self.modified == found.modified;
        let mut differences = Vec::new();
        for (_, what, before, now) in facts.iter().filter(|(is_compared, ..)| *is_compared) {
            match (before, now) {
                (Some(before), Some(now)) if before != now => {
                    differences.push(format!("its {what} was {before}, is {now}"));
                }
                (None, Some(now)) if *what != "size" && !same_tags && !same_dates => {
                    differences.push(format!("it had no {what}, has {now}"));
                }
                // Another machine of the server may send this header again.
                (Some(before), None) if differences.is_empty() => {
                    let what = format!(
                        "the file may have changed since it was opened: the first response had the \
                         {what} {before}, a later one has none"
                    );
                    return Err(Failure::transient(ErrorKind::InvalidData, what));
                }
                _ => {}
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        let what = format!("the file changed since it was opened: {}", differences.join("; "));
        Err(Failure::permanent(ErrorKind::InvalidData, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validators(tag: Option<&str>, modified: Option<&str>) -> Validators {
        let text = |text: Option<&str>| text.map(str::to_owned);
        let (tag, modified) = (text(tag), text(modified));
        Validators { len: Some(7), tag, modified, is_immutable: false }
    }

    #[test]
    fn validators_of_another_kind_mean_another_version() {
        let (none, tagged) = (validators(None, None), validators(Some("x"), None));
        let (dated, both) = (validators(None, Some("then")), validators(Some("x"), Some("then")));
        for (first, later) in [(&none, &tagged), (&none, &dated), (&none, &both), (&dated, &tagged)]
        {
            let failure = format!("{:?}", first.check_same(later).unwrap_err());
            assert!(
                failure.contains("the file changed since it was opened: it had no"),
                "{failure}"
            );
        }
        for (first, later) in [(&none, &none), (&dated, &both), (&tagged, &both), (&both, &both)] {
            first.check_same(later).unwrap();
        }
        let unsized_file = Validators { len: None, ..none.clone() };
        unsized_file.check_same(&none).unwrap();
    }

    #[test]
    fn replicas_have_the_same_strong_tag_and_their_own_dates() {
        let of = |tag, modified| validators(Some(tag), Some(modified));
        let first = of("\"x\"", "then");
        for same in [of("\"x\"", "later"), of("W/\"x\"", "then"), validators(Some("\"x\""), None)] {
            first.check_same(&same).unwrap();
        }
        for other in [of("\"y\"", "then"), of("W/\"x\"", "later"), of("W/\"y\"", "then")] {
            assert!(first.check_same(&other).is_err(), "{other:?}");
        }
        let longer = Validators { len: Some(8), ..first.clone() };
        assert!(first.check_same(&longer).is_err());
        let immutable = Validators { is_immutable: true, ..first };
        immutable.check_same(&of("\"y\"", "later")).unwrap();
        assert!(immutable.check_same(&longer).is_err());
    }
}
