//! Connections: one client and one event loop for each thread that reads at the moment.
//!
//! A thread polls its own connection, so that bytes do not change threads between the socket and
//! the caller's memory. Clients are handed from thread to thread with their open connections, and
//! are not used in a process that was forked off.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{ACCEPT_ENCODING, HeaderMap, HeaderName, HeaderValue, LOCATION, RANGE};
use reqwest::{Certificate, Client, Response, Url};
use tokio::runtime::Runtime;

use super::Scatter;
use super::options::HttpOptions;
use super::reply::Range;
use super::retry::Failure;
use crate::error::{Error, Result};

/// The most redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// How often a read looks whether the call was given up.
const POLL: Duration = Duration::from_millis(100);

/// Which certificates are believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// Those that the system trusts.
    System,
    /// Those signed by the authorities in this file.
    File(PathBuf),
    /// Those signed by the authorities in the files of this folder.
    Folder(PathBuf),
    /// All of them.
    Anything,
}

/// Where a file is now, and what to send there.
#[derive(Debug, Clone)]
pub struct Target {
    url: Url,
    headers: Vec<(String, String)>,
}

impl Target {
    pub fn new(url: Url, headers: Vec<(String, String)>) -> Self {
        Target { url, headers }
    }

    /// The target of a redirect. Credentials and other extra headers stay with their host.
    fn moved(&self, to: &str) -> Option<Target> {
        let mut url =
            self.url.join(to).ok().filter(|url| matches!(url.scheme(), "http" | "https"))?;
        let same = url.origin() == self.url.origin();
        if same && url.username().is_empty() {
            // Neither can fail: the address has a host.
            let _ = url.set_username(self.url.username());
            let _ = url.set_password(self.url.password());
        }
        Some(Target { url, headers: if same { self.headers.clone() } else { Vec::new() } })
    }

    fn fields(&self) -> std::result::Result<HeaderMap, Failure> {
        let mut fields = HeaderMap::new();
        for (name, value) in &self.headers {
            let bad = |_| ();
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|e| bad(e.to_string()));
            let value = HeaderValue::from_str(value).map_err(|e| bad(e.to_string()));
            let (Ok(name), Ok(mut value)) = (name, value) else {
                let what = "an extra header is not well-formed";
                return Err(Failure::lasting(ErrorKind::InvalidInput, what));
            };
            value.set_sensitive(true);
            fields.append(name, value);
        }
        Ok(fields)
    }
}

/// The clients of one source.
pub struct Clients {
    idle: Mutex<Vec<OneClient>>,
    options: HttpOptions,
    certificates: Vec<Certificate>,
}

/// A client and the event loop that its connections live on.
pub struct OneClient {
    runtime: Runtime,
    client: Client,
    process: u32,
    stall: Duration,
}

impl Clients {
    /// Reads the certificates; what is wrong with them is the error.
    pub fn new(options: &HttpOptions) -> std::result::Result<Self, String> {
        let mut certificates = Vec::new();
        let mut add = |path: PathBuf| -> std::result::Result<(), String> {
            let named =
                |e: &dyn std::fmt::Display| format!("certificates of {}: {e}", path.display());
            let pem = std::fs::read(&path).map_err(|e| named(&e))?;
            certificates.extend(Certificate::from_pem_bundle(&pem).map_err(|e| named(&e))?);
            Ok(())
        };
        match &options.trust {
            Trust::System | Trust::Anything => {}
            Trust::File(path) => add(path.clone())?,
            Trust::Folder(folder) => {
                let entries = std::fs::read_dir(folder)
                    .map_err(|e| format!("certificates in {}: {e}", folder.display()))?;
                for entry in entries {
                    let path = entry.map_err(|e| e.to_string())?.path();
                    let wanted = path.extension().is_some_and(|e| {
                        e.eq_ignore_ascii_case("pem") || e.eq_ignore_ascii_case("crt") || e == "0"
                    });
                    if wanted {
                        add(path)?;
                    }
                }
            }
        }
        if certificates.is_empty() && matches!(options.trust, Trust::File(_) | Trust::Folder(_)) {
            return Err(format!("no certificates in {:?}", options.trust));
        }
        Ok(Clients { idle: Mutex::default(), options: options.clone(), certificates })
    }

    /// Lends a client for the length of a call.
    pub fn with<T>(&self, shown: &str, body: impl FnOnce(&OneClient) -> T) -> Result<T> {
        let client = self.take().map_err(|e| Error::io("opening", shown, e))?;
        let result = body(&client);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(client);
        Ok(result)
    }

    /// Gives a client away.
    pub fn take(&self) -> io::Result<OneClient> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                None => return self.connect(),
                Some(client) if client.process == std::process::id() => return Ok(client),
                // Its event loop is the parent's too, which must not notice.
                Some(inherited) => std::mem::forget(inherited),
            }
        }
    }

    fn connect(&self) -> io::Result<OneClient> {
        let mut builder = Client::builder()
            .user_agent(concat!("tensorizer/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.options.connect)
            .tcp_nodelay(true)
            .pool_max_idle_per_host(1);
        builder = match self.options.trust {
            Trust::System => builder,
            Trust::Anything => builder.tls_danger_accept_invalid_certs(true),
            Trust::File(_) | Trust::Folder(_) => builder.tls_certs_only(self.certificates.clone()),
        };
        Ok(OneClient {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
            client: builder.build().map_err(io::Error::other)?,
            process: std::process::id(),
            stall: self.options.stall,
        })
    }
}

impl OneClient {
    /// Runs a request on this thread, until it ends or `go_on` says no.
    pub fn run<T>(
        &self,
        go_on: &dyn Fn() -> bool,
        request: impl Future<Output = std::result::Result<T, Failure>>,
    ) -> std::result::Result<T, Failure> {
        self.runtime.block_on(async {
            let mut request = std::pin::pin!(request);
            loop {
                if let Ok(result) = tokio::time::timeout(POLL, &mut request).await {
                    return result;
                }
                if !go_on() {
                    return Err(Failure::lasting(ErrorKind::Interrupted, "given up"));
                }
            }
        })
    }

    /// Asks for a range, or for everything, and follows redirects.
    pub async fn follow(
        &self,
        target: &Target,
        range: Option<Range>,
    ) -> std::result::Result<(Target, Response), Failure> {
        let mut target = target.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.client.get(target.url.clone()).headers(target.fields()?);
            request = request.header(ACCEPT_ENCODING, "identity");
            if let Some(range) = range {
                request = request.header(RANGE, range.field());
            }
            let response = timed(self.stall, request.send()).await??;
            if !response.status().is_redirection() {
                return Ok((target, response));
            }
            let to = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            target = to.and_then(|to| target.moved(to)).ok_or_else(|| {
                let what = format!("the server answered {} without a place", response.status());
                Failure::lasting(ErrorKind::InvalidData, what)
            })?;
        }
        let what = format!("more than {MAX_REDIRECTS} redirects");
        Err(Failure::lasting(ErrorKind::InvalidData, what))
    }

    /// The next bytes of a body; none at its end.
    pub async fn chunk(&self, response: &mut Response) -> std::result::Result<Bytes, Failure> {
        Ok(timed(self.stall, response.chunk()).await??.unwrap_or_default())
    }

    /// Keeps a body, which must have `len` bytes if that is known.
    pub async fn collect(
        &self,
        mut response: Response,
        len: Option<u64>,
        out: &mut Vec<u8>,
    ) -> std::result::Result<(), Failure> {
        loop {
            let bytes = self.chunk(&mut response).await?;
            out.extend_from_slice(&bytes);
            let found = out.len() as u64;
            match len {
                Some(len) if found > len || (bytes.is_empty() && found < len) => {
                    let what = format!("expected a body of {len} bytes, found {found}");
                    return Err(Failure::passing(ErrorKind::UnexpectedEof, what));
                }
                _ if bytes.is_empty() => return Ok(()),
                _ => {}
            }
        }
    }

    /// Puts a body where it belongs. `done` is the position after the last byte that arrived,
    /// also when this fails.
    pub async fn scatter(
        &self,
        mut response: Response,
        range: Range,
        sink: &mut Scatter<'_, '_>,
        done: &mut u64,
    ) -> std::result::Result<(), Failure> {
        while *done < range.end {
            let bytes = self.chunk(&mut response).await?;
            if bytes.is_empty() {
                let what = format!("the body ended at byte {done} of {}", range.end);
                return Err(Failure::passing(ErrorKind::UnexpectedEof, what));
            }
            *done += sink.put(&bytes) as u64;
        }
        // The end of the body is read too, so that the connection can be used again.
        if !self.chunk(&mut response).await?.is_empty() {
            let what = format!("the body goes on behind byte {}", range.end);
            return Err(Failure::lasting(ErrorKind::InvalidData, what));
        }
        Ok(())
    }
}

/// What a wait gives, unless it takes too long.
async fn timed<T>(
    stall: Duration,
    wait: impl Future<Output = T>,
) -> std::result::Result<T, Failure> {
    tokio::time::timeout(stall, wait).await.map_err(|_| {
        let what = format!("the server sent nothing for {} s", stall.as_secs());
        Failure::passing(ErrorKind::TimedOut, what)
    })
}
