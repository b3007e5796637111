//! Files of a server in memory: what is retried, from where, and what is refused.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::time::Duration;

use super::*;
use crate::cancel::Never;
use crate::io::read_exact_at;
use crate::io::transport::simulated::{Fault, Fields, RamServer};
use crate::io::transport::timer;
use crate::mem::Buffers;
use crate::sys::clock;

const LEN: usize = 100_000;
/// Bytes of the first request.
const FIRST: usize = 1000;
/// The beginning of the last request.
const MIDDLE: usize = 60_000;
const DATE: &str = "Sat, 21 Nov 2026 10:00:00 GMT";
const LATER: &str = "Sat, 21 Nov 2026 11:00:00 GMT";

fn bytes() -> Vec<u8> {
    (0..LEN).map(|at| (at ^ (at >> 8)) as u8).collect()
}

fn server(fault: impl Fn(usize, &str) -> Fault + Send + Sync + 'static) -> RamServer {
    RamServer { fault: Box::new(fault), ..RamServer::new(bytes()) }
}

fn versions(fields: impl Fn(usize) -> Fields + Send + Sync + 'static) -> RamServer {
    RamServer { fields: Box::new(fields), ..RamServer::new(bytes()) }
}

/// Options on a simulated clock, with three attempts.
fn options() -> OpenOptions {
    clock::simulate();
    timer::pause();
    let options = OpenOptions::from_environment().unwrap();
    let transport = TransportOptions { attempts: 3, ..options.transport };
    OpenOptions { cache: None, first: Some(FIRST as u64), transport, ..options }
}

/// Reads the file by a request for its head and two more.
fn load_as(address: &str, options: &OpenOptions) -> Result<Vec<u8>> {
    let source = open(address, options, &Never)?;
    let mut found = vec![0; LEN];
    let (first, second) = found.split_at_mut(MIDDLE);
    for (start, part) in [(0, first), (MIDDLE as u64, second)] {
        read_exact_at(&*source, start, &mut Buffers::from_slice(part), "", &Never)?;
    }
    Ok(found)
}

fn load(address: &str) -> Result<Vec<u8>> {
    load_as(address, &options())
}

fn message(address: &str) -> String {
    load(address).unwrap_err().to_string()
}

#[test]
fn passing_failures_are_retried_from_the_byte_that_was_reached() {
    let faults = [
        (Fault::Broken(0), 0),
        (Fault::Broken(700), 700),
        (Fault::Broken(30_000), 30_000),
        (Fault::Short(300), 300),
        (Fault::Stalled(20_000), 20_000),
        (Fault::Status(500), 0),
        (Fault::Status(429), 0),
        (Fault::Status(408), 0),
        (Fault::Busy(7), 0),
        (Fault::Page, 0),
        (Fault::OtherRange, 0),
    ];
    let ranges = [(0, FIRST), (FIRST, MIDDLE), (MIDDLE, LEN)];
    for (fault, reached) in faults {
        for failing in 0..3 {
            // The whole head has come before some faults.
            if failing == 0 && (matches!(fault, Fault::Page) || reached > FIRST) {
                continue;
            }
            let none = Fault::None;
            let fault_of = move |number, _: &str| if number == failing { fault } else { none };
            let (server, address) = server(fault_of).start();
            let begun = clock::now();
            assert!(load(&address).unwrap() == bytes(), "{fault:?} {failing}");
            let asked = clock::since(begun) >= Duration::from_secs(7);
            assert_eq!(asked, matches!(fault, Fault::Busy(_)), "{fault:?} {failing}");
            // The head is requested anew.
            let (start, end) = ranges[failing];
            let again = if failing == 0 { start } else { start + reached };
            let mut expected = ranges.to_vec();
            expected.insert(failing + 1, (again, end));
            let found: Vec<_> = server.requests().iter().map(|of| of.range.unwrap()).collect();
            assert_eq!(found, expected, "{fault:?} {failing}");
        }
    }
}

#[test]
fn first_response_says_what_the_file_is() {
    let page_first = |number, _: &str| if number == 0 { Fault::Page } else { Fault::None };
    let (_server, address) = server(page_first).start();
    let error = message(&address);
    assert!(error.contains("changed since it was opened: its size was 14 bytes"), "{error}");
}

#[test]
fn retries_end_after_the_attempts_and_after_the_total_time() {
    for fault in [Fault::Status(500), Fault::Broken(0), Fault::Stalled(0)] {
        let fault_of = move |number, _: &str| if number > 0 { fault } else { Fault::None };
        let (server, address) = server(fault_of).start();
        let error = message(&address);
        assert!(error.contains("(at byte 1000, after 3 tries in"), "{error}");
        assert_eq!(server.requests().len(), 4);
        let options = options();
        let transport = TransportOptions {
            attempts: 1000,
            total: Duration::from_millis(500),
            ..options.transport
        };
        let begun = clock::now();
        let error = load_as(&address, &OpenOptions { transport, ..options }).unwrap_err();
        assert!(error.to_string().contains("tries in 0."), "{error}");
        assert!(clock::since(begun) < Duration::from_secs(1));
    }
}

#[test]
fn permanent_failures_are_not_retried() {
    for (status, what) in [
        (400, "the server answered 400 Bad Request: no"),
        (401, "401 Unauthorized: no; check the credentials and that the address has not expired"),
        (403, "403 Forbidden: no; check the credentials and that the address has not expired"),
        (404, "the server answered 404 Not Found: no"),
        (407, "407 Proxy Authentication Required: no; check the proxy's credentials"),
        (410, "the server answered 410 Gone: no"),
    ] {
        for failing in 0..3 {
            if failing == 0 && status == 400 {
                // Servers without ranges may refuse the first request so.
                continue;
            }
            let fault_of = move |number, _: &str| {
                if number == failing { Fault::Status(status) } else { Fault::None }
            };
            let (server, address) = server(fault_of).start();
            let error = message(&address);
            assert!(error.ends_with(what), "{error}");
            assert_eq!(server.requests().len(), failing + 1);
        }
    }
}

#[test]
fn changed_file_is_refused() {
    for (before, after, what) in [
        ([("etag", "\"one\"")], [("etag", "\"two\"")], "its ETag was \"one\", is \"two\""),
        ([("etag", "W/\"one\"")], [("etag", "W/\"two\"")], "its ETag was W/\"one\", is W/\"two\""),
        // Allowed in responses, though a request cannot hold them.
        ([("etag", "\"\u{e9}1\"")], [("etag", "\"\u{e9}2\"")], "its ETag was "),
        ([("last-modified", DATE)], [("last-modified", LATER)], "its Last-Modified was "),
    ] {
        for heeds_conditions in [false, true] {
            let (before, after) = (Box::leak(Box::new(before)), Box::leak(Box::new(after)));
            let server = versions(|number| if number == 0 { before } else { after });
            let (_server, address) = RamServer { heeds_conditions, ..server }.start();
            let error = message(&address);
            let changed = format!("the file changed since it was opened: {what}");
            assert!(error.contains(&changed), "{error}");
        }
    }
}

#[test]
fn only_strong_tags_are_sent() {
    let cases: [(Fields, Option<&str>); 5] = [
        (&[("etag", "\"strong\"")], Some("\"strong\"")),
        (&[("etag", "W/\"weak\"")], None),
        (&[("etag", "\"\u{e9}\"")], None),
        (&[("last-modified", DATE)], None),
        (&[], None),
    ];
    for (fields, sent) in cases {
        let (server, address) = versions(move |_| fields).start();
        assert!(load(&address).unwrap() == bytes());
        for (number, request) in server.requests().iter().enumerate() {
            let sent = sent.filter(|_| number > 0);
            assert_eq!(request.if_match.as_deref(), sent);
            assert_eq!(request.conditions.len(), usize::from(sent.is_some()));
        }
    }
}

#[test]
fn validator_that_the_first_response_lacks_is_another_version() {
    let cases: [(Fields, Fields); 3] = [
        (&[("etag", "W/\"one\"")], &[("last-modified", DATE), ("etag", "W/\"one\"")]),
        (&[("etag", "\"one\"")], &[("last-modified", DATE), ("etag", "\"one\"")]),
        (&[("last-modified", DATE)], &[("last-modified", DATE)]),
    ];
    for (more, with_date) in cases {
        let server = versions(move |number| if number == 0 { &[] } else { more });
        let (_server, address) = server.start();
        let error = message(&address);
        assert!(error.contains("the file changed since it was opened: it had no"), "{error}");
        // The same date in both responses proves the version.
        let dated: Fields = &[("last-modified", DATE)];
        let (_server, address) = versions(move |number| [dated, with_date][number.min(1)]).start();
        assert!(load(&address).unwrap() == bytes());
    }
}

#[test]
fn response_without_its_version_is_refused() {
    let known: Fields = &[("etag", "W/\"one\""), ("last-modified", DATE)];
    for (less, lacking) in [(&known[1..], "ETag"), (&known[..1], "Last-Modified")] {
        let (_server, address) = versions(move |number| [known, less][number.min(1)]).start();
        let error = message(&address);
        assert!(error.contains(&format!("the first response had the {lacking} ")), "{error}");
        assert!(error.contains(", a later one has none (at byte 1000, after 3 tries"), "{error}");
        // One of several machines may send fewer fields.
        let (_server, address) =
            versions(move |number| if number == 1 { less } else { known }).start();
        assert!(load(&address).unwrap() == bytes());
    }
}

#[test]
fn redirect_that_has_expired_is_requested_again() {
    let moved = |number: usize, path: &str| match (path, number) {
        ("/file", 0) => Fault::Moved("/signed/1"),
        ("/signed/1", 1) | ("/signed/2", _) => Fault::None,
        ("/file", _) => Fault::Moved("/signed/2"),
        _ => Fault::Status(403),
    };
    let (moving, address) = server(moved).start();
    assert!(load(&address).unwrap() == bytes());
    let paths: Vec<String> = moving.requests().into_iter().map(|request| request.path).collect();
    let expected =
        ["/file", "/signed/1", "/signed/1", "/file", "/signed/2", "/signed/2"].map(str::to_owned);
    assert_eq!(paths, expected);
    let always = |_, path: &str| {
        if path == "/file" { Fault::Moved("/signed/1") } else { Fault::Status(403) }
    };
    let (_server, address) = server(always).start();
    let error = message(&address);
    assert!(
        error.contains("the server answered 403 Forbidden: no; check the credentials"),
        "{error}"
    );
}

#[test]
fn unchanged_file_needs_a_condition() {
    let (_server, address) = server(|_, _| Fault::Status(304)).start();
    let error = message(&address);
    assert!(error.contains("answered 304 Not Modified to a request without"), "{error}");
}

#[test]
fn broken_body_without_ranges_is_continued() {
    for fault in [Fault::None, Fault::Broken(20_000), Fault::Short(35_000), Fault::Stalled(0)] {
        // The second request is that of the body.
        let of_body = move |number, _: &str| if number == 1 { fault } else { Fault::None };
        let body = RamServer { has_ranges: false, ..server(of_body) };
        let (server, address) = body.start();
        assert!(load(&address).unwrap() == bytes(), "{fault:?}");
        assert_eq!(server.requests().len(), if matches!(fault, Fault::None) { 2 } else { 3 });
    }
    let tags: [Fields; 2] = [&[("etag", "\"one\"")], &[("etag", "\"two\"")]];
    let other = move |number| tags[usize::from(number > 1)];
    let broken = |number, _: &str| if number == 1 { Fault::Broken(20_000) } else { Fault::None };
    let body = RamServer { has_ranges: false, fields: Box::new(other), ..server(broken) };
    let (_server, address) = body.start();
    let error = message(&address);
    let what = "changed since it was opened: its ETag was \"one\", is \"two\"";
    assert!(error.contains(what), "{error}");
}

#[test]
fn broken_ranges_are_read_front_to_back() {
    // Always, and for as long as ranges are asked for.
    for (fault, requests) in [(Fault::Status(400), 3), (Fault::Status(501), 3)] {
        let of_ranges = move |number, _: &str| if number == 0 { fault } else { Fault::None };
        let (server, address) = server(of_ranges).start();
        let source = open(&address, &options(), &Never).unwrap();
        let why = source.facts().fallback().unwrap();
        assert!(why.contains("read front to back"), "{why}");
        let mut found = vec![0; LEN];
        read_exact_at(&*source, 0, &mut Buffers::from_slice(&mut found), "", &Never).unwrap();
        assert!(found == bytes());
        assert_eq!(server.requests().len(), requests, "{fault:?}");
        assert!(server.requests()[1..].iter().all(|request| request.range.is_none()));
    }
}

#[test]
fn progress_resets_the_attempts() {
    // Each connection ends after 100 kB of 1 MB; three attempts without progress are allowed.
    let whole: Vec<u8> = bytes().into_iter().cycle().take(10 * LEN).collect();
    for (moved, works) in [(LEN, true), (60_000, false)] {
        let fault = move |number, _: &str| {
            if number == 0 { Fault::None } else { Fault::Broken(moved) }
        };
        let cut = RamServer { fault: Box::new(fault), ..RamServer::new(whole.clone()) };
        let (server, address) = cut.start();
        let source = open(&address, &options(), &Never).unwrap();
        let mut found = vec![0; 10 * LEN];
        let read = read_exact_at(&*source, 0, &mut Buffers::from_slice(&mut found), "", &Never);
        assert_eq!(read.is_ok(), works, "{read:?}");
        match read {
            Ok(_) => assert!(found == whole),
            Err(error) => assert!(error.to_string().contains("TENSORIZER_ATTEMPTS (3)"), "{error}"),
        }
        assert_eq!(server.requests().len(), if works { 11 } else { 4 });
    }
}
