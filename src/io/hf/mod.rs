//! `hf://org/repo[@revision][/path]`: files of Hugging Face's hub, all of the same commit, or the
//! copies of them that the hub's own client has downloaded.

mod address;
mod hub;
mod local_cache;

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use super::local::FileSource;
use super::{CachedHead, Fallback, HubChecksum, LocalCopy, OpenOptions, ReadAt, ServerFile, http};
use crate::cancel::Cancel;
use crate::environment::{HF_OFFLINE, OLD_OFFLINE};
use crate::error::{Error, Result};
use crate::format::shards::EXPECTED_MODEL_FILES;
use crate::stats::OLDER_COPY;
use address::HubAddress;
use hub::{Hub, HubResponse};
use local_cache::LocalCache;

/// True if the environment says that no request is made to the hub.
pub fn is_offline() -> bool {
    HF_OFFLINE.or(&OLD_OFFLINE).is_true()
}

/// Opens an address: a file, or the file of a folder or of the whole repository. Files whose heads
/// are cached are opened without a request.
pub fn open(uri: &str, options: &OpenOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let wanted = HubAddress::parse(uri)?;
    let repo = Arc::new(Repo {
        local: LocalCache::from_environment(),
        offline: is_offline(),
        hub: OnceLock::new(),
        fallback: Fallback::default(),
        options: options.clone(),
    });
    let found = repo.find(&wanted, cancel)?;
    repo.open(&found, options.first, cancel)
}

/// A repository, and the sources of its files.
struct Repo {
    local: LocalCache,
    offline: bool,
    /// None until the hub was contacted.
    hub: OnceLock<Hub>,
    /// The reason why a local copy is used that may not be the newest.
    fallback: Fallback,
    options: OpenOptions,
}

impl Repo {
    fn hub(&self) -> Result<&Hub> {
        if let Some(hub) = self.hub.get() {
            return Ok(hub);
        }
        let hub = Hub::from_environment(self.options.transport.clone())?;
        Ok(self.hub.get_or_init(|| hub))
    }

    /// The file that an address names, at the present commit of its revision.
    fn find(&self, wanted: &HubAddress, cancel: &dyn Cancel) -> Result<HubAddress> {
        let candidates = wanted.candidates();
        let mut commit = if wanted.is_pinned() {
            Some(wanted.revision.clone())
        } else if self.offline || self.cache_offline() {
            if !self.offline {
                self.note_copy(wanted, "TENSORIZER_CACHE_OFFLINE is set");
            }
            Some(self.copied_commit(wanted).ok_or_else(|| self.not_cached(wanted))?)
        } else {
            self.commit_of_cached_heads(wanted)
        };
        if let Some(found) = self.find_cached(commit.as_deref(), &candidates) {
            return Ok(found);
        }
        if self.offline || self.cache_offline() {
            return Err(self.not_cached(wanted));
        }
        let cached_commit = self.copied_commit(wanted).filter(|_| commit.is_none());
        let copy = self.find_cached(cached_commit.as_deref(), &candidates);
        for candidate in &candidates {
            let address =
                commit.as_deref().map_or_else(|| candidate.clone(), |c| candidate.at_commit(c));
            let copy = copy.as_ref().filter(|_| commit.is_none());
            let response = match self.ask(&address, copy, cancel)? {
                ControlFlow::Continue(response) => response,
                ControlFlow::Break(copy) => return Ok(copy),
            };
            if commit.is_none() && response.commit.is_some() {
                commit = response.commit;
                if let (Some(cache), Some(commit)) = (&self.options.cache, &commit) {
                    cache.note(self.hub()?.url(wanted).as_str(), commit);
                }
                if let Some(found) = self.find_cached(commit.as_deref(), &candidates) {
                    return Ok(found);
                }
            }
            match &commit {
                Some(commit) if response.exists => return Ok(candidate.at_commit(commit)),
                None if response.exists => {
                    let what = "the server's response has no X-Repo-Commit header, so it is not a \
                                Hugging Face hub: check HF_ENDPOINT";
                    let (uri, kind) = (address.display_address(), ErrorKind::InvalidData);
                    return Err(Error::failed("asking for", &uri, kind, what));
                }
                _ => {}
            }
        }
        let what = match &candidates[..] {
            [only] => format!("there is no file {}", only.path),
            _ if wanted.path.is_empty() => format!("there is none of {EXPECTED_MODEL_FILES}"),
            _ => format!(
                "there is no file {}, nor a folder with any of {EXPECTED_MODEL_FILES}",
                wanted.path
            ),
        };
        Err(Error::failed("opening", &wanted.display_address(), ErrorKind::NotFound, what))
    }

    /// Asks the hub about a file; or ends with the copy, if the hub cannot be reached, or refuses the
    /// token, which may have expired.
    fn ask(
        &self,
        address: &HubAddress,
        copy: Option<&HubAddress>,
        cancel: &dyn Cancel,
    ) -> Result<ControlFlow<HubAddress, HubResponse>> {
        let response = self.hub()?.ask(address, copy.is_some(), cancel);
        let refuses_token = response.as_ref().is_ok_and(|response| response.refuses_token);
        let is_unreachable = response.as_ref().is_err_and(http::is_unreachable);
        match (response.and_then(HubResponse::into_result), copy) {
            (Err(error), Some(copy)) if is_unreachable || refuses_token => {
                let why = format!(
                    "{OLDER_COPY} of Hugging Face's client is used, which may not be the newest: {error}"
                );
                *self.fallback.lock() = refuses_token.then_some(why);
                if self.local.file(copy).is_none() {
                    self.note_copy(copy, &error.to_string());
                }
                Ok(ControlFlow::Break(copy.clone()))
            }
            (response, _) => response.map(ControlFlow::Continue),
        }
    }

    /// Notes that a copy in our cache is used, and the reason.
    fn note_copy(&self, file: &HubAddress, why: &str) {
        let file = file.display_address();
        *self.fallback.lock() =
            Some(format!("{OLDER_COPY} of `{file}` is used, which may not be current: {why}"));
    }

    fn cache_offline(&self) -> bool {
        self.options.cache.as_ref().is_some_and(|cache| cache.is_offline)
    }

    /// The commit of the copies that can be used in place of the newest files: in the cache of
    /// Hugging Face's client or, if the options allow that, in ours.
    fn copied_commit(&self, wanted: &HubAddress) -> Option<String> {
        let in_cache = || {
            let cache = self.options.cache.as_ref();
            let cache = cache.filter(|cache| cache.is_offline || cache.stale_if_error)?;
            let noted = cache.noted(self.hub().ok()?.url(wanted).as_str());
            noted.filter(|commit| address::is_commit(commit))
        };
        self.local.commit(wanted).or_else(in_cache)
    }

    /// The commit at which another process has opened the repository for this one.
    fn commit_of_cached_heads(&self, wanted: &HubAddress) -> Option<String> {
        let addresses = self.options.cached_heads.keys();
        addresses.filter_map(|address| HubAddress::parse(address).ok()).find_map(|address| {
            let is_same = address.repo == wanted.repo && address.is_pinned();
            is_same.then_some(address.revision)
        })
    }

    /// The first file of a commit that can be opened without a request.
    fn find_cached(&self, commit: Option<&str>, candidates: &[HubAddress]) -> Option<HubAddress> {
        let addresses = candidates.iter().map(|address| Some(address.at_commit(commit?)));
        let addresses: Vec<HubAddress> = addresses.collect::<Option<_>>()?;
        let has_cached_head = |address: &&HubAddress| {
            self.options.cached_heads.contains_key(&address.display_address())
        };
        let has_copy =
            |address| self.hub().is_ok_and(|hub| http::has_copy(&self.options, &hub.url(address)));
        let downloaded = || {
            addresses.iter().find(|address| self.local.file(address).is_some() || has_copy(address))
        };
        addresses.iter().find(has_cached_head).or_else(downloaded).cloned()
    }

    fn not_cached(&self, wanted: &HubAddress) -> Error {
        let what = if self.offline {
            "HF_HUB_OFFLINE is set, and it is not in the cache of Hugging Face's client"
        } else {
            "TENSORIZER_CACHE_OFFLINE is set, and the cache has no copy"
        };
        Error::failed("opening", &wanted.display_address(), ErrorKind::NotFound, what)
    }

    /// Opens a file of a commit.
    fn open(
        self: &Arc<Self>,
        address: &HubAddress,
        first: Option<u64>,
        cancel: &dyn Cancel,
    ) -> Result<Arc<dyn ReadAt>> {
        let uri = address.display_address();
        if let Some(path) = self.local.file(address) {
            let file = crate::sys::open_nonblocking(&path);
            let file = file.map_err(|e| Error::io("opening", &path.display().to_string(), e))?;
            let source = FileSource::new(file, uri.clone())?;
            // It names the commit and has no validators, because no server was contacted.
            let len = source.facts().len.unwrap_or(0);
            let head = CachedHead { uri, len, ..CachedHead::default() };
            let path = path.canonicalize().unwrap_or(path);
            let server = ServerFile {
                head: Some(head),
                local_copy: Some(LocalCopy { path, discard: None }),
                ..self.hub_file(address, true)
            };
            return Ok(Arc::new(source.of_server(server)));
        }
        let hub = self.hub()?;
        if self.offline && !http::has_copy(&self.options, &hub.url(address)) {
            return Err(self.not_cached(address));
        }
        let options = OpenOptions { transport: hub.options.clone(), first, ..self.options.clone() };
        let hub_file = Some(self.hub_file(address, false));
        http::open_as(hub.url(address), uri, hub_file, &options, cancel)
    }

    /// The requests to the hub about a file of a commit. `is_copy`: the local copy is read.
    fn hub_file(self: &Arc<Self>, address: &HubAddress, is_copy: bool) -> ServerFile {
        let (repo, from) = (Arc::clone(self), address.clone());
        let (asked, file) = (Arc::clone(self), address.clone());
        ServerFile {
            open_sibling: Some(Arc::new(move |name, first, cancel| {
                repo.open(&from.sibling(name), first, cancel).map(Some)
            })),
            checksum: Some(Arc::new(move |cancel| asked.checksum(&file, is_copy, cancel))),
            fallback: Arc::clone(&self.fallback),
            ..ServerFile::default()
        }
    }

    /// The checksum that the hub publishes of a file of a commit.
    fn checksum(
        &self,
        address: &HubAddress,
        is_copy: bool,
        cancel: &dyn Cancel,
    ) -> Result<HubChecksum> {
        let tag = self.local.tag(address).filter(|_| is_copy);
        match tag.map(|tag| (hub::sha256_of_tag(&tag), tag.len())) {
            Some((found @ HubChecksum::Sha256(_), _)) => Ok(found),
            // The hash of a file in git itself.
            Some((_, 40)) => Ok(HubChecksum::NotSha256),
            _ if self.offline => Ok(HubChecksum::Offline),
            _ => Ok(self.hub()?.ask(address, false, cancel)?.into_result()?.checksum),
        }
    }
}
