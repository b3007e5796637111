//! Connections to a Redis server, and what its errors mean.

use std::io::ErrorKind;

use percent_encoding::percent_decode_str;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _,
    Pipeline, RedisConnectionInfo, RedisError, TlsCertificates, Value,
};
use url::Url;

use crate::net::{Failure, Lane, Lanes, NetOptions, Tries, Trust, show_text};

/// The port that servers listen on unless they are told otherwise.
const DEFAULT_PORT: u16 = 6379;

/// What `redis://user:password@host:port/prefix?db=number` says.
#[derive(Debug)]
pub struct Address {
    info: ConnectionInfo,
    /// Keys begin with this and a colon.
    pub prefix: String,
    /// For messages.
    pub shown: String,
}

impl Address {
    /// What is wrong with the address is the error.
    pub fn parse(address: &str, trust: &Trust) -> Result<Self, String> {
        let bad = |what: &str| format!("`{}`: {what}", show_text(address));
        let url = Url::parse(address).map_err(|e| bad(&e.to_string()))?;
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| bad("no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = url.port().unwrap_or(DEFAULT_PORT);
        let shown_port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        // As it is written: a parsed path would have its special characters encoded.
        let (_, rest) = address.split_once("://").unwrap_or_default();
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let prefix = rest.split_once('/').map(|(_, path)| path.to_owned()).unwrap_or_default();
        let mut redis = RedisConnectionInfo::default();
        let decoded = |text: &str| {
            percent_decode_str(text).decode_utf8().map(|text| text.into_owned()).map_err(|_| {
                bad("user and password must be UTF-8, with %XX for special characters")
            })
        };
        if !url.username().is_empty() {
            redis = redis.set_username(decoded(url.username())?);
        }
        if let Some(password) = url.password() {
            redis = redis.set_password(decoded(password)?);
        }
        for (name, value) in url.query_pairs() {
            match &*name {
                "db" => {
                    let db = value.parse().map_err(|_| bad("db must be a number"))?;
                    redis = redis.set_db(db);
                }
                other => return Err(bad(&format!("unknown option `{other}`, there is only `db`"))),
            }
        }
        let addr = match url.scheme() {
            "rediss" => {
                let insecure = *trust == Trust::Anything;
                ConnectionAddr::TcpTls { host: host.clone(), port, insecure, tls_params: None }
            }
            _ => ConnectionAddr::Tcp(host.clone(), port),
        };
        let info = addr.into_connection_info().map_err(|e| bad(&e.to_string()))?;
        let shown = format!("{}://{host}{shown_port}/{prefix}", url.scheme());
        Ok(Address { info: info.set_redis_settings(redis), prefix, shown })
    }
}

/// The connections of one source.
pub struct Connections {
    client: Client,
    config: AsyncConnectionConfig,
    lanes: Lanes<MultiplexedConnection>,
}

impl Connections {
    /// Reads the certificates; what is wrong with them is the error.
    pub fn new(address: &Address, options: &NetOptions) -> Result<Self, String> {
        crate::net::choose_tls_provider();
        let info = address.info.clone();
        let tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        let pem = if tls { options.trust.certificates()? } else { Vec::new() };
        let client = if pem.is_empty() {
            Client::open(info)
        } else {
            let root_cert = Some(pem.join(&b'\n'));
            Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert })
        };
        Ok(Connections {
            client: client.map_err(|e| e.to_string())?,
            config: AsyncConnectionConfig::new()
                .set_connection_timeout(Some(options.connect))
                .set_response_timeout(Some(options.stall)),
            lanes: Lanes::default(),
        })
    }

    /// Sends a series of commands and gives their answers, in order.
    pub fn ask(&self, commands: &Pipeline, tries: &Tries<'_>) -> Result<Vec<Value>, Failure> {
        let lane: Lane<MultiplexedConnection> = self.lanes.take(tries, || async {
            let made = self.client.get_multiplexed_async_connection_with_config(&self.config);
            made.await.map_err(failure)
        })?;
        let mut connection = lane.client().clone();
        let answers = lane.run(tries, async {
            commands.query_async::<Vec<Value>>(&mut connection).await.map_err(failure)
        })?;
        // A connection on which something failed is not used again.
        self.lanes.put(lane);
        Ok(answers)
    }
}

fn failure(error: RedisError) -> Failure {
    let text = error.to_string();
    let refused = error.kind() == redis::ErrorKind::AuthenticationFailed;
    if refused || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM")) {
        let what = format!("{text}; check user and password");
        return Failure::lasting(ErrorKind::PermissionDenied, what);
    }
    if matches!(error.code(), Some("LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN")) {
        return Failure::passing(ErrorKind::Other, text);
    }
    let lower = text.to_lowercase();
    if lower.contains("certificate") || lower.contains("invalid peer") {
        let what = format!(
            "the server's certificate is not trusted: {text}; name the authority that signed it \
             with certificate_handling=CAInfo(cacert=...)"
        );
        return Failure::lasting(ErrorKind::PermissionDenied, what);
    }
    if lower.contains("failed to lookup") || lower.contains("name or service") {
        let what = format!("the name of the server is not known: {text}; check the address");
        return Failure::lasting(ErrorKind::NotFound, what);
    }
    if error.is_timeout() {
        return Failure::passing(ErrorKind::TimedOut, text);
    }
    if error.is_connection_refusal() {
        return Failure::passing(ErrorKind::ConnectionRefused, text);
    }
    if error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error() {
        return Failure::passing(ErrorKind::ConnectionAborted, text);
    }
    Failure::lasting(ErrorKind::InvalidData, text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parse = |text| Address::parse(text, &Trust::System);
        let found = parse("redis://me:p%40ss@host/a b/\"c\"?db=3").unwrap();
        assert_eq!(found.prefix, "a b/\"c\"");
        assert_eq!(found.shown, "redis://host/a b/\"c\"");
        let settings = found.info.redis_settings();
        assert_eq!((settings.username(), settings.password()), (Some("me"), Some("p@ss")));
        assert_eq!(settings.db(), 3);
        assert_eq!(found.info.addr().to_string(), "host:6379");
        assert_eq!(parse("rediss://[::1]:7/x").unwrap().shown, "rediss://::1:7/x");
        for bad in ["redis:///x", "redis://host/x?db=no", "redis://host/x?dbs=1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(!parse("redis://me:secret@host/x?db=no").unwrap_err().contains("secret"));
    }
}
