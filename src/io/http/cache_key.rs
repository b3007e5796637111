//! The key of a file in the cache: its address without signatures and other secrets.

use url::Url;

/// Query fields that name a version of a file: of S3, Google and Azure.
const VERSIONS: [&str; 3] = ["versionId", "generation", "versionid"];
/// Beginnings of the query fields with which S3 and Google sign.
const SIGNING: [&str; 2] = ["x-amz-", "x-goog-"];
/// Query fields of a shared access signature of Azure.
const AZURE: [&str; 17] = [
    "sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sig", "sr", "skoid", "sktid", "skt", "ske",
    "sks", "skv", "saoid",
];
/// Query fields of the older signatures of S3, of CloudFront and of Google, and of their signers.
const OLDER: [&str; 3] = ["expires", "signature", "policy"];
const OLDER_SIGNERS: [&str; 3] = ["awsaccesskeyid", "googleaccessid", "key-pair-id"];

/// The cache key of an address. None if the query has unknown fields, which may be secrets or may
/// select the file.
pub fn cache_key(address: &Url) -> Option<String> {
    let has = |name: &str| address.query_pairs().any(|(key, _)| key.eq_ignore_ascii_case(name));
    // Short field names are part of a signature only in these combinations.
    let azure = has("sig") && has("sv");
    let older = has("signature") && OLDER_SIGNERS.iter().any(|key| has(key));
    let is_signature = |key: &str| {
        let key = key.to_ascii_lowercase();
        SIGNING.iter().any(|begin| key.starts_with(begin))
            || (azure && AZURE.contains(&&*key))
            || (older && (OLDER.contains(&&*key) || OLDER_SIGNERS.contains(&&*key)))
    };
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    for (key, value) in address.query_pairs() {
        match &*key {
            key if VERSIONS.contains(&key) => drop(query.append_pair(key, &value)),
            other if is_signature(other) => {}
            _ => return None,
        }
    }
    Some(format!("{}?{}", without_secrets(address), query.finish()))
}

/// The address without query, fragment, user and password.
pub fn without_secrets(address: &Url) -> Url {
    let mut url = address.clone();
    url.set_query(None);
    url.set_fragment(None);
    // Neither can fail for addresses that have a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url
}

/// True if the address states a version of its file.
pub fn is_version(address: &Url) -> bool {
    address.query_pairs().any(|(key, _)| VERSIONS.contains(&&*key))
}
