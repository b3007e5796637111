//! Look-ups of the names of servers.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::thread;

use tokio::sync::oneshot;

/// Bytes of the stack of a thread.
const STACK: usize = 2 << 20;

/// Looks up the addresses of a server, on a thread of its own, because the system's function cannot
/// be cancelled. If the machine allows no further thread, this one waits for it. (Tokio's pool of
/// threads would panic.)
pub async fn lookup(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let find = move |host: &str| (host, port).to_socket_addrs().map(Iterator::collect);
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (send, receive) = oneshot::channel();
    let name = host.to_owned();
    // Fails to send if the request was cancelled.
    let work = move || drop(send.send(find(&name)));
    // With a stated size of its stack, a variable of the environment is not read.
    let thread = thread::Builder::new().name("tensorizer".to_owned()).stack_size(STACK);
    match thread.spawn(work) {
        Ok(_) => receive.await.unwrap_or_else(|_| Err(io::Error::other("a look-up has panicked"))),
        Err(_) => find(host),
    }
}
