//! The client of services that issue credentials.

use std::io::ErrorKind;

use super::proxies::is_of_machine;
use super::{Client, ClientConfig, Failure, HTTP2_WINDOW, TransportOptions};

/// Makes a client of the transport for each request for credentials, of which there are few.
#[derive(Debug, Clone)]
pub struct CredentialClient {
    pub options: TransportOptions,
}

impl CredentialClient {
    /// A client with the options of a source or sink, except their headers and certificates.
    /// `trust_settings`: the settings that name certificates, for messages.
    pub fn new(options: &TransportOptions, trust_settings: &'static str) -> Self {
        let (headers, trust) = (Vec::new(), options.credential_trust.clone());
        let options = TransportOptions { headers, trust, trust_settings, ..options.clone() };
        CredentialClient { options }
    }

    /// A client for a request to a host. Services of the machine are asked without a proxy.
    pub fn connect(&self, host: &str, tls: bool) -> Result<Client, Failure> {
        let config = ClientConfig::new(&self.options, tls)
            .map_err(|what| Failure::permanent(ErrorKind::InvalidInput, what))?;
        config.build(HTTP2_WINDOW, !is_of_machine(host))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::io::transport::Trust;

    #[test]
    fn certificates_and_headers_of_the_call_are_not_for_credentials() {
        let mut options = TransportOptions::from_environment().unwrap();
        options.trust = Trust::Anything;
        options.headers.push(("authorization".to_owned(), "of the call".to_owned()));
        let client = CredentialClient::new(&options, "AWS_CA_BUNDLE");
        assert_eq!(client.options.trust, Trust::Default);
        assert!(client.options.headers.is_empty());
    }
}
