//! The cache of Hugging Face's own client. It is read, and never changed.

use std::fs;
use std::path::PathBuf;

use super::address::{HubAddress, is_commit};
use crate::environment::{HF_CACHE, HF_HOME, OLD_CACHE, XDG_CACHE, home};

/// The folder in which that client stores its files.
pub fn hf_home() -> Option<PathBuf> {
    HF_HOME.expanded().or_else(|| {
        let caches = XDG_CACHE.expanded().or_else(|| Some(home()?.join(".cache")))?;
        Some(caches.join("huggingface"))
    })
}

/// Files of the cache: `models--org--name` has a file for each branch in `refs`, which names a
/// commit, and in `snapshots` a folder for each commit, with links to the files of `blobs`.
pub struct LocalCache(Option<PathBuf>);

impl LocalCache {
    /// The cache that the environment names.
    pub fn from_environment() -> Self {
        LocalCache(HF_CACHE.or(&OLD_CACHE).expanded().or_else(|| Some(hf_home()?.join("hub"))))
    }

    fn folder(&self, address: &HubAddress) -> Option<PathBuf> {
        Some(self.0.as_ref()?.join(format!("models--{}", address.repo.replace('/', "--"))))
    }

    /// The commit that a branch or tag pointed to.
    pub fn commit(&self, address: &HubAddress) -> Option<String> {
        let found = fs::read(self.folder(address)?.join("refs").join(&address.revision)).ok()?;
        let commit = String::from_utf8(found).ok()?.trim().to_owned();
        is_commit(&commit).then_some(commit)
    }

    /// A file of a commit.
    pub fn file(&self, address: &HubAddress) -> Option<PathBuf> {
        let snapshot = self.folder(address)?.join("snapshots").join(&address.revision);
        Some(snapshot.join(&address.path)).filter(|path| address.is_pinned() && path.is_file())
    }

    /// The hub's hash of a file: the name of the file to which it links.
    pub fn tag(&self, address: &HubAddress) -> Option<String> {
        let blob = fs::read_link(self.file(address)?).ok()?;
        Some(blob.file_name()?.to_str()?.to_owned())
    }
}
