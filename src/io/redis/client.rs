//! Connections to a Redis server, and the classification of its errors.

use std::io::{self, ErrorKind};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Pipeline, RedisConnectionInfo, RedisError, Value};
use url::Url;

use super::bounded_connection::{self, ReceiveLimit};
use crate::error::Escaped;
use crate::io::transport::{
    ConnectionPool, Failure, REDIS_SETTINGS, RetryBudget, Tls, TransportOptions, Trust,
    lookup_failure, refused_socket, show_text, timer, tls_failure,
};

/// The default port of servers.
const DEFAULT_PORT: u16 = 6379;

/// A parsed `redis://user:password@host:port/prefix?db=number`.
#[derive(Debug)]
pub struct RedisAddress {
    host: String,
    port: u16,
    tls: bool,
    settings: RedisConnectionInfo,
    /// The prefix of keys, which a colon follows.
    pub prefix: String,
    /// For messages.
    pub display_address: String,
}

impl RedisAddress {
    /// Parses an address; the error says what is wrong with it.
    pub fn parse(address: &str) -> Result<Self, String> {
        let bad = |what: &str| format!("`{}`: {what}", show_text(address));
        let url = Url::parse(address).map_err(|e| bad(&e.to_string()))?;
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| bad("no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = url.port().unwrap_or(DEFAULT_PORT);
        let display_port = url.port().map_or(String::new(), |port| format!(":{port}"));
        // Taken as written, because a parsed path has its special characters encoded.
        let (_, rest) = address.split_once("://").unwrap_or(("", address));
        if rest.contains('#') {
            return Err(bad(
                "expected an address without `#`: write it as %23 in a password, and use \
                            a prefix of keys without it",
            ));
        }
        let rest = rest.split('?').next().unwrap_or(rest);
        let prefix = rest.split_once('/').map_or("", |(_, path)| path).to_owned();
        let mut settings = RedisConnectionInfo::default();
        let decoded = |text: &str| {
            percent_decode_str(text).decode_utf8().map(|text| text.into_owned()).map_err(|_| {
                bad("user and password must be UTF-8, with %XX for special characters")
            })
        };
        if !url.username().is_empty() {
            settings = settings.set_username(decoded(url.username())?);
        }
        if let Some(password) = url.password() {
            settings = settings.set_password(decoded(password)?);
        }
        for (name, value) in url.query_pairs() {
            if name != "db" {
                return Err(bad(&format!("unknown option `{name}`, there is only `db`")));
            }
            settings = settings.set_db(value.parse().map_err(|_| bad("db must be a number"))?);
        }
        let display_address = format!("{}://{host}{display_port}/{prefix}", url.scheme());
        let tls = url.scheme() == "rediss";
        Ok(RedisAddress { host, port, tls, settings, prefix, display_address })
    }
}

/// The connections of one source.
pub struct RedisConnections {
    address: RedisAddress,
    tls: Option<Tls>,
    /// The advice for an untrusted certificate.
    hint: String,
    config: AsyncConnectionConfig,
    limit: Duration,
    pool: ConnectionPool<(MultiplexedConnection, ReceiveLimit)>,
}

/// Maximum bytes of the greeting, and of each reply without its data.
const OVERHEAD: u64 = 4 << 10;

impl RedisConnections {
    /// Reads the certificates, if they are needed. Invalid certificates are an error.
    pub fn new(address: RedisAddress, options: &TransportOptions) -> Result<Self, String> {
        // Clients of Redis ignore the variables of HTTP clients.
        let trust = match &options.trust {
            Trust::Default => Trust::System,
            other => other.clone(),
        };
        Ok(RedisConnections {
            tls: address.tls.then(|| Tls::new(&trust, &[])).transpose()?,
            hint: trust.hint(REDIS_SETTINGS),
            address,
            config: AsyncConnectionConfig::new().set_response_timeout(Some(options.stall)),
            limit: options.connect,
            pool: ConnectionPool::default(),
        })
    }

    async fn connect(&self) -> Result<(MultiplexedConnection, ReceiveLimit), Failure> {
        let RedisAddress { host, port, settings, .. } = &self.address;
        let receive_limit = ReceiveLimit::default();
        receive_limit.set(16 * OVERHEAD);
        let connected = async {
            let to = (host.as_str(), *port);
            let stream =
                bounded_connection::connect(to, self.tls.as_ref(), receive_limit.clone()).await;
            let config = self.config.clone();
            let stream = stream.map_err(|error| connect_failure(error, &self.hint))?;
            MultiplexedConnection::new_with_config(settings, stream, config).await.map_err(failure)
        };
        let connected = timer::timeout(self.limit, connected).await.map_err(|_| {
            let what = format!("no connection within {} s", self.limit.as_secs_f64());
            Failure::transient(ErrorKind::TimedOut, what)
        });
        let (connection, driver) = connected??;
        tokio::spawn(driver);
        Ok((connection, receive_limit))
    }

    /// Sends a series of commands and returns their replies in order, of at most the given number
    /// of bytes.
    pub fn send(
        &self,
        commands: &Pipeline,
        max_bytes: u64,
        budget: &RetryBudget<'_>,
    ) -> Result<Vec<Value>, Failure> {
        let connection = self.pool.take(budget, || self.connect())?;
        let (stream, receive_limit) = &connection.client;
        let mut stream = stream.clone();
        receive_limit.set(max_bytes.saturating_add(OVERHEAD));
        budget.options.traffic.request();
        let replies = connection.events.run(budget, async {
            commands.query_async::<Vec<Value>>(&mut stream).await.map_err(failure)
        });
        if replies.as_ref().is_err_and(Failure::is_ended) {
            return replies;
        }
        if receive_limit.is_exceeded() {
            let what = format!(
                "the server sent more than the {max_bytes} bytes that the commands may return"
            );
            return Err(Failure::permanent(ErrorKind::InvalidData, what));
        }
        // A connection is not reused after an error.
        let replies = replies?;
        self.pool.give_back(connection);
        Ok(replies)
    }
}

/// The failure to connect.
fn connect_failure(error: io::Error, hint: &str) -> Failure {
    let (kind, text) = (error.kind(), error.to_string());
    let known = tls_failure(&error, hint).or_else(|| lookup_failure(&text));
    if let Some(failure) = known.or_else(|| refused_socket(kind, &text)) {
        return failure;
    }
    match kind {
        ErrorKind::ConnectionRefused | ErrorKind::TimedOut => Failure::transient(kind, text),
        ErrorKind::InvalidInput => Failure::permanent(kind, text),
        _ => Failure::transient(ErrorKind::ConnectionAborted, text),
    }
}

fn failure(error: RedisError) -> Failure {
    let text = Escaped(&error.to_string()).to_string();
    let refused = error.kind() == redis::ErrorKind::AuthenticationFailed;
    if refused || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM")) {
        let what = format!("{text}; check user and password");
        return Failure::permanent(ErrorKind::PermissionDenied, what);
    }
    match error.code() {
        Some("LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN") => {
            Failure::transient(ErrorKind::Other, text)
        }
        _ if error.is_timeout() => Failure::transient(ErrorKind::TimedOut, text),
        _ if error.is_io_error()
            || error.is_connection_dropped()
            || error.is_unrecoverable_error() =>
        {
            Failure::transient(ErrorKind::ConnectionAborted, text)
        }
        _ => Failure::permanent(ErrorKind::InvalidData, text),
    }
}

/// The servers that have keys, by the reply to `CLUSTER INFO`.
pub fn cluster_size(info: &str) -> u64 {
    let mut sizes = info.lines().filter_map(|line| line.strip_prefix("cluster_size:"));
    sizes.next().and_then(|size| size.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_say_how_many_servers_have_keys() {
        assert_eq!(cluster_size("cluster_state:ok\r\ncluster_size:3\r\ncluster_x:9\r\n"), 3);
        assert_eq!(cluster_size("cluster_size:many\r\n"), 0);
        assert_eq!(cluster_size(""), 0);
    }

    #[test]
    fn redis_addresses_are_parsed() {
        let parse = RedisAddress::parse;
        let found = parse("redis://me:p%40ss@host/a b/\"c\"?db=3").unwrap();
        assert_eq!(found.prefix, "a b/\"c\"");
        assert_eq!(found.display_address, "redis://host/a b/\"c\"");
        let settings = &found.settings;
        assert_eq!((settings.username(), settings.password()), (Some("me"), Some("p@ss")));
        assert_eq!(settings.db(), 3);
        assert_eq!((found.host.as_str(), found.port, found.tls), ("host", 6379, false));
        assert!(parse("rediss://[::1]:7/x").unwrap().tls);
        assert_eq!(parse("rediss://[::1]:7/x").unwrap().display_address, "rediss://::1:7/x");
        for bad in ["redis://me:secret@host:port/x", "redis://:secret@host/x?dbs=1"] {
            let message = parse(bad).err().unwrap();
            assert!(!message.contains("secret"), "{message}");
        }
        for bad in ["redis:///x", "redis://host/x?db=no", "redis://host/x?dbs=1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for bad in ["redis://host/a#b", "redis://host/a?db=1#b", "rediss://host#/a"] {
            assert!(parse(bad).unwrap_err().contains("without `#`"), "{bad}");
        }
        assert!(!parse("redis://me:secret@host/x?db=no").unwrap_err().contains("secret"));
    }
}
