//! TLS configurations, cached per process: certificates are parsed once, and all connections to a
//! server resume its sessions, which saves half of a handshake.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::Trust;
use super::certificate::{Trusted, Verifier};
use crate::environment::{CLIENT_CERT, CLIENT_KEY, read_guarded};
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
        let client = client_files()?;
        let stamps = stamps(&trust, client.as_ref())?;
        let cached = || unpoisoned(CACHE.get().lock());
        let key = (trust.clone(), protocols);
        if let Some((_, tls)) = cached().get(&key).filter(|(before, _)| *before == stamps) {
            return Ok(tls.clone());
        }
        // Without the lock: `build` takes the environment's guard, whose holder may wait for it.
        let mut config = build(&trust, client.as_ref())?;
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

/// The state of files when they were read, None for a file that was missing, and their paths.
type FileStamps = Vec<(Option<FileStamp>, PathBuf)>;
type TlsCache = HashMap<(Trust, AlpnProtocols), (FileStamps, Tls)>;

static CACHE: PerProcess<Mutex<TlsCache>> = PerProcess::new();

fn stamps(trust: &Trust, client: Option<&ClientFiles>) -> Result<FileStamps, String> {
    let files = trust.files_to_watch()?.into_iter().chain(client.into_iter().flatten().cloned());
    Ok(files.map(|path| (file_stamp(&path), path)).collect())
}

/// The cryptography provider that the program has installed, or the one that is compiled in.
fn provider() -> Arc<CryptoProvider> {
    let chosen = CryptoProvider::get_default().map(Arc::clone);
    chosen.unwrap_or_else(|| Arc::new(ring::default_provider()))
}

fn build(trust: &Trust, client: Option<&ClientFiles>) -> Result<ClientConfig, String> {
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
    let trusted = (*trust != Trust::Anything).then(|| trusted(trust)).transpose()?;
    let verifier = Verifier::new(trusted, &provider)?;
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let Some([certificate, key]) = client else { return Ok(builder.with_no_client_auth()) };
    let failed = |path: &Path, e: &dyn Display| {
        let settings = format!("{} and {}", CLIENT_CERT.name, CLIENT_KEY.name);
        format!("cannot use the client certificate in {}: {e} ({settings})", path.display())
    };
    let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect);
    let chain = chain.map_err(|e| failed(certificate, &e))?;
    let of_key = PrivateKeyDer::from_pem_file(key).map_err(|e| match e {
        pem::Error::NoItemsFound => failed(key, &"no private key in PEM form without a passphrase"),
        e => failed(key, &e),
    })?;
    builder.with_client_auth_cert(chain, of_key).map_err(|e| failed(certificate, &e))
}

/// The trusted certificates, and the authorities that they make.
fn trusted(trust: &Trust) -> Result<Trusted, String> {
    let mut roots = RootCertStore::empty();
    let Trust::Bundle { path, named_by } = trust else {
        // Certificates that cannot be used are skipped, as by other clients.
        let found = read_guarded(rustls_native_certs::load_native_certs);
        if let Some(error) = found.errors.first().filter(|_| found.certs.is_empty()) {
            return Err(format!(
                "certificates of the system, or of SSL_CERT_FILE and SSL_CERT_DIR: {error}"
            ));
        }
        roots.add_parsable_certificates(found.certs.iter().cloned());
        if roots.is_empty() {
            let how = "install those of its system (ca-certificates), or name a PEM file by \
                       certificate_handling, REQUESTS_CA_BUNDLE or SSL_CERT_FILE";
            return Err(format!("this machine trusts no certificates: {how}"));
        }
        return Ok((found.certs, roots));
    };
    let mut trusted = Vec::new();
    for path in trust.files()? {
        let failed = |e: &dyn Display| {
            format!("cannot use the certificates in {}: {e} ({named_by})", path.display())
        };
        let pem = std::fs::read(&path).map_err(|e| failed(&e))?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|e| failed(&e))?;
            roots.add(certificate.clone()).map_err(|e| failed(&e))?;
            trusted.push(certificate);
        }
    }
    if roots.is_empty() {
        return Err(format!("{} has no certificates in PEM form ({named_by})", path.display()));
    }
    Ok((trusted, roots))
}

/// The files with the certificate that this client shows, and with its key.
type ClientFiles = [PathBuf; 2];

/// The key may be in the file of the certificate.
fn client_files() -> Result<Option<ClientFiles>, String> {
    match (CLIENT_CERT.path(), CLIENT_KEY.path()) {
        (None, None) => Ok(None),
        (None, _) => Err(format!("{} is set, and {} is not", CLIENT_KEY.name, CLIENT_CERT.name)),
        (Some(of), key) => Ok(Some([of.clone(), key.unwrap_or(of)])),
    }
}

#[cfg(test)]
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
