//! Error responses of S3: their documents, whether to retry, and the region to which AWS redirects
//! a request.

use std::error::Error;
use std::io::ErrorKind;

use aws_runtime::retries::classifiers::{THROTTLING_ERRORS, TRANSIENT_ERRORS};
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::endpoint::Server;
use super::resolve::S3Bucket;
use crate::error::Escaped;
use crate::io::transport::{ErrorDocument, Failure, Repeat, status_failure};

/// The header with the region of a bucket.
const BUCKET_REGION: &str = "x-amz-bucket-region";

/// The ways to give credentials and an endpoint, for messages.
pub const WAYS: &str = "give credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, \
                        AWS_PROFILE, or s3_access_key_id= and s3_secret_access_key= of \
                        open_stream), and for a server other than AWS its address \
                        (AWS_ENDPOINT_URL_S3, or s3_endpoint=)";

/// Error codes of requests that may succeed when they are repeated: uploads that arrived damaged or
/// in part, and what AWS asks to try again.
const TRANSIENT: [&str; 5] = [
    "BadDigest",
    "XAmzContentChecksumMismatch",
    "IncompleteBody",
    "OperationAborted",
    "InternalError",
];

/// The region that headers name, if it can be part of a host name.
pub fn bucket_region_of(headers: &HeaderMap) -> Option<&str> {
    let region = headers.get(BUCKET_REGION)?.to_str().ok()?;
    let fits = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let is_region = region.len() <= 63
        && region.starts_with(fits)
        && region.ends_with(fits)
        && region.chars().all(|letter| fits(letter) || letter == '-');
    is_region.then_some(region)
}

impl S3Bucket {
    /// True if AWS has named another region, to which later requests go; only once. `asked`: the
    /// host of the request. Another thread may have found the region since the request was sent.
    pub fn follows_region(&self, headers: &HeaderMap, asked: Option<&str>) -> bool {
        let is_aws = matches!(self.server, Server::Aws { .. });
        let Some(region) = bucket_region_of(headers).filter(|_| is_aws) else { return false };
        let before = self.region();
        if before == region {
            return asked.is_some_and(|asked| asked != self.host());
        }
        let mut found = self.bucket_region.lock();
        found.get_or_insert_with(|| region.to_owned()) == region
    }

    /// The failure that a refusal means. `asked`: the host of the request, if it is known.
    pub fn refusal(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        document: &ErrorDocument,
        asked: Option<&str>,
    ) -> Failure {
        let failure = self.refused(status, headers, document);
        let needs_another = self.clock.follow(document.code.as_deref(), headers)
            || self.follows_region(headers, asked);
        failure.if_renewable(document.says_expired() || needs_another)
    }

    fn refused(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        document: &ErrorDocument,
    ) -> Failure {
        let text = format!("the server answered {status}{document}");
        let (host, bucket) = (self.host(), Escaped(&self.bucket));
        let mut what = match document.code.as_deref() {
            Some("NoSuchBucket") => format!("{host} has no bucket `{bucket}`: {text}"),
            Some("NoSuchKey") => {
                format!("{host} has no such object in the bucket `{bucket}`: {text}")
            }
            _ => text,
        };
        if self.refuses_path_style(document) {
            what += "; this server wants the bucket in the host's name: set addressing_style of \
                     `s3` to `virtual` (open_stream's s3=, TENSORIZER_S3_ADDRESSING_STYLE, or the \
                     profile)";
        }
        if let Some(region) = bucket_region_of(headers).filter(|region| *region != self.region()) {
            what += &format!("; the bucket is in the region `{region}`");
        }
        let code = document.code.as_deref().unwrap_or("");
        let failure = status_failure(status, headers, what.clone());
        let failure = if THROTTLING_ERRORS.contains(&code) || TRANSIENT_ERRORS.contains(&code) {
            failure.with_repeat(Repeat::Time)
        } else if TRANSIENT.contains(&code) && failure.repeat != Repeat::Time {
            failure.with_repeat(Repeat::Attempts)
        } else {
            failure
        };
        if !self.none_found || !status.is_client_error() || failure.repeat != Repeat::Never {
            return failure;
        }
        what += "; no credentials were found, so the server was asked anonymously: ";
        what += WAYS;
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Failure::permanent(ErrorKind::PermissionDenied, what)
            }
            _ => status_failure(status, headers, what),
        }
    }

    /// True if the server refuses addresses with the bucket in the path.
    fn refuses_path_style(&self, document: &ErrorDocument) -> bool {
        let says = |text: &Option<String>, part: &str| {
            text.as_ref().is_some_and(|text| text.to_ascii_lowercase().contains(part))
        };
        matches!(self.server, Server::Endpoint { path_style: true, .. })
            && (says(&document.code, "domainforbidden")
                || says(&document.code, "invalidpathaccess")
                || says(&document.message, "virtual host"))
    }

    /// The failure of a call of the SDK.
    pub fn failure<E>(&self, error: SdkError<E, HttpResponse>) -> Failure
    where
        E: Error + ProvideErrorMetadata + Send + Sync + 'static,
    {
        if let Some(response) = error.raw_response() {
            let status = StatusCode::from_u16(response.status().as_u16());
            let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let document = ErrorDocument {
                code: error.code().map(str::to_owned),
                message: error.message().map(str::to_owned),
            };
            let headers = response.headers().iter().filter_map(|(name, value)| {
                let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
                Some((name, HeaderValue::from_str(value).ok()?))
            });
            let headers: HeaderMap = headers.collect();
            let refused = self.refusal(status, &headers, &document, None);
            if !status.is_success() {
                return refused;
            }
            // A status of success with an error, or with a document that is not from S3.
            return Failure::transient(ErrorKind::InvalidData, refused.error.to_string());
        }
        // That of a request, or of credentials.
        match cause::<Failure>(&error) {
            Some(failure) => failure.copy(),
            None => Failure::permanent(ErrorKind::Other, DisplayErrorContext(error).to_string()),
        }
    }
}

/// The error of that type among the causes of an error.
pub fn cause<T: Error + 'static>(error: &dyn Error) -> Option<&T> {
    let mut causes = std::iter::successors(error.source(), |&error| error.source());
    causes.find_map(|cause| cause.downcast_ref())
}

#[cfg(test)]
mod tests {
    use aws_sdk_s3::error::ConnectorError;
    use aws_sdk_s3::operation::put_object::PutObjectError;

    use super::*;

    fn headers_of(region: &str) -> HeaderMap {
        HeaderMap::from_iter([(BUCKET_REGION.parse().unwrap(), region.parse().unwrap())])
    }

    #[test]
    fn regions_are_followed_once_and_only_at_aws() {
        let named = Server::endpoint("s3.us-east-1.amazonaws.com", false, false).unwrap();
        let named = S3Bucket::without_credentials(named, false);
        assert!(!named.follows_region(&headers_of("eu-west-1"), None));
        let aws = Server::Aws { fips: false, dual_stack: false };
        let aws = S3Bucket::without_credentials(aws, false);
        let first = aws.host();
        assert!(!aws.follows_region(&HeaderMap::new(), None));
        assert!(!aws.follows_region(&headers_of("us-east-1"), Some(&first)));
        assert!(aws.follows_region(&headers_of("eu-west-1"), Some(&first)));
        assert_eq!(aws.host(), "bucket.s3.eu-west-1.amazonaws.com");
        // A thread that had asked in the first region meanwhile.
        assert!(aws.follows_region(&headers_of("eu-west-1"), Some(&first)));
        assert!(!aws.follows_region(&headers_of("eu-west-1"), Some(&aws.host())));
        assert!(!aws.follows_region(&headers_of("ap-south-1"), Some(&aws.host())));
        assert_eq!(aws.region(), "eu-west-1");
    }

    #[test]
    fn missing_buckets_keys_and_credentials_are_distinguished() {
        let server = Server::endpoint("host:9000", false, false).unwrap();
        let refusal = |none_found, status, code: Option<&str>| {
            let resolved = S3Bucket::without_credentials(server.clone(), none_found);
            let document = ErrorDocument { code: code.map(str::to_owned), message: None };
            let error = resolved.refusal(status, &HeaderMap::new(), &document, None).error;
            (error.kind(), error.to_string())
        };
        let (missing, refused) = (StatusCode::NOT_FOUND, StatusCode::FORBIDDEN);
        let text = "the server answered 404 Not Found";
        for (found, text) in [
            (
                refusal(false, missing, Some("NoSuchBucket")),
                format!("host:9000 has no bucket `bucket`: {text}: NoSuchBucket"),
            ),
            (
                refusal(false, missing, Some("NoSuchKey")),
                format!("host:9000 has no such object in the bucket `bucket`: {text}: NoSuchKey"),
            ),
            (refusal(false, missing, None), text.to_owned()),
        ] {
            assert_eq!(found, (ErrorKind::NotFound, text));
        }
        let anonymous = "no credentials were found, so the server was asked anonymously";
        for (found, is_anonymous) in [
            (refusal(true, refused, None), true),
            (refusal(false, refused, None), false),
            (refusal(true, StatusCode::BAD_GATEWAY, None), false),
        ] {
            assert_eq!(found.1.contains(anonymous), is_anonymous, "{found:?}");
            for way in ["AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL_S3"] {
                assert_eq!(found.1.contains(way), is_anonymous, "{found:?}");
            }
            assert_eq!(
                found.1.contains("check the credentials"),
                !is_anonymous && found.0 == ErrorKind::PermissionDenied
            );
        }
    }

    #[test]
    fn only_names_of_regions_become_part_of_a_host() {
        let region = |text: &str| bucket_region_of(&headers_of(text)).map(str::to_owned);
        assert_eq!(region("eu-west-1").unwrap(), "eu-west-1");
        for text in ["", "-a", "a-", "A", "a.b", "a/b", "a@b", "a:1", "a#", "a b", "ü"] {
            assert!(region(text).is_none(), "{text}");
        }
        assert!(region(&"a".repeat(64)).is_none());
    }

    #[test]
    fn failures_of_the_transport_keep_their_classification() {
        let server = Server::endpoint("host", false, false).unwrap();
        let bucket = S3Bucket::without_credentials(server, true);
        let of = |failure: Failure| {
            let error = ConnectorError::other(failure.into(), None);
            let error = SdkError::<PutObjectError, HttpResponse>::dispatch_failure(error);
            format!("{:?}", bucket.failure(error))
        };
        let away = of(Failure::transient(ErrorKind::TimedOut, "no answer"));
        assert!(away.contains("repeat: Attempts") && away.contains("no answer"), "{away}");
        assert!(of(Failure::permanent(ErrorKind::NotFound, "x")).contains("repeat: Never"));
    }
}
