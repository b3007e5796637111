//! TLS configurations, cached per process: certificates are parsed once, and all connections to a
//! server resume its sessions, which saves half of a handshake.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::Trust;
use crate::environment::read_guarded;
use crate::sys::process::{OwnerProcess, PerProcess};
use crate::sys::sync::unpoisoned;
use crate::sys::{FileStamp, file_stamp};

/// The most configurations that are cached.
const MAX_CACHED: usize = 64;

/// The protocols that a server may choose from, as ALPN names them.
pub type AlpnProtocols = &'static [&'static [u8]];

/// A configuration that connections share.
#[derive(Debug, Clone)]
pub struct Tls {
    config: Arc<ClientConfig>,
    owner: OwnerProcess,
}

impl Tls {
    /// Returns the configuration of this process; certificates that have changed on the disk are
    /// read again. The error says what is wrong with them.
    pub fn new(trust: &Trust, protocols: AlpnProtocols) -> Result<Self, String> {
        let trust = trust.resolved();
        let stamps = stamps(&trust)?;
        let cached = || unpoisoned(CACHE.get().lock());
        let key = (trust.clone(), protocols);
        if let Some((_, tls)) = cached().get(&key).filter(|(before, _)| *before == stamps) {
            return Ok(tls.clone());
        }
        // Without the lock: `build` takes the environment's guard, whose holder may wait for it.
        let mut config = build(&trust)?;
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let tls = Tls { config: Arc::new(config), owner: OwnerProcess::current() };
        let mut cached = cached();
        if cached.len() >= MAX_CACHED {
            cached.clear();
        }
        cached.insert(key, (stamps, tls.clone()));
        Ok(tls)
    }

    /// A configuration without trusted roots.
    pub fn without_roots() -> Result<Self, String> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
        let config = builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        Ok(Tls { config: Arc::new(config), owner: OwnerProcess::current() })
    }

    /// The configuration of one connection.
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::clone(&self.config);
        if !self.owner.is_current() {
            // The lock of the parent's sessions may have been held at the fork.
            config.resumption = Resumption::default();
        }
        config
    }
}

/// Files and their state when they were read; None for a file that was missing.
type FileStamps = Vec<(PathBuf, Option<FileStamp>)>;
type TlsCache = HashMap<(Trust, AlpnProtocols), (FileStamps, Tls)>;

static CACHE: PerProcess<Mutex<TlsCache>> = PerProcess::new();

fn stamps(trust: &Trust) -> Result<FileStamps, String> {
    let stamped = |path: PathBuf| {
        let found = file_stamp(&path);
        (path, found)
    };
    Ok(trust.files_to_watch()?.into_iter().map(stamped).collect())
}

/// The cryptography provider that the program has installed, or the one that is compiled in.
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
        let failed = |e: &dyn std::fmt::Display| {
            with_source(trust, &format!("cannot use the certificates in {}: {e}", path.display()))
        };
        let pem = std::fs::read(&path).map_err(|e| failed(&e))?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|e| failed(&e))?;
            roots.add(certificate).map_err(|e| failed(&e))?;
        }
    }
    if let (Trust::Bundle { path, .. }, true) = (trust, roots.is_empty()) {
        let what = format!("{} has no certificates in PEM form", path.display());
        return Err(with_source(trust, &what));
    }
    if *trust == Trust::System {
        // Certificates that cannot be used are skipped, as by other clients.
        let found = read_guarded(rustls_native_certs::load_native_certs);
        if let Some(error) = found.errors.first().filter(|_| found.certs.is_empty()) {
            return Err(format!(
                "certificates of the system, or of SSL_CERT_FILE and SSL_CERT_DIR: {error}"
            ));
        }
        roots.add_parsable_certificates(found.certs);
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Appends the argument or variable that names the certificates to an error message.
fn with_source(trust: &Trust, what: &str) -> String {
    match trust {
        Trust::Bundle { named_by, .. } => format!("{what} ({named_by})"),
        _ => what.to_owned(),
    }
}

/// Accepts every certificate, because the caller has disabled verification.
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

    /// A certificate that signs itself.
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\n\
        MIIBbzCCARWgAwIBAgIUHzOe2Z+kuxagyMD3NB/iaDbfSMAwCgYIKoZIzj0EAwIw\n\
        DDEKMAgGA1UEAwwBdDAgFw0yNjExMjYwMzAwMThaGA8yMTI2MTEwMjAzMDAxOFow\n\
        DDEKMAgGA1UEAwwBdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABDu2otyaBegk\n\
        eOxWtRt2rCeLagIDJ1W9v/X/QyJmWl9N6HtL/dzkXXpVRasH6F/golvCYS+kYBDg\n\
        ddPZz/yFjJOjUzBRMB0GA1UdDgQWBBTjsoPRsLJmCzlcGQTPzdFOUT7rezAfBgNV\n\
        HSMEGDAWgBTjsoPRsLJmCzlcGQTPzdFOUT7rezAPBgNVHRMBAf8EBTADAQH/MAoG\n\
        CCqGSM49BAMCA0gAMEUCIESIBlAo+reu016bJ9sbCu9wTsvev2cs295BdMeuosqc\n\
        AiEA/SPL3sbVNHUUyyvn2YiBHOe2BOtgjKQM6zFWazjRjKs=\n\
        -----END CERTIFICATE-----\n";

    #[test]
    fn a_bundle_without_certificates_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        for content in ["", "# no certificate\n"] {
            std::fs::write(&path, content).unwrap();
            let error = Tls::new(&Trust::from_argument(path.clone()), &[]).unwrap_err();
            assert!(error.contains("ca.pem has no certificates in PEM form ("), "{error}");
        }
    }

    #[test]
    fn a_file_is_read_once_and_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        std::fs::write(&path, CERTIFICATE).unwrap();
        let trust = Trust::from_argument(path.clone());
        let config = |protocols| Tls::new(&trust, protocols).unwrap().config;
        let first = config(&[]);
        assert!(Arc::ptr_eq(&first, &config(&[])));
        assert!(!Arc::ptr_eq(&first, &config(&[b"h2"])));
        std::fs::write(&path, format!("# another\n{CERTIFICATE}")).unwrap();
        assert!(!Arc::ptr_eq(&first, &config(&[])));
        std::fs::remove_file(&path).unwrap();
        assert!(Tls::new(&trust, &[]).unwrap_err().contains("ca.pem"));
        // The system's are not read for each connection.
        let system = || Tls::new(&Trust::System, &[]).unwrap().config;
        assert!(Arc::ptr_eq(&system(), &system()));
    }
}
