//! The trusted certificates: those that the call names, those of the variables that other programs
//! use, too, or the system's.

use std::path::{Path, PathBuf};

use crate::environment::{self, read_guarded};

/// The trusted certificates.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Trust {
    /// Certificates that `REQUESTS_CA_BUNDLE` or `CURL_CA_BUNDLE` names; else as [`Trust::System`].
    Default,
    /// Certificates of `SSL_CERT_FILE` and `SSL_CERT_DIR`, or else of the system.
    System,
    /// Certificates of a file in PEM format, or of the files of a folder.
    Bundle {
        path: PathBuf,
        /// The argument, variable or setting that names it.
        named_by: &'static str,
    },
    /// All certificates.
    Anything,
}

/// The name of the call's argument in messages.
const ARGUMENT: &str = "certificate_handling";
/// The settings that name certificates for HTTP servers, S3, Redis and services with credentials.
pub const HTTP_SETTINGS: &str = "certificate_handling=CAInfo(cacert=...) or REQUESTS_CA_BUNDLE";
pub const S3_SETTINGS: &str = "certificate_handling=CAInfo(cacert=...) or AWS_CA_BUNDLE";
pub const REDIS_SETTINGS: &str = "certificate_handling=CAInfo(cacert=...) or SSL_CERT_FILE";
pub const AWS_CREDENTIALS_SETTINGS: &str = "AWS_CA_BUNDLE";
pub const CREDENTIALS_SETTINGS: &str = "REQUESTS_CA_BUNDLE";
/// The variables that every client reads, in order of precedence.
const BUNDLES: [&str; 2] = ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
/// The variables that the library for the system's certificates reads itself.
const SYSTEM: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

impl Trust {
    /// The file or folder that an argument of the call names.
    pub fn from_argument(path: PathBuf) -> Self {
        Trust::Bundle { path, named_by: ARGUMENT }
    }

    /// The file or folder that a variable of the environment names, if it is set.
    pub fn from_variable(variable: &'static str) -> Option<Self> {
        let path = environment::variable(variable)?.into();
        Some(Trust::Bundle { path, named_by: variable })
    }

    /// The same with the variables looked up: never [`Trust::Default`].
    pub fn resolved(&self) -> Self {
        if *self != Trust::Default {
            return self.clone();
        }
        BUNDLES.into_iter().find_map(Trust::from_variable).unwrap_or(Trust::System)
    }

    /// The files to read certificates from; none for [`Trust::System`] and [`Trust::Anything`].
    /// The error says what is wrong with the path.
    pub fn files(&self) -> Result<Vec<PathBuf>, String> {
        let Trust::Bundle { path, named_by } = self else { return Ok(Vec::new()) };
        if !path.is_dir() {
            return Ok(vec![path.clone()]);
        }
        let found = certificates_in(path)
            .map_err(|e| format!("certificates in {} ({named_by}): {e}", path.display()))?;
        if found.is_empty() {
            let path = path.display();
            return Err(format!("{path} ({named_by}) has no certificates: *.pem, *.crt or *.0"));
        }
        Ok(found)
    }

    /// The files whose changes matter: those of [`Trust::files`], and those that the system's
    /// variables name.
    pub fn files_to_watch(&self) -> Result<Vec<PathBuf>, String> {
        let mut files = self.files()?;
        if *self == Trust::System {
            let bundle = read_guarded(|| SYSTEM.map(std::env::var_os));
            files.extend(bundle.into_iter().flatten().map(PathBuf::from));
        }
        Ok(files)
    }

    /// The advice for an untrusted certificate; `variables`: those that help there.
    pub fn hint(&self, variables: &str) -> String {
        match self {
            Trust::Bundle { path, named_by } => format!(
                "{} ({named_by}) does not have the certificate of the authority that signed it",
                path.display()
            ),
            _ => format!(
                "set {variables} to a PEM file with the certificate of the authority that signed it"
            ),
        }
    }
}

fn certificates_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let all = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut found = all.collect::<std::io::Result<Vec<_>>>()?;
    found.retain(|path| {
        path.extension().is_some_and(|e| {
            e.eq_ignore_ascii_case("pem") || e.eq_ignore_ascii_case("crt") || e == "0"
        })
    });
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_come_from_a_file_or_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let trust = |path: &Path| Trust::from_argument(path.to_owned());
        let error = trust(folder.path()).files().unwrap_err();
        assert!(error.contains("(certificate_handling) has no certificates"), "{error}");
        for name in ["b.crt", "a.PEM", "c.0", "d.txt"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let found = trust(folder.path()).files().unwrap();
        assert_eq!(found, ["a.PEM", "b.crt", "c.0"].map(|name| folder.path().join(name)));
        let file = folder.path().join("d.txt");
        assert_eq!(trust(&file).files().unwrap(), [file]);
        assert!(Trust::System.files().unwrap().is_empty());
    }

    #[test]
    fn certificate_hints_name_the_setting_to_change() {
        let hint = Trust::from_argument("/ca".into()).hint("X");
        assert!(hint.starts_with("/ca (certificate_handling) does not have the certificate of"));
        assert!(Trust::System.hint("X or Y").starts_with("set X or Y to a PEM file"));
    }
}
