//! The one table of options of network sources.

use std::path::PathBuf;
use std::time::Duration;

use crate::environment::{
    ATTEMPTS, CONNECT_SECONDS, CONNECTIONS, STALL_SECONDS, TOTAL_SECONDS, Variable,
};
use crate::error::Result;
use crate::io::cache::Cache;

/// Which certificates are believed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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

impl Trust {
    /// The files with certificates; none if the system's count or all do. What is wrong is the error.
    pub fn files(&self) -> Result<Vec<PathBuf>, String> {
        let found = match self {
            Trust::System | Trust::Anything => return Ok(Vec::new()),
            Trust::File(path) => vec![path.clone()],
            Trust::Folder(folder) => {
                let named =
                    |e: std::io::Error| format!("certificates in {}: {e}", folder.display());
                let mut found = Vec::new();
                for entry in std::fs::read_dir(folder).map_err(named)? {
                    let path = entry.map_err(named)?.path();
                    let wanted = path.extension().is_some_and(|e| {
                        e.eq_ignore_ascii_case("pem") || e.eq_ignore_ascii_case("crt") || e == "0"
                    });
                    if wanted {
                        found.push(path);
                    }
                }
                found.sort();
                found
            }
        };
        if found.is_empty() { Err(format!("no certificates in {self:?}")) } else { Ok(found) }
    }
}

/// How to talk to servers.
#[derive(Debug, Clone)]
pub struct NetOptions {
    /// Sent with every request to the host that the caller named.
    pub headers: Vec<(String, String)>,
    /// Which certificates are believed.
    pub trust: Trust,
    /// Connections that a load or an upload uses unless the caller names a number. None for as
    /// many as help.
    pub connections: Option<usize>,
    /// The most connections, whoever asks for them.
    pub max_connections: usize,
    /// Tries of one request, the first included.
    pub attempts: u32,
    /// How long a connection may take to be made.
    pub connect: Duration,
    /// How long a server may send nothing.
    pub stall: Duration,
    /// How long the tries of one request may take together.
    pub total: Duration,
    /// Where what HTTP servers and S3 have sent is kept.
    pub cache: Option<Cache>,
}

/// At most a month: whatever adds to it stays far from any overflow. 0 is a second, as ever.
fn time(variable: &Variable) -> Result<Duration> {
    const LEAST: Duration = Duration::from_millis(10);
    const MOST: Duration = Duration::from_secs(31 * 24 * 60 * 60);
    match variable.seconds()? {
        Duration::ZERO => Ok(Duration::from_secs(1)),
        time => Ok(time.clamp(LEAST, MOST)),
    }
}

impl NetOptions {
    /// The defaults, changed by the environment; an error for a variable that is no number.
    pub fn from_environment() -> Result<Self> {
        Ok(NetOptions {
            headers: Vec::new(),
            trust: Trust::System,
            connections: usize::try_from(CONNECTIONS.value()?).ok().filter(|&number| number > 0),
            max_connections: 256,
            attempts: u32::try_from(ATTEMPTS.value()?.max(1)).unwrap_or(u32::MAX),
            connect: time(&CONNECT_SECONDS)?,
            stall: time(&STALL_SECONDS)?,
            total: time(&TOTAL_SECONDS)?,
            cache: Cache::from_environment()?,
        })
    }
}
