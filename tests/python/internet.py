"""An HTTPS proxy that stands for the servers of S3 on the internet: for AWS and for CoreWeave."""

import ssl

from scripted import Relay
from servers import make_certificates

#: The defaults of tensorizer 2 for reading and for writing.
READ, WRITE = "accel-object.ord1.coreweave.com", "object.ord1.coreweave.com"
#: A server that is no default.
OTHER = "storage.example"
#: Hosts of a bucket at AWS.
US, EU = "bucket.s3.us-east-1.amazonaws.com", "bucket.s3.eu-west-1.amazonaws.com"
#: That of a directory bucket.
EXPRESS = "bucket--usw2-az1--x-s3.s3express-usw2-az1.us-west-2.amazonaws.com"
HOSTS = [READ, WRITE, OTHER, *(f"*{host.removeprefix('bucket')}" for host in (US, EU)), EXPRESS]


class Internet(Relay):
    """Answers for every host that it is asked to connect to, from the objects of one server.

    ``connected`` has those hosts. Requests are given to ``script`` with method, host and number.
    """

    def __init__(self, server, folder, script=lambda method, host, number: None):
        self.connected, self.wanted = [], script
        folder.mkdir()
        make_certificates(folder, *HOSTS)
        self.authority = folder / "ca.pem"
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(folder / "server.pem", folder / "server.key")
        super().__init__(server.host, self.told)

        def connect(handler):
            self.connect(handler)

        self.server.RequestHandlerClass.do_CONNECT = connect
        self.variables = {"HTTPS_PROXY": f"http://{self.host}", "SSL_CERT_FILE": self.authority}

    def told(self, method, path, number):
        return self.wanted(method, self.requests[number][1], number)

    @property
    def hosts(self):
        """The hosts of the requests so far, each once."""
        return list(dict.fromkeys(host for _, host, _ in self.requests))

    def connect(self, handler):
        with self.lock:
            self.connected.append(handler.path.removesuffix(":443"))
        handler.send_response(200)
        handler.end_headers()
        try:
            inner = self.tls.wrap_socket(handler.connection, server_side=True)
        except OSError:
            handler.close_connection = True
            return
        with inner:
            handler.connection = inner
            handler.rfile, handler.wfile = inner.makefile("rb"), inner.makefile("wb", 0)
            handler.close_connection = False
            while not handler.close_connection:
                handler.handle_one_request()

    def translate(self, host, path):
        """Make the bucket part of the path, as the other server has no such hosts."""
        bucket, dot, _ = host.partition(".s3.")
        return self.to, f"/{bucket}{path}" if dot else path
