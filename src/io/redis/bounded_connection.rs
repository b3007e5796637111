//! Connections, by TCP or TLS, that limit the received bytes to the maximum length of the replies.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use redis::aio::AsyncStream;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, Join, ReadBuf, ReadHalf, WriteHalf, join, split};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::io::transport::{Tls, lookup};

/// Bytes that may still arrive, plus one: it is 0 if more have arrived. A server that sends more is
/// faulty, and no memory is allocated for these bytes.
#[derive(Debug, Clone, Default)]
pub struct ReceiveLimit(Arc<AtomicU64>);

impl ReceiveLimit {
    /// Sets the bytes that may arrive from now on.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes.saturating_add(1), Ordering::Relaxed);
    }

    /// True if more bytes than the limit have arrived.
    pub fn is_exceeded(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    fn consume(&self, bytes: usize) -> io::Result<()> {
        let remaining = self.0.load(Ordering::Relaxed).saturating_sub(bytes as u64);
        self.0.store(remaining, Ordering::Relaxed);
        if remaining == 0 { Err(io::Error::from(ErrorKind::InvalidData)) } else { Ok(()) }
    }
}

type RedisStream = Box<dyn AsyncStream + Send + Unpin>;

/// Connects to a server, and encrypts the connection if `tls` is given. Its reads fail as soon as
/// more bytes have arrived than the limit allows.
pub async fn connect(
    (host, port): (&str, u16),
    tls: Option<&Tls>,
    limit: ReceiveLimit,
) -> io::Result<Join<BoundedReader, WriteHalf<RedisStream>>> {
    let addresses = lookup(host, port).await?;
    let tcp = TcpStream::connect(&*addresses).await?;
    tcp.set_nodelay(true)?;
    let stream: RedisStream = match tls {
        None => Box::new(tcp),
        Some(tls) => {
            let name = ServerName::try_from(host.to_owned());
            let name = name.map_err(|e| io::Error::new(ErrorKind::InvalidInput, e))?;
            Box::new(TlsConnector::from(Arc::new(tls.config())).connect(name, tcp).await?)
        }
    };
    let (stream, writer) = split(stream);
    Ok(join(BoundedReader { stream, limit }, writer))
}

/// The part of a connection that reads.
pub struct BoundedReader {
    stream: ReadHalf<RedisStream>,
    limit: ReceiveLimit,
}

impl AsyncRead for BoundedReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        match self.limit.consume(buffer.filled().len() - before) {
            Ok(()) => polled,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_allowed_bytes_may_arrive() {
        let limit = ReceiveLimit::default();
        limit.set(5);
        assert!(limit.consume(2).is_ok() && limit.consume(3).is_ok() && !limit.is_exceeded());
        assert!(limit.consume(1).is_err() && limit.is_exceeded());
        limit.set(1);
        assert!(limit.consume(0).is_ok() && !limit.is_exceeded());
    }
}
