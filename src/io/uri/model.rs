//! Models: files, or folders with the files of one, local or of a server.

use std::ffi::OsStr;
use std::fs;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::open::{display_address, open};
use super::scheme::{Address, parse};
use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::format::shards::{
    EXPECTED_MODEL_FILES, FILE_EXTENSIONS, MODEL_FILE_NAMES, is_index_name,
};
use crate::io::local::{FileSource, Pipe};
use crate::io::{OpenOptions, ReadAt, StreamSource};

/// Kinds of files that are opened in a folder without a file of [`MODEL_FILE_NAMES`], if there is
/// only one of the kind. The last one is that of `.tensors` files.
const UNIQUE_KINDS: [fn(&str) -> bool; 4] = [
    |name| is_index_name(name, ".safetensors"),
    |name| name.ends_with(".safetensors"),
    |name| is_index_name(name, ".bin"),
    |name| name.ends_with(".tensors") && !name.starts_with('.'),
];

/// The end of the message for the folder of a distributed checkpoint.
const CHECKPOINT_ADVICE: &str = "it is a checkpoint of torch.distributed.checkpoint: load it with \
     tensorizer.distributed.load_state(folder), or the part of each rank with \
     tensorizer.distributed.Reader(folder)";

/// Opens a local path: a file, a pipe, or the file of a folder.
pub fn open_path(path: &Path) -> Result<Arc<dyn ReadAt>> {
    let uri = path.display().to_string();
    let found = if path.is_dir() { file_in_folder(path)? } else { path.to_owned() };
    let file = crate::sys::open_nonblocking(&found).map_err(|e| Error::io("opening", &uri, e))?;
    if is_pipe(&file, &uri)? {
        return Ok(Arc::new(StreamSource::new(Pipe(file), uri)));
    }
    Ok(Arc::new(FileSource::from_path(&found, file)?))
}

/// Opens an open file. Returns the position of its first byte, too: `base` in a regular file, and
/// the present position of a pipe, which can only be read front to back.
pub fn open_file(file: File, uri: String, base: u64) -> Result<(Arc<dyn ReadAt>, u64)> {
    if is_pipe(&file, &uri)? {
        return Ok((Arc::new(StreamSource::new(Pipe(file), uri)), 0));
    }
    Ok((Arc::new(FileSource::new(file, uri)?), base))
}

fn is_pipe(file: &File, uri: &str) -> Result<bool> {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = file.metadata().map_err(|e| Error::io("examining", uri, e))?.file_type();
    Ok(kind.is_fifo() || kind.is_socket() || kind.is_char_device())
}

/// Files of folders that `torch.distributed.checkpoint` has saved, by this package's writer and by
/// torch's.
const CHECKPOINTS: [&str; 2] = ["checkpoint.json", ".metadata"];

/// True for the name of a safetensors file that torch saves there, with parts of tensors.
fn is_part(name: &str) -> bool {
    name.starts_with("shard-") && name.ends_with(".safetensors")
}

/// The file that is opened for a folder.
fn file_in_folder(folder: &Path) -> Result<PathBuf> {
    let usual = MODEL_FILE_NAMES.iter().map(|name| folder.join(name)).find(|path| path.exists());
    if let Some(path) = usual {
        return Ok(path);
    }
    let display_address = folder.display().to_string();
    let refused = |e| Error::io("opening", &display_address, e);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(refused)? {
        names.extend(entry.map_err(refused)?.file_name().into_string());
    }
    names.sort_unstable();
    let is_checkpoint = CHECKPOINTS.iter().any(|name| names.iter().any(|found| found == name))
        || names.iter().filter(|name| is_part(name)).nth(1).is_some();
    // The `.tensors` files of a checkpoint have only parts of its tensors.
    let skipped = usize::from(is_checkpoint);
    for is_wanted in UNIQUE_KINDS.iter().take(UNIQUE_KINDS.len() - skipped) {
        let mut found = names.iter().filter(|name| is_wanted(name));
        match (found.next(), found.next()) {
            (Some(only), None) => return Ok(folder.join(only)),
            (Some(one), Some(_)) if is_part(one) => break,
            (Some(one), Some(other)) => {
                let what =
                    format!("it holds `{one}`, `{other}` and perhaps more: name one of them");
                return Err(refused(io::Error::new(ErrorKind::IsADirectory, what)));
            }
            _ => {}
        }
    }
    let what = if is_checkpoint {
        CHECKPOINT_ADVICE.to_owned()
    } else {
        format!("it is a folder, and holds none of {EXPECTED_MODEL_FILES}")
    };
    Err(refused(io::Error::new(ErrorKind::IsADirectory, what)))
}

/// Opens an address or a local path. If an address has no file, or ends with a slash, it may be the
/// address of a folder with one of [`MODEL_FILE_NAMES`]. If the head of one of these files is
/// cached, that file is opened.
pub fn open_model(
    uri: &str,
    options: &OpenOptions,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    if let Address::Path(path) = parse(OsStr::new(uri))? {
        return open_path(&path);
    }
    let in_folder = folder_candidates(uri);
    let has_folders = !in_folder.is_empty();
    let itself = !has_folders || !uri.ends_with('/');
    let candidates: Vec<String> =
        itself.then(|| uri.to_owned()).into_iter().chain(in_folder).collect();
    let is_cached = |uri: &&String| {
        display_address(uri)
            .is_some_and(|display_address| options.cached_heads.contains_key(&display_address))
    };
    if let Some(uri) = candidates.iter().find(is_cached) {
        return open(uri, options, cancel);
    }
    let mut missing = None;
    for uri in &candidates {
        match open(uri, options, cancel) {
            Err(error) if is_missing(&error) => missing = missing.or(Some(error)),
            opened => return opened,
        }
    }
    let folder = uri.strip_suffix('/').unwrap_or(uri);
    let mut is_checkpoint = false;
    for name in CHECKPOINTS.iter().filter(|_| has_folders) {
        match open(&format!("{folder}/{name}"), options, cancel) {
            Err(error) if !is_missing(&error) => return Err(error),
            found => is_checkpoint |= found.is_ok(),
        }
    }
    Err(missing.filter(|_| itself && !is_checkpoint).unwrap_or_else(|| {
        let what = if is_checkpoint {
            CHECKPOINT_ADVICE.to_owned()
        } else {
            format!("there is none of {EXPECTED_MODEL_FILES}")
        };
        let display_address = display_address(uri).unwrap_or_else(|| uri.to_owned());
        Error::failed("opening", &display_address, ErrorKind::NotFound, what)
    }))
}

/// True for the error of a missing file. A server that may not list a folder refuses access
/// instead.
fn is_missing(error: &Error) -> bool {
    let missing = [ErrorKind::NotFound, ErrorKind::PermissionDenied];
    matches!(error, Error::Io { error, .. } if missing.contains(&error.kind()))
}

/// The candidate files of a folder address; none if it cannot be the address of a folder.
fn folder_candidates(uri: &str) -> Vec<String> {
    let has_folders = matches!(
        parse(OsStr::new(uri)), Ok(Address::Server(scheme)) if scheme.has_folders()
    );
    let named = uri.split_once("://").filter(|_| has_folders).map_or("", |(_, rest)| rest);
    let named = named.trim_matches('/');
    let of_a_file =
        uri.contains('?') || FILE_EXTENSIONS.iter().any(|ending| named.ends_with(ending));
    if named.is_empty() || of_a_file {
        return Vec::new();
    }
    let folder = uri.strip_suffix('/').unwrap_or(uri);
    MODEL_FILE_NAMES.iter().map(|name| format!("{folder}/{name}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_addresses_have_candidate_files() {
        for (uri, folder) in [
            ("http://h", "http://h"),
            ("https://h/a/", "https://h/a"),
            ("s3://b/k.d", "s3://b/k.d"),
            ("gs://b/k/", "gs://b/k"),
            // An object's name may have an empty component.
            ("s3://b/k//", "s3://b/k/"),
        ] {
            let expected: Vec<_> =
                MODEL_FILE_NAMES.iter().map(|n| format!("{folder}/{n}")).collect();
            assert_eq!(folder_candidates(uri), expected, "{uri}");
        }
        for uri in ["http://", "s3:///", "http://h/f.tensors/", "s3://b/f.bin", "http://h/?a=/"] {
            assert_eq!(folder_candidates(uri), Vec::<String>::new(), "{uri}");
        }
        assert_eq!(folder_candidates("redis://h/key/"), Vec::<String>::new());
    }
}
