//! Sources and sinks of bytes, and one transport under those of servers.
//!
//! ```text
//! uri                                     opens and creates what an address or a path names
//! hf, object, redis                       the hub, objects of S3, Google and Azure, Redis
//! http, cache                             ranges of HTTP servers, and the cache of what came
//! local                                   files, pipes, direct reads, replacement of files
//! auth                                    credentials, by the providers of libraries
//! transport                               clients, sending, retries, TLS, redirects
//! read_at, write_at, stream, ...          the interfaces, which know none of the above
//! ```
#![cfg_attr(
    not(all(feature = "clouds", feature = "hf", feature = "redis", feature = "s3")),
    allow(dead_code, unused_imports, unused_variables) // Each kind of address uses a part of the others.
)]

#[cfg(any(feature = "clouds", feature = "s3"))]
pub(crate) mod auth;
pub mod cache;
mod cached_head;
mod closed;
#[cfg(feature = "hf")]
pub mod hf;
#[cfg(feature = "http")]
pub(crate) mod http;
mod inflated;
pub mod local;
mod memory;
#[cfg(any(feature = "clouds", feature = "s3"))]
pub mod object;
mod options;
mod pin;
mod pinned;
mod prefixed;
mod read_at;
#[cfg(feature = "redis")]
mod redis;
mod save_order;
mod stream;
#[cfg(any(feature = "http", feature = "redis"))]
pub mod transport;
pub mod uri;
mod write_at;

pub use cached_head::{CachedHead, CachedHeads};
pub use closed::{ClosedSource, closed_error};
pub use inflated::{DeflatedRecord, InflatedSource};
pub use memory::MemorySource;
#[cfg(feature = "s3")]
pub use object::s3::S3Cfg;
pub use options::{OpenOptions, S3Options};
pub use pin::{HubPins, Pin};
pub use pinned::{PinnedSource, agree, compare_all};
pub use prefixed::PrefixedSource;
pub use read_at::{
    AnnounceRead, Capabilities, ConnectionLimit, DiscardCopy, Facts, Fallback, HubChecksum,
    LocalCopy, OpenSibling, ReadAt, RequestChecksum, ServerFile, SourceIdentity, WantedRead,
    as_refs, read_exact_at,
};
pub use stream::{Stream, StreamSource};
pub use write_at::{Ending, Published, Reservation, SinkFacts, WriteAt, write_all_at};
