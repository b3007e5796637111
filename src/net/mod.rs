//! What all servers have in common: options, tries, and the threads' connections.

mod lanes;
mod options;
mod retry;

pub(crate) use lanes::{Lane, Lanes};
pub use options::{NetOptions, Trust, VARIABLES};
pub(crate) use retry::{Failure, Retry};

/// An address as messages show it: queries, fragments and users may be secrets.
pub(crate) fn show(url: &url::Url) -> String {
    let mut url = url.clone();
    let query = url.query().is_some();
    url.set_query(None);
    url.set_fragment(None);
    // Neither can fail for addresses that have a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    if query { format!("{url}?...") } else { url.to_string() }
}

/// The same for what is not an address.
pub(crate) fn show_text(address: &str) -> &str {
    let address = address.split(['?', '#']).next().unwrap_or_default();
    if address.contains('@') { "..." } else { address }
}
