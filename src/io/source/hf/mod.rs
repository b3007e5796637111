//! `hf://org/repo[@revision][/path]`: files of Hugging Face's hub, all of one commit, or of what its
//! own client has downloaded of it.

mod ask;
mod local;
mod place;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::{FileSource, KnownHead, KnownHeads, Published, ReadAt, Traits, http};
use crate::cancel::Cancel;
use crate::environment::{HF_OFFLINE, OLD_OFFLINE};
use crate::error::{Error, Result};
use crate::io::net::NetOptions;
use crate::mem::Buffers;
use crate::memory_limit::MemoryLimit;
use ask::Hub;
use local::Local;
use place::Place;

/// Opens an address: a file, or what is found in a folder or in the whole repository. Files of which
/// the heads are known are opened without a request.
pub fn open(
    uri: &str,
    options: NetOptions,
    known: &KnownHeads,
    cancel: &dyn Cancel,
) -> Result<Arc<dyn ReadAt>> {
    let wanted = Place::parse(uri)?;
    let repo = Arc::new(Repo {
        local: Local::from_environment(),
        offline: HF_OFFLINE.or(&OLD_OFFLINE).is_true(),
        hub: OnceLock::new(),
        options,
        known: known.clone(),
    });
    let found = repo.find(&wanted, cancel)?;
    repo.open(&found, cancel)
}

/// Where files of a repository come from.
struct Repo {
    local: Local,
    offline: bool,
    /// Not looked for where nothing is asked.
    hub: OnceLock<Hub>,
    options: NetOptions,
    known: KnownHeads,
}

impl Repo {
    fn hub(&self) -> Result<&Hub> {
        if let Some(hub) = self.hub.get() {
            return Ok(hub);
        }
        let hub = Hub::from_environment(self.options.clone())?;
        Ok(self.hub.get_or_init(|| hub))
    }

    /// The file that an address names, at the commit that its revision is at now.
    fn find(&self, wanted: &Place, cancel: &dyn Cancel) -> Result<Place> {
        let candidates = wanted.candidates();
        let mut commit = if wanted.is_pinned() {
            Some(wanted.revision.clone())
        } else if self.offline {
            Some(self.local.commit(wanted).ok_or_else(|| self.not_here(wanted))?)
        } else {
            self.known_commit(wanted)
        };
        if let Some(found) = self.without_asking(commit.as_deref(), &candidates) {
            return Ok(found);
        }
        if self.offline {
            return Err(self.not_here(wanted));
        }
        let kept = self.local.commit(wanted).filter(|_| commit.is_none());
        for candidate in &candidates {
            let place = commit.as_deref().map_or_else(|| candidate.clone(), |c| candidate.at(c));
            let soon = kept.is_some() && commit.is_none();
            let said = match self.hub()?.ask(&place, soon, cancel) {
                Err(error) if soon && is_unreachable(&error) => {
                    let found = self.without_asking(kept.as_deref(), &candidates);
                    return found.ok_or(error);
                }
                said => said?.granted()?,
            };
            if commit.is_none() && said.commit.is_some() {
                commit = said.commit;
                if let Some(found) = self.without_asking(commit.as_deref(), &candidates) {
                    return Ok(found);
                }
            }
            match &commit {
                Some(commit) if said.here => return Ok(candidate.at(commit)),
                None if said.here => {
                    let what = "its server names no commit of it, as Hugging Face's hub does: check \
                                HF_ENDPOINT";
                    let error = io::Error::new(ErrorKind::InvalidData, what);
                    return Err(Error::io("asking for", &place.show(), error));
                }
                _ => {}
            }
        }
        let names: Vec<&str> = candidates.iter().map(|place| place.path.as_str()).collect();
        let what = format!("there is no file {}", names.join(", nor "));
        Err(Error::io("opening", &wanted.show(), io::Error::new(ErrorKind::NotFound, what)))
    }

    /// The commit at which another process has opened the repository for this one.
    fn known_commit(&self, wanted: &Place) -> Option<String> {
        let places = self.known.addresses().filter_map(|address| Place::parse(address).ok());
        let mut same = places.filter(|place| place.repo == wanted.repo && place.is_pinned());
        same.next().map(|place| place.revision)
    }

    /// The first file of a commit that can be opened without a request.
    fn without_asking(&self, commit: Option<&str>, candidates: &[Place]) -> Option<Place> {
        let places = candidates.iter().map(|place| Some(place.at(commit?)));
        let places: Vec<Place> = places.collect::<Option<_>>()?;
        let is_known = |place: &&Place| self.known.of(&place.show()).is_some();
        let is_here = |place: &&Place| self.local.file(place).is_some();
        places.iter().find(is_known).or_else(|| places.iter().find(is_here)).cloned()
    }

    fn not_here(&self, wanted: &Place) -> Error {
        let what = "HF_HUB_OFFLINE is set, and it is not in the cache of Hugging Face's client";
        Error::io("opening", &wanted.show(), io::Error::new(ErrorKind::NotFound, what))
    }

    /// Opens a file of a commit.
    fn open(self: &Arc<Self>, place: &Place, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
        let shown = place.show();
        let (inner, here): (Arc<dyn ReadAt>, _) = match self.local.file(place) {
            Some(path) => {
                let file = crate::sys::open_at_once(&path);
                let file =
                    file.map_err(|e| Error::io("opening", &path.display().to_string(), e))?;
                (Arc::new(FileSource::new(file, shown)?), true)
            }
            None if self.offline => return Err(self.not_here(place)),
            None => {
                let hub = self.hub()?;
                let address = hub.url(place);
                (
                    http::open_as(address.as_str(), &shown, hub.options(), &self.known, cancel)?,
                    false,
                )
            }
        };
        Ok(Arc::new(HfSource { inner, here, place: place.clone(), repo: Arc::clone(self) }))
    }
}

/// Whether there was no answer, and not because nobody would believe it.
fn is_unreachable(error: &Error) -> bool {
    let others = [ErrorKind::PermissionDenied, ErrorKind::InvalidInput, ErrorKind::InvalidData];
    matches!(error, Error::Io { error, .. } if !others.contains(&error.kind()))
}

/// A file of a commit.
struct HfSource {
    inner: Arc<dyn ReadAt>,
    /// Whether it is a local file.
    here: bool,
    place: Place,
    repo: Arc<Repo>,
}

impl ReadAt for HfSource {
    fn uri(&self) -> &str {
        self.inner.uri()
    }

    fn traits(&self) -> Traits {
        self.inner.traits()
    }

    fn limit_memory(&self, limit: MemoryLimit) {
        self.inner.limit_memory(limit);
    }

    fn read_at(
        &self,
        offset: u64,
        buffers: &mut Buffers<'_>,
        cancel: &dyn Cancel,
    ) -> Result<usize> {
        self.inner.read_at(offset, buffers, cancel)
    }

    fn for_one_reader(&self) -> Option<Box<dyn ReadAt>> {
        self.inner.for_one_reader()
    }

    fn beside(&self, name: &str, cancel: &dyn Cancel) -> Result<Option<Arc<dyn ReadAt>>> {
        self.repo.open(&self.place.beside(name), cancel).map(Some)
    }

    fn headers(&self) -> &[(String, String)] {
        self.inner.headers()
    }

    fn known_head(&self) -> Option<KnownHead> {
        if !self.here {
            return self.inner.known_head();
        }
        // It names the commit, without saying by what a server would know the file.
        let len = self.inner.traits().len?;
        let (uri, first) = (self.uri().to_owned(), Arc::default());
        Some(KnownHead { uri, len, tag: None, modified: None, headers: Vec::new(), first })
    }

    fn is_of_hub(&self) -> bool {
        true
    }

    fn published(&self, cancel: &dyn Cancel) -> Result<Published> {
        let tag = self.repo.local.tag(&self.place).filter(|_| self.here);
        match tag.map(|tag| (ask::of_tag(&tag), tag.len())) {
            Some((found @ Published::Sha256(_), _)) => Ok(found),
            // The hash of what is in git itself.
            Some((_, 40)) => Ok(Published::Otherwise),
            _ if self.repo.offline => Ok(Published::NotAsked),
            _ => Ok(self.repo.hub()?.ask(&self.place, false, cancel)?.granted()?.published),
        }
    }

    fn copy(&self) -> Option<PathBuf> {
        let here = self.here.then(|| self.repo.local.file(&self.place)).flatten();
        here.map(|link| link.canonicalize().unwrap_or(link)).or_else(|| self.inner.copy())
    }

    fn file(&self) -> Option<&File> {
        self.inner.file()
    }
}
