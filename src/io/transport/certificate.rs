//! Servers' certificates as OpenSSL, and with it Python, accepts them: those that rustls accepts, and
//! some that people make for servers of their own.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use webpki::RawPublicKeyEntity;
use x509_cert::Certificate;
use x509_cert::der::oid::ObjectIdentifier;
use x509_cert::der::{Decode as _, Encode as _};
use x509_cert::ext::pkix::{BasicConstraints, ExtendedKeyUsage, NameConstraints};

/// Purposes of a certificate that include servers.
const SERVER_PURPOSES: [ObjectIdentifier; 2] = [
    ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.1"),
    ObjectIdentifier::new_unwrap("2.5.29.37.0"),
];

/// Trusted certificates, and the authorities among them.
pub type Trusted = (Vec<CertificateDer<'static>>, RootCertStore);

/// Verifies the certificates of servers.
#[derive(Debug)]
pub struct Verifier {
    /// None if the caller has disabled verification.
    strict: Option<Arc<WebPkiServerVerifier>>,
    trusted: Vec<CertificateDer<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    /// A verifier that trusts these certificates, and the authorities among them; without any, it
    /// accepts every certificate.
    pub fn new(trusted: Option<Trusted>, provider: &Arc<CryptoProvider>) -> Result<Self, String> {
        let algorithms = provider.signature_verification_algorithms;
        let Some((trusted, authorities)) = trusted else {
            return Ok(Verifier { strict: None, trusted: Vec::new(), algorithms });
        };
        let strict =
            WebPkiServerVerifier::builder_with_provider(authorities.into(), Arc::clone(provider));
        let strict = Some(strict.build().map_err(|e| e.to_string())?);
        Ok(Verifier { strict, trusted, algorithms })
    }

    /// True for a certificate that is refused with this error, and that OpenSSL accepts.
    fn accepts(
        &self,
        error: &CertificateError,
        der: &CertificateDer<'_>,
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Option<bool> {
        let certificate = Certificate::from_der(der).ok()?;
        let is_vouched_for = match error {
            // Names are looked at after everything else has been found good. Authorities between
            // them may be limited to names, but not to those of subjects.
            CertificateError::NotValidForNameContext { .. } => {
                self.trusted.contains(der) || self.has_signed(&certificate)?
            }
            CertificateError::UnknownIssuer => self.trusted.contains(der),
            CertificateError::Other(other) => {
                let is_old = is_of_old_version(other)
                    && certificate.tbs_certificate().extensions().is_none();
                let is_authority =
                    other.0.downcast_ref() == Some(&webpki::Error::CaUsedAsEndEntity);
                (is_old || is_authority)
                    && (self.trusted.contains(der) || self.has_signed(&certificate)?)
            }
            _ => false,
        };
        Some(is_vouched_for && is_of_server(&certificate, now) && is_named(der, &certificate, name))
    }

    /// True if a trusted certificate has signed this one itself.
    fn has_signed(&self, certificate: &Certificate) -> Option<bool> {
        let signed = certificate.tbs_certificate();
        let (message, signature) = (signed.to_der().ok()?, certificate.signature().as_bytes()?);
        let all = self.trusted.iter().filter_map(|der| Certificate::from_der(der).ok());
        let mut issuers = all.filter(|of| of.tbs_certificate().subject() == signed.issuer());
        Some(issuers.any(|of| is_authority(&of) && self.is_signature(&of, &message, signature)))
    }

    /// True if the key of a certificate has made a signature, by any algorithm.
    fn is_signature(&self, by: &Certificate, message: &[u8], signature: &[u8]) -> bool {
        let key = by.tbs_certificate().subject_public_key_info().to_der();
        let key = key.map(SubjectPublicKeyInfoDer::from);
        key.as_ref().is_ok_and(|key| {
            let mut all = self.algorithms.all.iter();
            RawPublicKeyEntity::try_from(key).is_ok_and(|key| {
                all.any(|of| key.verify_signature(*of, message, signature).is_ok())
            })
        })
    }

    /// The same result for the signature of a handshake, unless it is an error because the key of a
    /// certificate of an old version was not read.
    fn with_old(
        &self,
        verified: Result<HandshakeSignatureValid, Error>,
        message: &[u8],
        der: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if let Err(Error::InvalidCertificate(CertificateError::Other(other))) = &verified
            && is_of_old_version(other)
            && let Ok(certificate) = Certificate::from_der(der)
            && self.is_signature(&certificate, message, signed.signature())
        {
            return Ok(HandshakeSignatureValid::assertion());
        }
        verified
    }
}

/// True for the certificate of an authority for every name.
fn is_authority(certificate: &Certificate) -> bool {
    let certificate = certificate.tbs_certificate();
    let limits = certificate.get_extension::<NameConstraints>();
    let basic = certificate.get_extension::<BasicConstraints>();
    let may_sign = matches!(basic, Ok(Some((_, basic))) if basic.ca);
    certificate.extensions().is_none() || matches!(limits, Ok(None)) && may_sign
}

/// True for the error of a certificate of version 1 or 2.
fn is_of_old_version(error: &OtherError) -> bool {
    error.0.downcast_ref() == Some(&webpki::Error::UnsupportedCertVersion)
}

/// True for a certificate that is valid at this time, and for servers.
fn is_of_server(certificate: &Certificate, now: UnixTime) -> bool {
    let certificate = certificate.tbs_certificate();
    let dates = certificate.validity();
    let [first, last] =
        [dates.not_before, dates.not_after].map(|at| at.to_unix_duration().as_secs());
    let purposes = certificate.get_extension::<ExtendedKeyUsage>();
    let for_servers = purposes.is_ok_and(|found| {
        found.is_none_or(|(_, purposes)| purposes.0.iter().any(|of| SERVER_PURPOSES.contains(of)))
    });
    (first..=last).contains(&now.as_secs()) && for_servers
}

/// True for a certificate with this name, which is in its subject if it has no other names.
fn is_named(der: &CertificateDer<'_>, certificate: &Certificate, name: &ServerName<'_>) -> bool {
    let verified = ParsedCertificate::try_from(der).map(|parsed| verify_server_name(&parsed, name));
    let has_others = match verified {
        Ok(Ok(())) => return true,
        Ok(Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext {
            presented,
            ..
        }))) => !presented.is_empty(),
        _ => false,
    };
    let common = certificate.tbs_certificate().subject().common_name().ok().flatten();
    let (ServerName::DnsName(name), Some(common), false) = (name, common, has_others) else {
        return false;
    };
    let (name, common) = (name.as_ref(), common.value());
    let domain = name.split_once('.').map(|(_, domain)| domain);
    common.eq_ignore_ascii_case(name)
        || domain.zip(common.strip_prefix("*.")).is_some_and(|(of, to)| of.eq_ignore_ascii_case(to))
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(strict) = &self.strict else { return Ok(ServerCertVerified::assertion()) };
        let verified =
            strict.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            Err(Error::InvalidCertificate(error))
                if self.accepts(&error, end_entity, server_name, now) == Some(true) =>
            {
                Ok(ServerCertVerified::assertion())
            }
            // The error has no dates for a certificate that ends before it begins, as one of
            // `openssl x509 -days -1`.
            Err(Error::InvalidCertificate(CertificateError::Expired)) => {
                let certificate = Certificate::from_der(end_entity);
                let not_after = certificate.map(|of| of.tbs_certificate().validity().not_after);
                let not_after = not_after.map_err(|_| CertificateError::Expired)?;
                let not_after = UnixTime::since_unix_epoch(not_after.to_unix_duration());
                Err(CertificateError::ExpiredContext { time: now, not_after }.into())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        der: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = verify_tls12_signature(message, der, signed, &self.algorithms);
        self.with_old(verified, message, der, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        der: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = verify_tls13_signature(message, der, signed, &self.algorithms);
        self.with_old(verified, message, der, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
