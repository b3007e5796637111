//! The bytes of a connection, by TCP or TLS: never more than the commands can be answered with.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::environment::reading;
use crate::io::net::Trust;

/// Bytes that may still arrive. A server that sends more has not answered what it was asked, and
/// the memory for it is not taken.
#[derive(Debug, Clone, Default)]
pub struct Allowance(Arc<AtomicU64>);

impl Allowance {
    /// Allows so many bytes from now on.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Relaxed);
    }

    /// Whether more than that came.
    pub fn is_used_up(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    fn take(&self, bytes: usize) -> io::Result<()> {
        let left = self.0.load(Ordering::Relaxed).saturating_sub(bytes as u64);
        self.0.store(left, Ordering::Relaxed);
        if left == 0 { Err(io::Error::from(ErrorKind::InvalidData)) } else { Ok(()) }
    }
}

/// What a connection reads from and writes to.
pub trait Both: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Both for S {}

/// A connection that ends when it brings too much.
pub struct Bounded {
    stream: Box<dyn Both>,
    allowance: Allowance,
}

impl Bounded {
    /// Connects to a server, and encrypts the connection if `tls` is given.
    pub async fn connect(
        (host, port): (&str, u16),
        tls: Option<&Arc<ClientConfig>>,
        allowance: Allowance,
    ) -> io::Result<Self> {
        let tcp = TcpStream::connect((host, port)).await?;
        tcp.set_nodelay(true)?;
        let stream: Box<dyn Both> = match tls {
            None => Box::new(tcp),
            Some(config) => {
                let name = ServerName::try_from(host.to_owned());
                let name = name.map_err(|e| io::Error::new(ErrorKind::InvalidInput, e))?;
                Box::new(TlsConnector::from(Arc::clone(config)).connect(name, tcp).await?)
            }
        };
        Ok(Bounded { stream, allowance })
    }
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        match self.allowance.take(buffer.filled().len() - before) {
            Ok(()) => polled,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// How connections are encrypted; what is wrong with the certificates is the error.
pub fn tls(trust: &Trust) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
    if *trust == Trust::Anything {
        let any = Arc::new(AnyCertificate(provider));
        let builder = builder.dangerous().with_custom_certificate_verifier(any);
        return Ok(Arc::new(builder.with_no_client_auth()));
    }
    let mut roots = RootCertStore::empty();
    for pem in trust.certificates()? {
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
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
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
