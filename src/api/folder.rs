//! Folders, and addresses that are the beginning of others, as places of a model's files.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::format::shards::IN_FOLDERS;
use crate::io::source::{ReadAt, address};

/// Other names that a folder's only file may have.
const ENDINGS: [&str; 3] = [".safetensors.index.json", ".safetensors", ".bin.index.json"];

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
/// address ends with a slash, it is the beginning of the address of one of [`IN_FOLDERS`].
pub fn open_address(uri: &str, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    // Servers that may not say what they have refuse what there is not.
    let is_missing = |error: &Error| {
        let missing = [ErrorKind::NotFound, ErrorKind::PermissionDenied];
        matches!(error, Error::Io { error, .. } if missing.contains(&error.kind()))
    };
    if !uri.ends_with('/') {
        match address::open(uri, cancel) {
            Err(error) if is_missing(&error) && !is_of_a_file(uri) => {
                return open_below(uri, cancel, is_missing)?.ok_or(error);
            }
            opened => return opened,
        }
    }
    open_below(uri.trim_end_matches('/'), cancel, is_missing)?.ok_or_else(|| {
        let what = format!("there is none of {}", IN_FOLDERS.join(", "));
        Error::io("opening", uri, io::Error::new(ErrorKind::NotFound, what))
    })
}

/// Whether an address ends as those of files do, and hardly those of folders.
fn is_of_a_file(uri: &str) -> bool {
    const FILES: [&str; 7] = [".tensors", ".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"];
    uri.contains('?') || FILES.iter().any(|ending| uri.ends_with(ending))
}

fn open_below(
    prefix: &str,
    cancel: &dyn Cancel,
    is_missing: impl Fn(&Error) -> bool,
) -> Result<Option<Arc<dyn ReadAt>>> {
    if !["http://", "https://", "s3://"].iter().any(|scheme| prefix.starts_with(scheme)) {
        return Ok(None);
    }
    for name in IN_FOLDERS {
        match address::open(&format!("{prefix}/{name}"), cancel) {
            Err(error) if is_missing(&error) => {}
            opened => return opened.map(Some),
        }
    }
    Ok(None)
}
