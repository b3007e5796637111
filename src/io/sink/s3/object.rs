//! The calls that make an object: all at once, or in parts.

use std::future::Future;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;

use crate::cancel::Cancel;
use crate::codec::crypt::random;
use crate::environment::reading;
use crate::error::{Error, Result};
use crate::io::net::s3::{
    Connector, DEFAULT_WRITE_ENDPOINT, Resolved, S3Options, failure, parse, resolve,
};
use crate::io::net::{ConnectionPool, Failure, NetOptions, Tries, wait_for};
use crate::io::source::http::client::{Certificates, connect};

/// An object that is being written.
pub struct Object {
    pub shown: String,
    bucket: String,
    key: String,
    resolved: Resolved,
    certificates: Certificates,
    pub options: NetOptions,
    /// By which the object is known again.
    mark: String,
    pool: ConnectionPool<Sender>,
}

/// A client, and what counts the bytes that it sends.
type Sender = (Client, Arc<AtomicU64>);

/// The name of the metadata with the mark of an object that was sent in parts.
const MARK: &str = "tensorizer-upload";

/// A part that the server has.
pub struct Sent {
    pub number: i32,
    tag: String,
}

impl Object {
    /// Finds out where it is and who may write it. Nothing is sent yet.
    pub fn new(
        uri: &str,
        s3: &S3Options,
        options: NetOptions,
        cancel: &dyn Cancel,
    ) -> Result<Self> {
        let (bucket, key) = parse(uri)?;
        let shown = format!("s3://{bucket}/{key}");
        let found = resolve(s3, &options, DEFAULT_WRITE_ENDPOINT, &shown);
        let resolved = wait_for(&shown, &options, cancel, found)?;
        let tls = resolved.endpoint.scheme() == "https";
        Ok(Object {
            shown,
            bucket: bucket.to_owned(),
            key: key.to_owned(),
            resolved,
            certificates: Certificates::read(&options, tls).map_err(Error::InvalidArgument)?,
            options,
            mark: random::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect(),
            pool: ConnectionPool::default(),
        })
    }

    fn connect(&self) -> Result<Sender, Failure> {
        let client = connect(&self.options, &self.certificates)?;
        let connector = Connector::new(client, self.options.stall);
        let sent = Arc::clone(&connector.sent);
        // Tries are counted here, as for all other requests.
        let config =
            self.resolved.sdk().http_client(connector).retry_config(RetryConfig::disabled());
        Ok((reading(|| Client::from_conf(config.build())), sent))
    }

    /// Makes a request until it succeeds, or why it does not.
    fn request<T, F: Future<Output = Result<T, Failure>>>(
        &self,
        cancel: &dyn Cancel,
        make: impl Fn(Client) -> F,
    ) -> Result<T> {
        let mut tries = Tries::new("writing", &self.options, cancel);
        loop {
            let begun = Instant::now();
            let connection = self.pool.take(&tries, || async { self.connect() });
            let outcome = connection.and_then(|connection| {
                let (client, sent) = connection.client();
                tries.watch(sent);
                // The SDK looks into the environment before it sends anything.
                let mut request = std::pin::pin!(make(client.clone()));
                let mut polled = false;
                let request = std::future::poll_fn(|context| {
                    if std::mem::replace(&mut polled, true) {
                        return request.as_mut().poll(context);
                    }
                    reading(|| request.as_mut().poll(context))
                });
                let outcome = connection.run(&tries, request);
                self.pool.put(connection);
                outcome
            });
            match outcome {
                Ok(done) => return Ok(done),
                Err(failure) if tries.renews(&failure) => {
                    if let Some(keys) = &self.resolved.credentials {
                        keys.refused(begun);
                    }
                }
                Err(failure) => tries.wait(failure, 0, &self.shown)?,
            }
        }
    }

    /// Sends the whole object.
    pub fn put(&self, bytes: &Bytes, cancel: &dyn Cancel) -> Result<()> {
        self.request(cancel, |client| async move {
            let put = client.put_object().bucket(&self.bucket).key(&self.key);
            let put = put.body(body(bytes)).customize().disable_payload_signing();
            put.send().await.map(drop).map_err(failure)
        })
    }

    /// Begins an object in parts, and gives its number at the server.
    pub fn begin(&self, cancel: &dyn Cancel) -> Result<String> {
        self.request(cancel, |client| async move {
            let begin = client.create_multipart_upload().bucket(&self.bucket).key(&self.key);
            let begin = begin.metadata(MARK, &self.mark);
            let begun = begin.send().await.map_err(failure)?;
            begun.upload_id.ok_or_else(|| {
                let what = "the server began an upload without a number";
                Failure::lasting(ErrorKind::InvalidData, what)
            })
        })
    }

    /// Sends a part.
    pub fn part(
        &self,
        upload: &str,
        number: i32,
        bytes: &Bytes,
        cancel: &dyn Cancel,
    ) -> Result<Sent> {
        self.request(cancel, |client| async move {
            let part = client.upload_part().bucket(&self.bucket).key(&self.key);
            let part = part.upload_id(upload).part_number(number).body(body(bytes));
            let done = part.customize().disable_payload_signing().send().await.map_err(failure)?;
            let tag = done.e_tag.ok_or_else(|| {
                let what = "the server took a part and did not say its ETag";
                Failure::passing(ErrorKind::InvalidData, what)
            })?;
            Ok(Sent { number, tag })
        })
    }

    /// Makes the object, of `len` bytes, of its parts.
    pub fn complete(
        &self,
        upload: &str,
        mut parts: Vec<Sent>,
        len: u64,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        parts.sort_by_key(|part| part.number);
        let parts = parts
            .into_iter()
            .map(|part| CompletedPart::builder().part_number(part.number).e_tag(part.tag).build());
        let all = CompletedMultipartUpload::builder().set_parts(Some(parts.collect())).build();
        let completed = self.request(cancel, |client| {
            let all = all.clone();
            async move {
                let complete = client.complete_multipart_upload().bucket(&self.bucket);
                let complete = complete.key(&self.key).upload_id(upload).multipart_upload(all);
                complete.send().await.map(drop).map_err(failure)
            }
        });
        match completed {
            // It was done, and the answer lost, if what is there now is what was sent.
            Err(Error::Io { error, .. })
                if error.kind() == ErrorKind::NotFound && self.is_there(len, cancel)? =>
            {
                Ok(())
            }
            completed => completed,
        }
    }

    /// Whether the object is the one of this upload.
    fn is_there(&self, len: u64, cancel: &dyn Cancel) -> Result<bool> {
        let found = self.request(cancel, |client| async move {
            let head = client.head_object().bucket(&self.bucket).key(&self.key);
            match head.send().await.map_err(failure) {
                Err(failure) if failure.error.kind() == ErrorKind::NotFound => Ok(None),
                found => found.map(Some),
            }
        })?;
        let ours = found.is_some_and(|found| {
            let mark = found.metadata().and_then(|all| all.get(MARK));
            let size = found.content_length().and_then(|size| u64::try_from(size).ok());
            mark == Some(&self.mark) && size == Some(len)
        });
        Ok(ours)
    }

    /// Has the server forget the parts.
    pub fn abort(&self, upload: &str, cancel: &dyn Cancel) -> Result<()> {
        self.request(cancel, |client| async move {
            let abort = client.abort_multipart_upload().bucket(&self.bucket).key(&self.key);
            abort.upload_id(upload).send().await.map(drop).map_err(failure)
        })
    }
}

fn body(bytes: &Bytes) -> ByteStream {
    ByteStream::new(SdkBody::from(bytes.clone()))
}
