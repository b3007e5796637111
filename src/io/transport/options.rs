//! The options of all requests.

use std::sync::Arc;
use std::time::Duration;

use super::Trust;
use super::trust::HTTP_SETTINGS;
use crate::environment::{
    ATTEMPTS, CONNECT_SECONDS, MAX_BYTES_PER_SECOND, NUM_READERS, STALL_SECONDS, TOTAL_SECONDS,
};
use crate::error::Result;
use crate::sys::to_usize;
use crate::traffic::{self, Traffic};

/// Time limits, connections, certificates and extra headers.
#[derive(Debug, Clone)]
pub struct TransportOptions {
    /// Sent with every request to the host that the caller named.
    pub headers: Vec<(String, String)>,
    /// The trusted certificates.
    pub trust: Trust,
    /// The trusted certificates of services that issue credentials: never those of the call, which
    /// are for the server of the files.
    pub credential_trust: Trust,
    /// The settings that name certificates, for messages.
    pub trust_settings: &'static str,
    /// Default number of connections of a load or an upload. None to add connections while they
    /// raise the throughput.
    pub connections: Option<usize>,
    /// Maximum number of connections, also if the caller requests more.
    pub max_connections: usize,
    /// Attempts of one request, the first included.
    pub attempts: u32,
    /// Time limit for making a connection.
    pub connect: Duration,
    /// Time limit for a server that neither sends nor takes bytes.
    pub stall: Duration,
    /// Time limit for all attempts of one request together.
    pub total: Duration,
    /// Counts the requests.
    pub traffic: Arc<Traffic>,
}

impl TransportOptions {
    /// The options from the environment. A variable that is no number of its range is
    /// an error.
    pub fn from_environment() -> Result<Self> {
        let traffic = traffic::current();
        traffic.set_default_limit(MAX_BYTES_PER_SECOND.value()?);
        Ok(TransportOptions {
            headers: Vec::new(),
            trust: Trust::Default,
            credential_trust: Trust::Default,
            trust_settings: HTTP_SETTINGS,
            connections: Some(to_usize(NUM_READERS.value()?)).filter(|&number| number > 0),
            max_connections: 256,
            attempts: u32::try_from(ATTEMPTS.value()?).unwrap_or(u32::MAX),
            connect: CONNECT_SECONDS.seconds()?,
            stall: STALL_SECONDS.seconds()?,
            total: TOTAL_SECONDS.seconds()?,
            traffic,
        })
    }

    /// Lowers the time limits of a request that is not needed.
    pub fn limit_all(&mut self, time: Duration) {
        for limit in [&mut self.total, &mut self.connect, &mut self.stall] {
            *limit = time.min(*limit);
        }
    }
}
