//! Tests of the settings of Google and Azure.

use crate::io::auth::settings::{check_host, check_printable, parse_endpoint};

#[test]
fn endpoints_and_hosts_are_checked() {
    for good in ["https://host", "http://127.0.0.1:9/account", "HTTPS://[::1]:80/"] {
        assert!(parse_endpoint(good).is_ok(), "{good}");
    }
    for bad in ["host", "host:1/x", "ftp://host", "https://", "https://a@b", "http://h\n/"] {
        assert!(parse_endpoint(bad).is_err(), "{bad}");
    }
    for good in ["host", "127.0.0.1:9", "[::1]:9", "metadata.google.internal"] {
        assert_eq!(check_host("V", good).unwrap(), good);
    }
    for bad in ["", "a b", "a/b", "a:b", "a:", "user@a", "a:99999", " a", "a?b", "a#b"] {
        assert!(check_host("V", bad).is_err(), "{bad}");
    }
    assert!(check_printable("V", "a token").is_ok());
    for bad in ["a\nb", "ü", "a\x7f"] {
        let error = check_printable("V", bad).unwrap_err().to_string();
        assert!(error.contains('V') && !error.contains(bad), "{error}");
    }
}
