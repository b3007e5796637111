//! The one table of the environment variables that set options.

use crate::error::{Error, Result};

/// An environment variable that holds a whole number.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What holds without it.
    pub default: u64,
    /// What it sets, with its unit.
    pub meaning: &'static str,
}

impl Variable {
    /// What it is set to, or its default; an error if that is no number.
    pub fn value(&self) -> Result<u64> {
        match std::env::var(self.name) {
            Err(std::env::VarError::NotPresent) => Ok(self.default),
            found => found.ok().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "the environment variable {} must be a whole number: {}",
                    self.name, self.meaning
                ))
            }),
        }
    }
}

macro_rules! variables {
    ($($constant:ident = $name:literal, $default:expr, $meaning:literal;)+) => {
        $(
            #[doc = $meaning]
            pub static $constant: Variable =
                Variable { name: $name, default: $default, meaning: $meaning };
        )+

        /// All of them. The README has the same table.
        pub static VARIABLES: &[&Variable] = &[$(&$constant),+];
    };
}

variables! {
    CONNECTIONS = "TENSORIZER_CONNECTIONS", 16,
        "connections that a load or an upload uses unless their number is given";
    ATTEMPTS = "TENSORIZER_ATTEMPTS", 6, "tries of one request, the first included";
    CONNECT_SECONDS = "TENSORIZER_CONNECT_SECONDS", 20, "how long a connection may take to be made";
    STALL_SECONDS = "TENSORIZER_STALL_SECONDS", 30, "how long a server may send nothing";
    TOTAL_SECONDS = "TENSORIZER_TOTAL_SECONDS", 300,
        "how long the tries of one request may take together";
    PINNED_MB = "TENSORIZER_PINNED_MB", 256,
        "pinned host memory that all loads to and saves from CUDA share, in MiB";
    DIRECT_IO = "TENSORIZER_DIRECT_IO", 1,
        "whether loads to CUDA read files around the page cache that are not in it: 1 or 0";
    GDS = "TENSORIZER_GDS", 0,
        "whether loads to CUDA try GPUDirect Storage for local files: 1 or 0";
    FAKE_DEVICE = "TENSORIZER_FAKE_DEVICE", 0,
        "for tests: a seed other than 0 sends loads to the CPU through a stand-in for CUDA";
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_table() {
        let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"));
        let readme = readme.unwrap();
        for Variable { name, default, meaning } in VARIABLES {
            let line = format!("| `{name}` | {default} | {meaning} |");
            assert!(readme.contains(&line), "{line}");
        }
    }
}
