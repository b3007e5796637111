//! The calls that make an object: all at once, or in parts.

use std::future::Future;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use reqwest::Certificate;

use crate::error::{Error, Result};
use crate::net::s3::{
    Connector, DEFAULT_WRITE_ENDPOINT, Resolved, S3Options, failure, parse, resolve,
};
use crate::net::{Failure, Lanes, NetOptions, Retry, new_runtime};
use crate::source::http::client;

/// An object that is being written.
pub struct Object {
    pub shown: String,
    bucket: String,
    key: String,
    resolved: Resolved,
    certificates: Vec<Certificate>,
    pub options: NetOptions,
    lanes: Lanes<Client>,
}

/// A part that the server has.
pub struct Sent {
    pub number: i32,
    tag: Option<String>,
}

impl Object {
    /// Finds out where it is and who may write it. Nothing is sent yet.
    pub fn new(uri: &str, s3: &S3Options, options: NetOptions) -> Result<Self> {
        let (bucket, key) = parse(uri)?;
        let runtime = new_runtime().map_err(|e| Error::io("opening", uri, e))?;
        let resolved = runtime.block_on(resolve(s3, &options, DEFAULT_WRITE_ENDPOINT, uri))?;
        Ok(Object {
            shown: format!("s3://{bucket}/{key}"),
            bucket: bucket.to_owned(),
            key: key.to_owned(),
            resolved,
            certificates: client::certificates(&options).map_err(Error::InvalidArgument)?,
            options,
            lanes: Lanes::default(),
        })
    }

    fn connect(&self) -> Result<Client, Failure> {
        let client = client::connect(&self.options, &self.certificates)?;
        let connector = Connector { client, stall: self.options.stall };
        // Tries are counted here, as for all other requests.
        let config =
            self.resolved.sdk().http_client(connector).retry_config(RetryConfig::disabled());
        Ok(Client::from_conf(config.build()))
    }

    /// Makes a request until it succeeds, or why it does not.
    fn request<T, F: Future<Output = Result<T, Failure>>>(
        &self,
        go_on: &dyn Fn() -> bool,
        make: impl Fn(Client) -> F,
    ) -> Result<T> {
        let mut retry = Retry::new("writing", &self.options, false);
        loop {
            let outcome = self.lanes.take(go_on, || async { self.connect() }).and_then(|lane| {
                let outcome = lane.run(go_on, make(lane.client().clone()));
                self.lanes.put(lane);
                outcome
            });
            match outcome {
                Ok(done) => return Ok(done),
                Err(failure) => retry.wait(failure, 0, &self.shown, go_on)?,
            }
        }
    }

    /// Sends the whole object.
    pub fn put(&self, bytes: &Bytes, go_on: &dyn Fn() -> bool) -> Result<()> {
        self.request(go_on, |client| async move {
            let put = client.put_object().bucket(&self.bucket).key(&self.key);
            let put = put.body(body(bytes)).customize().disable_payload_signing();
            put.send().await.map(drop).map_err(failure)
        })
    }

    /// Begins an object in parts, and gives its number at the server.
    pub fn begin(&self, go_on: &dyn Fn() -> bool) -> Result<String> {
        self.request(go_on, |client| async move {
            let begin = client.create_multipart_upload().bucket(&self.bucket).key(&self.key);
            let begun = begin.send().await.map_err(failure)?;
            begun.upload_id.ok_or_else(|| {
                let what = "the server began an upload without a number";
                Failure::lasting(std::io::ErrorKind::InvalidData, what)
            })
        })
    }

    /// Sends a part.
    pub fn part(
        &self,
        upload: &str,
        number: i32,
        bytes: &Bytes,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Sent> {
        self.request(go_on, |client| async move {
            let part = client.upload_part().bucket(&self.bucket).key(&self.key);
            let part = part.upload_id(upload).part_number(number).body(body(bytes));
            let done = part.customize().disable_payload_signing().send().await.map_err(failure)?;
            Ok(Sent { number, tag: done.e_tag })
        })
    }

    /// Makes the object of its parts.
    pub fn complete(&self, upload: &str, mut parts: Vec<Sent>) -> Result<()> {
        parts.sort_by_key(|part| part.number);
        let parts = parts.into_iter().map(|part| {
            CompletedPart::builder().part_number(part.number).set_e_tag(part.tag).build()
        });
        let all = CompletedMultipartUpload::builder().set_parts(Some(parts.collect())).build();
        self.request(&|| true, |client| {
            let all = all.clone();
            async move {
                let complete = client.complete_multipart_upload().bucket(&self.bucket);
                let complete = complete.key(&self.key).upload_id(upload).multipart_upload(all);
                complete.send().await.map(drop).map_err(failure)
            }
        })
    }

    /// Has the server forget the parts.
    pub fn abort(&self, upload: &str) -> Result<()> {
        self.request(&|| true, |client| async move {
            let abort = client.abort_multipart_upload().bucket(&self.bucket).key(&self.key);
            abort.upload_id(upload).send().await.map(drop).map_err(failure)
        })
    }
}

fn body(bytes: &Bytes) -> ByteStream {
    ByteStream::new(SdkBody::from(bytes.clone()))
}
