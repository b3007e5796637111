//! Addresses of the hub: a repository, a revision of it, and a file or a folder there.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use crate::error::{Error, Escaped, Result};
use crate::format::shards::{FILE_EXTENSIONS, MODEL_FILE_NAMES};

/// The revision that is used unless one is named.
const DEFAULT_REVISION: &str = "main";
/// Repositories of other kinds.
const OTHER_KINDS: [&str; 4] = ["datasets", "spaces", "kernels", "buckets"];
/// Longest name of a user, and of a repository.
const LONGEST: usize = 96;
/// Characters that cannot be part of a revision in an address.
const ENCODED_IN_REVISIONS: &AsciiSet = &CONTROLS.add(b'/').add(b'%').add(b'@').add(b'?').add(b'#');

/// A repository at a revision, and a file or folder in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubAddress {
    /// `org/name`.
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// The path of a file or a folder; empty for the whole repository.
    pub path: String,
    /// True if the address names a folder.
    folder: bool,
}

impl HubAddress {
    /// Parses an address.
    pub fn parse(uri: &str) -> Result<Self> {
        let wrong = |what: &str| {
            let uri = Escaped(uri);
            Error::InvalidArgument(format!(
                "`{uri}`: expected hf://org/repo[@revision][/path], {what}"
            ))
        };
        let (_, rest) = uri.split_once("://").unwrap_or(("", uri));
        let rest = rest.strip_prefix("models/").unwrap_or(rest);
        let (org, rest) = rest.split_once('/').unwrap_or((rest, ""));
        if OTHER_KINDS.contains(&org) {
            return Err(wrong(&format!(
                "which is a repository of a model: hf://{org}/ is not supported"
            )));
        }
        let end = rest.find(['@', '/']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at_checked(end).unwrap_or((rest, ""));
        if !is_name(org) || !is_name(name) {
            return Err(wrong(
                "where the names of org and repo have only letters, digits, `-`, `_` and `.`",
            ));
        }
        let (revision, path) = match rest.strip_prefix('@') {
            Some(rest) => rest.split_at_checked(end_of_revision(rest)).unwrap_or((rest, "")),
            None => (DEFAULT_REVISION, rest),
        };
        let revision = percent_decode_str(revision).decode_utf8();
        let revision = revision.map_or_else(|_| String::new(), |text| text.into_owned());
        if !is_relative_path(&revision) {
            return Err(wrong("where the revision is a branch, a tag or a commit"));
        }
        let path = path.trim_start_matches('/');
        let folder = path.is_empty() || path.ends_with('/');
        let path = path.trim_end_matches('/').to_owned();
        if !path.is_empty() && !is_relative_path(&path) {
            return Err(wrong(
                "where the path is that of a file in the repository, without `.` and `..`",
            ));
        }
        Ok(HubAddress { repo: format!("{org}/{name}"), revision, path, folder })
    }

    /// The same address at a commit.
    pub fn at_commit(&self, commit: &str) -> Self {
        HubAddress { revision: commit.to_owned(), ..self.clone() }
    }

    /// The address of a file of this repository.
    pub fn file(&self, path: String) -> Self {
        HubAddress { path, folder: false, ..self.clone() }
    }

    /// The address of another file in the same folder.
    pub fn sibling(&self, name: &str) -> Self {
        let folder = self.path.rsplit_once('/').map(|(folder, _)| folder);
        self.file(folder.map_or(name.to_owned(), |folder| format!("{folder}/{name}")))
    }

    /// The files that it may name, in the order in which they are tried.
    pub fn candidates(&self) -> Vec<HubAddress> {
        let path = &self.path;
        let file = (!self.folder).then(|| path.clone());
        let of_a_file = !self.folder && FILE_EXTENSIONS.iter().any(|ending| path.ends_with(ending));
        let names = if of_a_file { &[][..] } else { &MODEL_FILE_NAMES };
        let below = names.iter().map(|name| {
            if path.is_empty() { (*name).to_owned() } else { format!("{path}/{name}") }
        });
        file.into_iter().chain(below).map(|path| self.file(path)).collect()
    }

    /// True if its revision is a commit, which never changes.
    pub fn is_pinned(&self) -> bool {
        is_commit(&self.revision)
    }

    /// The address.
    pub fn display_address(&self) -> String {
        let revision = utf8_percent_encode(&self.revision, ENCODED_IN_REVISIONS);
        let separator = if self.path.is_empty() { "" } else { "/" };
        format!("hf://{}@{revision}{separator}{}", self.repo, self.path)
    }
}

/// True for the full name of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// True for a name that the hub allows. Then no two repositories share a folder of its client's
/// cache.
fn is_name(name: &str) -> bool {
    let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let ends = |letter: char| letter == '-' || letter == '.';
    let bad = name.contains("--") || name.contains("..") || name.starts_with(ends);
    !name.is_empty() && name.len() <= LONGEST && letters && !bad && !name.ends_with(ends)
}

/// True for a relative path without steps upwards.
fn is_relative_path(text: &str) -> bool {
    let bad = |step: &str| matches!(step, "" | "." | "..") || step.contains('\\');
    !text.split('/').any(bad) && !text.contains(|letter: char| letter.is_control())
}

/// The length of the revision. Those of pull requests and conversions contain slashes.
fn end_of_revision(rest: &str) -> usize {
    let special = rest.starts_with("refs/pr/") || rest.starts_with("refs/convert/");
    let mut slashes = rest.match_indices('/').map(|(at, _)| at);
    slashes.nth(if special { 2 } else { 0 }).unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_addresses_are_parsed_or_refused() {
        for (uri, repo, revision, path) in [
            ("hf://o/r", "o/r", "main", ""),
            ("HF://o/r/", "o/r", "main", ""),
            ("hf://models/o/r/f", "o/r", "main", "f"),
            ("hf://o/r@v1.0", "o/r", "v1.0", ""),
            ("hf://o/r@a%2Fb/d/f", "o/r", "a/b", "d/f"),
            ("hf://o/r@refs/pr/12/d/", "o/r", "refs/pr/12", "d"),
            ("hf://o/r@refs/convert/x", "o/r", "refs/convert/x", ""),
            ("hf://o/r/a@b c%20", "o/r", "main", "a@b c%20"),
        ] {
            let address = HubAddress::parse(uri).unwrap();
            assert_eq!(
                (&*address.repo, &*address.revision, &*address.path),
                (repo, revision, path)
            );
            let again = HubAddress::parse(&address.display_address()).unwrap();
            assert_eq!(again.display_address(), address.display_address(), "{uri}");
        }
        for uri in [
            "hf://",
            "hf://r",
            "hf://o/",
            "hf://o//f",
            "hf://o/r@",
            "hf://o/r@/f",
            "hf://o/a--b",
            "hf://o/r@..%2Fx",
            "hf://o/r/../f",
            "hf://o/r/a//b",
            "hf://datasets/o/r/f",
            "hf://ö/r",
            "hf://o/r@%ff",
            "hf://o/r/a\nb",
            "hf://o/.r",
            "hf://o/r@a%2F",
        ] {
            assert!(matches!(HubAddress::parse(uri), Err(Error::InvalidArgument(_))), "{uri}");
        }
    }

    #[test]
    fn candidates_are_the_file_itself_and_files_of_the_folder() {
        let of = |uri: &str| -> Vec<String> {
            HubAddress::parse(uri)
                .unwrap()
                .candidates()
                .into_iter()
                .map(|address| address.path)
                .collect()
        };
        assert_eq!(of("hf://o/r/f.safetensors"), ["f.safetensors"]);
        assert_eq!(of("hf://o/r"), MODEL_FILE_NAMES);
        assert_eq!(of("hf://o/r/d.bin/").len(), MODEL_FILE_NAMES.len());
        assert_eq!(of("hf://o/r/d").first().unwrap(), "d");
        assert_eq!(of("hf://o/r/d").get(1).unwrap(), "d/model.safetensors");
    }
}
