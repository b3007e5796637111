//! The one table of options of network sources, and of the environment variables that set them.

use std::path::PathBuf;
use std::time::Duration;

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

impl Trust {
    /// The certificates in PEM format, one file each; none if the system's count or all do. What
    /// is wrong with them is the error.
    pub fn certificates(&self) -> Result<Vec<Vec<u8>>, String> {
        let read = |path: PathBuf| {
            std::fs::read(&path).map_err(|e| format!("certificates of {}: {e}", path.display()))
        };
        let found = match self {
            Trust::System | Trust::Anything => return Ok(Vec::new()),
            Trust::File(path) => vec![read(path.clone())?],
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
                        found.push(read(path)?);
                    }
                }
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
    /// Connections that a load uses unless the caller names a number of readers.
    pub connections: usize,
    /// The most connections.
    pub max_connections: usize,
    /// Tries of one request, the first included.
    pub attempts: u32,
    /// How long a connection may take to be made.
    pub connect: Duration,
    /// How long a server may send nothing.
    pub stall: Duration,
    /// How long the tries of one request may take together.
    pub total: Duration,
}

/// An environment variable, its default, and what it sets.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What holds without it.
    pub default: u32,
    /// What it sets, with its unit.
    pub meaning: &'static str,
    set: fn(&mut NetOptions, u32),
}

const fn seconds(value: u32) -> Duration {
    Duration::from_secs(value as u64)
}

/// All of them. The README has the same table.
pub static VARIABLES: [Variable; 5] = [
    Variable {
        name: "TENSORIZER_CONNECTIONS",
        default: 16,
        meaning: "connections that a load or an upload uses unless their number is given",
        set: |options, value| options.connections = value.max(1) as usize,
    },
    Variable {
        name: "TENSORIZER_ATTEMPTS",
        default: 6,
        meaning: "tries of one request, the first included",
        set: |options, value| options.attempts = value.max(1),
    },
    Variable {
        name: "TENSORIZER_CONNECT_SECONDS",
        default: 20,
        meaning: "how long a connection may take to be made",
        set: |options, value| options.connect = seconds(value.max(1)),
    },
    Variable {
        name: "TENSORIZER_STALL_SECONDS",
        default: 30,
        meaning: "how long a server may send nothing",
        set: |options, value| options.stall = seconds(value.max(1)),
    },
    Variable {
        name: "TENSORIZER_TOTAL_SECONDS",
        default: 300,
        meaning: "how long the tries of one request may take together",
        set: |options, value| options.total = seconds(value.max(1)),
    },
];

impl NetOptions {
    /// The defaults, changed by the environment; an error for a variable that is no number.
    pub fn from_environment() -> crate::error::Result<Self> {
        let mut options = NetOptions {
            headers: Vec::new(),
            trust: Trust::System,
            connections: 1,
            max_connections: 256,
            attempts: 1,
            connect: Duration::ZERO,
            stall: Duration::ZERO,
            total: Duration::ZERO,
        };
        for variable in &VARIABLES {
            let value = match std::env::var(variable.name) {
                Err(std::env::VarError::NotPresent) => variable.default,
                found => found.ok().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
                    crate::error::Error::InvalidArgument(format!(
                        "the environment variable {} must be a whole number: {}",
                        variable.name, variable.meaning
                    ))
                })?,
            };
            (variable.set)(&mut options, value);
        }
        Ok(options)
    }
}
