//! The server of `s3://` addresses: the table of `docs/reference/addresses/s3.md`.

/// The keys that the call, or its `.s3cfg`, states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatedKeys {
    None,
    /// Two empty keys: requests are anonymous.
    Empty,
    Both,
}

/// The keys of the call or its `.s3cfg`, each None if it is not stated. The error names the missing
/// one.
pub fn stated_keys(access: Option<&str>, secret: Option<&str>) -> Result<StatedKeys, String> {
    let missing = match (access, secret) {
        (None, None) => return Ok(StatedKeys::None),
        (Some(""), Some("")) => return Ok(StatedKeys::Empty),
        (Some(""), _) | (None, _) => "s3_access_key_id= (or access_key of .s3cfg)",
        (_, Some("")) | (_, None) => "s3_secret_access_key= (or secret_key of .s3cfg)",
        _ => return Ok(StatedKeys::Both),
    };
    Err(format!("half a pair of keys was given: {missing} is missing"))
}

/// The settings that determine the server of a bucket.
#[derive(Debug, Clone, Copy)]
pub struct KnownSettings<'k> {
    /// True if an argument, a file or the environment names an endpoint.
    pub has_endpoint: bool,
    /// True if the call states a region.
    pub has_region: bool,
    pub keys: StatedKeys,
    /// A setting of AWS in the environment or the profile.
    pub aws_sign: Option<&'k str>,
    /// True if AWS's chain has credentials. It is asked only without stated keys.
    pub chain_has_credentials: bool,
    pub bucket: &'k str,
    /// True for reading.
    pub reads: bool,
}

/// The server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerChoice {
    /// The endpoint that is named.
    Endpoint,
    Aws,
    /// The default of tensorizer 2.
    OldDefault,
}

/// The public bucket that tensorizer 2 read without settings.
const PUBLIC_BUCKET: &str = "tensorized";

/// Chooses the server. The error says what has to be stated.
pub fn choose(known: KnownSettings<'_>) -> Result<ServerChoice, String> {
    let is_public = known.bucket == PUBLIC_BUCKET && known.reads && !known.chain_has_credentials;
    match known.keys {
        _ if known.has_endpoint => Ok(ServerChoice::Endpoint),
        _ if known.has_region => Ok(ServerChoice::Aws),
        StatedKeys::Both => match known.aws_sign {
            None => Ok(ServerChoice::OldDefault),
            Some(sign) => Err(format!(
                "access keys were given without a server, and {sign} is set, so that they may be \
                 of AWS or of another server: give s3_endpoint= (or host_base in .s3cfg) for that \
                 server, or s3_region_name= for AWS"
            )),
        },
        StatedKeys::None | StatedKeys::Empty if is_public => Ok(ServerChoice::OldDefault),
        StatedKeys::None | StatedKeys::Empty => Ok(ServerChoice::Aws),
    }
}

#[cfg(test)]
mod tests {
    use super::StatedKeys::{Both, Empty, None as Nothing};
    use super::*;

    const KNOWN: KnownSettings<'_> = KnownSettings {
        has_endpoint: false,
        has_region: false,
        keys: Nothing,
        aws_sign: None,
        chain_has_credentials: false,
        bucket: "bucket",
        reads: true,
    };

    /// The table of `docs/reference/addresses/s3.md`.
    #[test]
    fn settings_determine_the_server() {
        use ServerChoice::{Aws, Endpoint, OldDefault};
        let sign = Some("AWS_PROFILE");
        for (known, server) in [
            (KnownSettings { has_endpoint: true, ..KNOWN }, Some(Endpoint)),
            (
                KnownSettings {
                    has_endpoint: true,
                    has_region: true,
                    keys: Both,
                    aws_sign: sign,
                    ..KNOWN
                },
                Some(Endpoint),
            ),
            (KnownSettings { has_endpoint: true, bucket: "tensorized", ..KNOWN }, Some(Endpoint)),
            (KnownSettings { has_region: true, ..KNOWN }, Some(Aws)),
            (KnownSettings { has_region: true, keys: Both, ..KNOWN }, Some(Aws)),
            (KnownSettings { has_region: true, keys: Both, aws_sign: sign, ..KNOWN }, Some(Aws)),
            (KnownSettings { has_region: true, bucket: "tensorized", ..KNOWN }, Some(Aws)),
            (KnownSettings { keys: Both, ..KNOWN }, Some(OldDefault)),
            (KnownSettings { keys: Both, reads: false, ..KNOWN }, Some(OldDefault)),
            (KnownSettings { keys: Both, aws_sign: sign, ..KNOWN }, None),
            (KnownSettings { keys: Both, aws_sign: sign, bucket: "tensorized", ..KNOWN }, None),
            (KnownSettings { chain_has_credentials: true, ..KNOWN }, Some(Aws)),
            (
                KnownSettings { chain_has_credentials: true, bucket: "tensorized", ..KNOWN },
                Some(Aws),
            ),
            (KNOWN, Some(Aws)),
            (KnownSettings { keys: Empty, aws_sign: sign, ..KNOWN }, Some(Aws)),
            (KnownSettings { aws_sign: sign, ..KNOWN }, Some(Aws)),
            (KnownSettings { bucket: "tensorized", ..KNOWN }, Some(OldDefault)),
            (KnownSettings { bucket: "tensorized", keys: Empty, ..KNOWN }, Some(OldDefault)),
            (KnownSettings { bucket: "tensorized", reads: false, ..KNOWN }, Some(Aws)),
        ] {
            let found = choose(known);
            assert_eq!(found.clone().ok(), server, "{known:?}");
            if let Err(what) = found {
                for part in ["AWS_PROFILE", "s3_endpoint=", "s3_region_name="] {
                    assert!(what.contains(part), "{what}");
                }
            }
        }
    }

    #[test]
    fn half_a_pair_is_refused_by_the_name_of_the_missing_key() {
        assert_eq!(stated_keys(None, None), Ok(Nothing));
        assert_eq!(stated_keys(Some(""), Some("")), Ok(Empty));
        assert_eq!(stated_keys(Some("k"), Some("s")), Ok(Both));
        for (access, secret, missing) in [
            (Some("k"), None, "s3_secret_access_key="),
            (Some("k"), Some(""), "s3_secret_access_key="),
            (None, Some("s"), "s3_access_key_id="),
            (Some(""), Some("s"), "s3_access_key_id="),
            (Some(""), None, "s3_access_key_id="),
        ] {
            assert!(stated_keys(access, secret).unwrap_err().contains(missing));
        }
    }
}
