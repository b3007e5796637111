//! How connections are encrypted: certificates are parsed once in a process, and sessions of a server
//! are known to all connections to it, which saves them half of the handshake.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::Trust;
use crate::environment::reading;
use crate::sys::process::{Maker, PerProcess};
use crate::sys::{Stamp, stamp};

/// Where the system's certificates are, if not where they usually are.
const SYSTEM: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];
/// Configurations that are kept.
const MOST_KNOWN: usize = 64;

/// Protocols that a server may choose from.
pub type Protocols = &'static [&'static [u8]];

/// A configuration that connections share.
#[derive(Debug, Clone)]
pub struct Tls {
    config: Arc<ClientConfig>,
    maker: Maker,
}

impl Tls {
    /// The configuration of this process; what is wrong with the certificates is the error. Those in
    /// files that have changed are read again.
    pub fn new(trust: &Trust, protocols: Protocols) -> Result<Self, String> {
        let stamps = stamps(trust)?;
        let known = || KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        let key = (trust.clone(), protocols);
        if let Some((_, tls)) = known().get(&key).filter(|(before, _)| *before == stamps) {
            return Ok(tls.clone());
        }
        // Read without the lock, which whoever holds the guard of the environment may wait for.
        let mut config = build(trust)?;
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let tls = Tls { config: Arc::new(config), maker: Maker::this() };
        let mut known = known();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(key, (stamps, tls.clone()));
        Ok(tls)
    }

    /// One that believes nobody.
    pub fn nobody() -> Result<Self, String> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
        let config = builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        Ok(Tls { config: Arc::new(config), maker: Maker::this() })
    }

    /// For one connection.
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::clone(&self.config);
        if !self.maker.is_here() {
            // The lock of the parent's sessions may have been held when this process was forked off.
            config.resumption = Resumption::default();
        }
        config
    }
}

/// Files as they were when they were read; None for those that were not there.
type Stamps = Vec<(PathBuf, Option<Stamp>)>;
type Known = HashMap<(Trust, Protocols), (Stamps, Tls)>;

static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();

fn stamps(trust: &Trust) -> Result<Stamps, String> {
    let mut files = trust.files()?;
    if *trust == Trust::System {
        let named = reading(|| SYSTEM.map(std::env::var_os));
        files.extend(named.into_iter().flatten().map(PathBuf::from));
    }
    let stamped = |path: PathBuf| {
        let found = stamp(&path);
        (path, found)
    };
    Ok(files.into_iter().map(stamped).collect())
}

/// The provider of cryptography that the program has chosen, or the one that is compiled in.
fn provider() -> Arc<CryptoProvider> {
    let chosen = CryptoProvider::get_default().map(Arc::clone);
    chosen.unwrap_or_else(|| Arc::new(ring::default_provider()))
}

fn build(trust: &Trust) -> Result<ClientConfig, String> {
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
    if *trust == Trust::Anything {
        let any = Arc::new(AnyCertificate(provider));
        let builder = builder.dangerous().with_custom_certificate_verifier(any);
        return Ok(builder.with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    for path in trust.files()? {
        let pem = std::fs::read(&path);
        let pem = pem.map_err(|e| format!("certificates of {}: {e}", path.display()))?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|e| format!("certificates of {trust:?}: {e}"))?;
            roots.add(certificate).map_err(|e| format!("certificates of {trust:?}: {e}"))?;
        }
    }
    if *trust == Trust::System {
        // Those that cannot be used are passed over, as by everybody.
        let found = reading(rustls_native_certs::load_native_certs);
        roots.add_parsable_certificates(found.certs);
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Believes every server, because its caller has asked for that.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_once_and_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        std::fs::write(&path, "").unwrap();
        let trust = Trust::File(path.clone());
        let config = |protocols| Tls::new(&trust, protocols).unwrap().config;
        let first = config(&[]);
        assert!(Arc::ptr_eq(&first, &config(&[])));
        assert!(!Arc::ptr_eq(&first, &config(&[b"h2"])));
        std::fs::write(&path, "# another\n").unwrap();
        assert!(!Arc::ptr_eq(&first, &config(&[])));
        std::fs::remove_file(&path).unwrap();
        assert!(Tls::new(&trust, &[]).unwrap_err().contains("ca.pem"));
        // The system's are not read for each connection.
        let system = || Tls::new(&Trust::System, &[]).unwrap().config;
        assert!(Arc::ptr_eq(&system(), &system()));
    }
}
