//! The folder of a source, in which the files that an index of shards names are opened.

use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::FileSource;
use crate::error::{Error, Result};
use crate::io::{OpenSibling, ReadAt, SourceIdentity};
use crate::sys::file_stamp;

/// Finds the folder of a source, without links. Returns a function that opens files of this folder
/// with the same options, None if the source has no folder; and the identities of the files of
/// these names in it, none where these would take requests.
pub fn siblings(
    source: &dyn ReadAt,
    names: &[String],
) -> Result<(Option<OpenSibling>, Vec<Option<SourceIdentity>>)> {
    let facts = source.facts();
    if let Some(server) = &facts.server {
        return Ok((server.open_sibling.clone(), Vec::new()));
    }
    let parts = facts.path.as_ref().and_then(|path| path.parent().zip(path.file_name()));
    let (Some(file), Some((parent, own_name))) = (source.file(), parts) else {
        return Ok((None, Vec::new()));
    };
    // The second folder is the right one if a link in the path has changed since the opening.
    let opened = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let opened = opened.ok().and_then(|path| path.parent().map(Path::to_owned));
    let identity_of = |path: PathBuf| file_stamp(&path).map(SourceIdentity::Local);
    for folder in [std::fs::canonicalize(parent).ok(), opened].into_iter().flatten() {
        let found = names.iter().map(|name| identity_of(folder.join(name))).collect();
        // Last, so that a folder that was exchanged meanwhile is noticed.
        if identity_of(folder.join(own_name)) == facts.identity {
            let uri = PathBuf::from(&facts.uri);
            let open: OpenSibling = Arc::new(move |name, _, _| {
                let uri = uri.with_file_name(name).display().to_string();
                Ok(Some(Arc::new(FileSource::open_shard(&folder.join(name), uri)?)))
            });
            return Ok((Some(open), found));
        }
    }
    let what = "it was replaced while it was opened: open it again";
    Err(Error::failed("opening", &facts.uri, ErrorKind::InvalidData, what))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::cancel::Never;
    use crate::mem::Buffers;

    /// Two folders with an index and a shard each, and a link to the first one.
    fn two_versions() -> tempfile::TempDir {
        let top = tempfile::tempdir().unwrap();
        for version in ["v1", "v2"] {
            fs::create_dir(top.path().join(version)).unwrap();
            fs::write(top.path().join(version).join("index"), "{}").unwrap();
            fs::write(top.path().join(version).join("shard"), version).unwrap();
        }
        symlink("v1", top.path().join("current")).unwrap();
        top
    }

    fn flip(top: &Path) {
        symlink("v2", top.join("next")).unwrap();
        fs::rename(top.join("next"), top.join("current")).unwrap();
    }

    #[test]
    fn siblings_are_those_beside_the_opened_file() {
        // The link changes before the siblings are examined, or after that.
        for is_early in [true, false] {
            let top = two_versions();
            let index = FileSource::open(&top.path().join("current/index")).unwrap();
            if is_early {
                flip(top.path());
            }
            let names = ["shard".to_owned(), "missing".to_owned()];
            let (folder, found) = siblings(&index, &names).unwrap();
            flip(top.path());
            let shard = folder.unwrap()("shard", None, &Never).unwrap().unwrap();
            let mut bytes = [0; 2];
            shard.read_at(0, &mut Buffers::from_slice(&mut bytes), &Never).unwrap();
            assert_eq!(&bytes, b"v1");
            assert_eq!(found, [shard.facts().identity.clone(), None]);
            assert!(found.first().is_some_and(Option::is_some));
            assert!(shard.uri().ends_with("current/shard"));
        }
    }

    #[test]
    fn replaced_file_has_no_siblings() {
        let top = two_versions();
        let index = FileSource::open(&top.path().join("v1/index")).unwrap();
        fs::rename(top.path().join("v1"), top.path().join("old")).unwrap();
        fs::rename(top.path().join("v2"), top.path().join("v1")).unwrap();
        // The kernel knows the new name of the folder of the open file.
        let names = ["shard".to_owned()];
        siblings(&index, &names).unwrap();
        fs::write(top.path().join("old/other"), "{}").unwrap();
        fs::rename(top.path().join("old/other"), top.path().join("old/index")).unwrap();
        let error = siblings(&index, &names).err().unwrap().to_string();
        assert!(error.contains("it was replaced while it was opened: open it again"), "{error}");
    }
}
