//! The configuration file of `s3cmd`.

use std::io::ErrorKind;
use std::path::Path;

use crate::environment::home;
use crate::error::{Error, Result};

/// The `[default]` section of such a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct S3Cfg {
    pub access_key: Option<String>,
    pub secret_key: Option<String>,
    pub session_token: Option<String>,
    pub host: Option<String>,
    /// The host with the bucket in its name, or without. None if that is of another server, such as
    /// the one that `s3cmd` writes unless it is told one.
    pub host_bucket: Option<String>,
    pub use_https: Option<bool>,
}

impl S3Cfg {
    /// Reads the given file, which must exist, or `~/.s3cfg`, which may be missing.
    pub fn find(named: Option<&Path>) -> Result<Self> {
        let Some(path) = named else {
            let found = home().and_then(|home| Self::read(&home.join(".s3cfg")).ok());
            return Ok(found.unwrap_or_else(S3Cfg::default));
        };
        Self::read(path).map_err(|e| Error::io("reading", &path.display().to_string(), e))
    }

    /// Reads a file.
    pub fn read(path: &Path) -> std::io::Result<Self> {
        let mut found = S3Cfg::default();
        let (mut in_default_section, mut has_section) = (false, false);
        for line in std::fs::read_to_string(path)?.lines().map(str::trim) {
            if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                (in_default_section, has_section) = (section.trim() == "default", true);
            }
            if !has_section && !line.is_empty() && !line.starts_with(['#', ';']) {
                let what = "not a configuration file: expected a [section] first";
                return Err(std::io::Error::new(ErrorKind::InvalidData, what));
            }
            let Some((name, value)) = line.split_once(['=', ':']).filter(|_| in_default_section)
            else {
                continue;
            };
            let value = value.trim();
            let text = (!value.is_empty()).then(|| value.to_owned());
            match name.trim() {
                "access_key" => found.access_key = text,
                "secret_key" => found.secret_key = text,
                "access_token" => found.session_token = text,
                "host_base" => found.host = text,
                "host_bucket" => found.host_bucket = text,
                "use_https" => found.use_https = Some(!value.eq_ignore_ascii_case("false")),
                _ => {}
            }
        }
        let host = found.host.as_deref();
        found.host_bucket =
            found.host_bucket.filter(|of| host.is_some_and(|host| of.ends_with(host)));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_default_section_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s3cfg");
        let text = "[other]\naccess_key = no\n[default]\naccess_key = key\nsecret_key=se=cret\n\
                    host_base = host:1\nuse_https = False\n";
        std::fs::write(&path, text).unwrap();
        let found = S3Cfg::find(Some(&path)).unwrap();
        assert_eq!(found.access_key.unwrap(), "key");
        assert_eq!(found.secret_key.unwrap(), "se=cret");
        assert_eq!(found.host.unwrap(), "host:1");
        assert_eq!(found.use_https, Some(false));
        for (host, is_used) in [("%(bucket)s.host:1", true), ("%(bucket)s.s3.amazonaws.com", false)]
        {
            std::fs::write(&path, format!("{text}host_bucket = {host}\n")).unwrap();
            assert_eq!(S3Cfg::read(&path).unwrap().host_bucket.is_some(), is_used, "{host}");
        }
        std::fs::write(&path, "# a comment\n\nno sections\n").unwrap();
        assert!(S3Cfg::find(Some(&path)).unwrap_err().to_string().contains("[section]"));
    }
}
