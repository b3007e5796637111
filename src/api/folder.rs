//! Folders, and addresses that are the beginning of others, as places of a model's files.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::format::shards::{FILES, IN_FOLDERS};
use crate::io::cache::Cache;
use crate::io::source::{KnownHeads, ReadAt, address};

/// Other names that a folder's only file may have.
const ENDINGS: [&str; 3] = [".safetensors.index.json", ".safetensors", ".bin.index.json"];

/// Schemes of servers that have folders, or keys that look like it.
const SCHEMES: [&str; 7] =
    ["http://", "https://", "s3://", "gs://", "az://", "abfs://", "abfss://"];

/// The file of a folder that is opened for it.
pub fn find(folder: &Path) -> Result<PathBuf> {
    let usual = IN_FOLDERS.iter().map(|name| folder.join(name)).find(|path| path.exists());
    if let Some(path) = usual {
        return Ok(path);
    }
    let shown = folder.display().to_string();
    let refused = |e| Error::io("opening", &shown, e);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(refused)? {
        names.extend(entry.map_err(refused)?.file_name().into_string());
    }
    names.sort_unstable();
    for ending in ENDINGS {
        let mut found = names.iter().filter(|name| name.ends_with(ending));
        match (found.next(), found.next()) {
            (Some(only), None) => return Ok(folder.join(only)),
            (Some(one), Some(other)) => {
                let what =
                    format!("it holds `{one}`, `{other}` and perhaps more: name one of them");
                return Err(refused(io::Error::new(ErrorKind::IsADirectory, what)));
            }
            _ => {}
        }
    }
    let what = format!("it is a folder, and holds none of {}", IN_FOLDERS.join(", "));
    Err(refused(io::Error::new(ErrorKind::IsADirectory, what)))
}

/// Opens an address for reading, with the options of the environment. Where there is nothing, or the
/// address ends with a slash, it may be that of a folder with one of [`IN_FOLDERS`]. If a head is known
/// of one of the files that it may name, it names that one.
pub fn open_address(
    uri: &str,
    known: &KnownHeads,
    cache: Option<&Cache>,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let below = below(uri);
    let itself = below.is_empty() || !uri.ends_with('/');
    let places: Vec<String> = itself.then(|| uri.to_owned()).into_iter().chain(below).collect();
    let is_known =
        |place: &&String| address::shown(place).is_some_and(|shown| known.of(&shown).is_some());
    if let Some(place) = places.iter().find(is_known) {
        return address::open(place, known, cache, cancel);
    }
    let mut missing = None;
    for place in &places {
        match address::open(place, known, cache, cancel) {
            Err(error) if is_missing(&error) => missing = missing.or(Some(error)),
            opened => return opened,
        }
    }
    Err(missing.filter(|_| itself).unwrap_or_else(|| {
        let what = format!("there is none of {}", IN_FOLDERS.join(", "));
        let shown = address::shown(uri).unwrap_or_else(|| uri.to_owned());
        Error::io("opening", &shown, io::Error::new(ErrorKind::NotFound, what))
    }))
}

/// Servers that may not say what they have refuse what there is not.
fn is_missing(error: &Error) -> bool {
    let missing = [ErrorKind::NotFound, ErrorKind::PermissionDenied];
    matches!(error, Error::Io { error, .. } if missing.contains(&error.kind()))
}

/// The files that an address names if it is that of a folder; none if it cannot be.
fn below(uri: &str) -> Vec<String> {
    let named = SCHEMES.iter().find_map(|scheme| uri.strip_prefix(scheme)).unwrap_or("");
    let named = named.trim_matches('/');
    let of_a_file = uri.contains('?') || FILES.iter().any(|ending| named.ends_with(ending));
    if named.is_empty() || of_a_file {
        return Vec::new();
    }
    let folder = uri.trim_end_matches('/');
    IN_FOLDERS.iter().map(|name| format!("{folder}/{name}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_folders() {
        for uri in ["http://h", "https://h/a/", "s3://b/k.d", "gs://b/k/", "http://h/a.tensors.d//"]
        {
            let folder = uri.trim_end_matches('/');
            let expected: Vec<_> = IN_FOLDERS.iter().map(|n| format!("{folder}/{n}")).collect();
            assert_eq!(below(uri), expected, "{uri}");
        }
        for uri in ["http://", "s3:///", "http://h/f.tensors/", "s3://b/f.bin", "http://h/?a=/"] {
            assert_eq!(below(uri), Vec::<String>::new(), "{uri}");
        }
        assert_eq!(below("redis://h/key/"), Vec::<String>::new());
    }
}
