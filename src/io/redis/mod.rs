//! `redis://host/prefix`: a file whose pieces are the values of keys.
//!
//! A key is `<prefix>:<label>:<position of its value in the file>`; see `to_redis`.

mod bounded_connection;
mod client;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Instant;

use redis::{FromRedisValue, Pipeline, Value, from_redis_value};

use super::{Capabilities, Facts, ReadAt};
use crate::cancel::{self, Cancel};
use crate::error::{Error, Escaped, Result};
use crate::io::transport::{RetryBudget, TransportOptions, retry};
use crate::mem::Buffers;
use crate::memory_limit::CONNECTION;
use client::{RedisAddress, RedisConnections, cluster_size};

/// Maximum bytes that one command requests.
const COMMAND_LEN: u64 = 1 << 20;
/// Maximum bytes, and commands, that are requested before the first reply is read.
const BATCH_LEN: u64 = 8 << 20;
const BATCH_COMMANDS: usize = 1024;
/// Bytes of a request of the read engine, which a thread reads in batches.
const REQUEST_LEN: u64 = 32 << 20;
/// Number of connections that saturates a server, which works on one thread.
const CONNECTIONS: usize = 4;
/// Maximum bytes of the reply to one step of a scan. Parsed, it may take 14 times as much memory:
/// an empty list of 4 bytes becomes a value of 56.
const SCAN_LEN: u64 = 2 << 20;
/// Bytes of a reply without its data: a length or a number, and line ends.
const REPLY_OVERHEAD: u64 = 64;
/// Maximum bytes of the keys of one file: enough for some hundred thousand tensors with two keys
/// each.
const MAX_KEY_BYTES: usize = 64 << 20;
/// The end of the key that holds the first bytes of a file.
const FIRST_KEY: &[u8] = b":header:0";
/// Keys that one step of a scan examines, and keys per batch of requests for lengths.
const SCAN_COUNT: usize = 1000;
/// A scan step whose reply was too long is repeated with the number of keys divided by this.
const COUNT_DIVISOR: usize = 32;

/// The position of a key's value in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StoredValue {
    start: u64,
    len: u64,
    key: Vec<u8>,
}

/// The values of all keys with one prefix.
pub struct RedisSource {
    facts: Facts,
    connections: RedisConnections,
    options: TransportOptions,
    values: Vec<StoredValue>,
}

/// Opens an address: finds the keys and the lengths of their values.
pub fn open(uri: &str, options: &TransportOptions, cancel: &dyn Cancel) -> Result<Arc<dyn ReadAt>> {
    let parsed = RedisAddress::parse(uri).map_err(Error::InvalidArgument)?;
    let (uri, prefix) = (parsed.display_address.clone(), parsed.prefix.clone());
    let connections = RedisConnections::new(parsed, options).map_err(Error::InvalidArgument)?;
    let facts = Facts { uri, ..Facts::default() };
    let (values, options) = (Vec::new(), options.clone());
    let mut source = RedisSource { facts, connections, options, values };
    source.values = source.find(&prefix, cancel)?;
    if source.values.is_empty() {
        let what = format!("no key of the database begins with `{prefix}:`");
        return Err(Error::failed("opening", &source.facts.uri, ErrorKind::NotFound, what));
    }
    source.facts.len = source.values.iter().map(|value| value.start + value.len).max();
    Ok(Arc::new(source))
}

impl RedisSource {
    /// Bytes that are requested before the first reply is read.
    fn batch_len(&self) -> u64 {
        self.facts.connection_limit.bytes().min(BATCH_LEN)
    }

    /// Sends one batch of commands, and retries after transient failures.
    fn send<T: FromRedisValue>(
        &self,
        commands: &Pipeline,
        max_bytes: u64,
        budget: &RetryBudget<'_>,
    ) -> Result<T> {
        const SHOWN: usize = 200;
        let replies = retry::run(budget, || self.connections.send(commands, max_bytes, budget))?;
        from_redis_value(Value::Array(replies)).map_err(|error| {
            let what: String = error.to_string().chars().take(SHOWN).collect();
            self.invalid(format!("unexpected reply: {}", Escaped(&what)))
        })
    }

    /// The error for keys and values that are not those of a file.
    fn invalid(&self, what: String) -> Error {
        Error::failed("reading", &self.facts.uri, ErrorKind::InvalidData, what)
    }

    /// All keys with the prefix, by position.
    fn find(&self, prefix: &str, cancel: &dyn Cancel) -> Result<Vec<StoredValue>> {
        // The whole scan counts as one request for time limits.
        let begun = Instant::now();
        let budget = || {
            RetryBudget::new("reading", &self.facts.uri, &self.options, cancel)
                .opening()
                .resumed(begun.elapsed(), 0)
        };
        self.refuse_cluster(&budget())?;
        let mut keys = self.scan(prefix, &budget)?;
        // A scan may give a key twice.
        keys.sort_unstable();
        keys.dedup();
        let keys = without_nested_files(keys, prefix);
        // Keys of other programs may begin the same way. Those without a position are left out.
        let keys: Vec<(u64, Vec<u8>)> =
            keys.into_iter().filter_map(|key| Some((position(&key)?, key))).collect();
        let mut values = self.stored_values(&keys, &budget)?;
        values.sort_by_key(|value| value.start);
        let same = |pair: &&[StoredValue]| matches!(pair, [one, other] if one.start == other.start);
        if let Some([one, other]) = values.windows(2).find(same) {
            let [one, other] =
                [one, other].map(|value| String::from_utf8_lossy(&value.key).into_owned());
            return Err(self.invalid(format!(
                "the keys `{}` and `{}` hold bytes of the same position: another file has keys with \
                 this prefix",
                Escaped(&one),
                Escaped(&other)
            )));
        }
        Ok(values)
    }

    /// Fails for a cluster of several servers. Each has only some of the keys.
    fn refuse_cluster(&self, budget: &RetryBudget<'_>) -> Result<()> {
        let mut info = Pipeline::new();
        info.cmd("CLUSTER").arg("INFO");
        let (info,): (String,) = match self.send(&info, SCAN_LEN, budget) {
            // Other servers do not know the command, and users may not be allowed to send it.
            Err(Error::Io { error, .. })
                if error.kind() == ErrorKind::InvalidData
                    || error.to_string().contains("NoPerm") =>
            {
                return Ok(());
            }
            replies => replies?,
        };
        match cluster_size(&info) {
            0 | 1 => Ok(()),
            size => Err(Error::Unsupported(format!(
                "`{}` is one of the {size} servers of a Redis cluster, which is not supported: each \
                 has only some of the keys of a file; use a server outside of a cluster",
                self.facts.uri
            ))),
        }
    }

    /// Returns all keys with the prefix, unsorted; a key may come twice.
    fn scan<'t>(&self, prefix: &str, budget: &dyn Fn() -> RetryBudget<'t>) -> Result<Vec<Vec<u8>>> {
        let mut keys = Vec::new();
        let mut key_bytes = 0;
        let mut cursor = b"0".to_vec();
        let mut count = SCAN_COUNT;
        loop {
            let mut scan = Pipeline::new();
            scan.cmd("SCAN").arg(&cursor).arg("MATCH").arg(pattern(prefix));
            scan.arg("COUNT").arg(count);
            let ((next, found),): ((Vec<u8>, Vec<Vec<u8>>),) =
                match self.send(&scan, SCAN_LEN, &budget()) {
                    // The names are long, so fewer of them fit into a reply.
                    Err(Error::Io { error, .. })
                        if error.kind() == ErrorKind::InvalidData && count > 1 =>
                    {
                        count = (count / COUNT_DIVISOR).max(1);
                        continue;
                    }
                    reply => reply?,
                };
            key_bytes += found.iter().map(|key| key.len() + size_of_val(key)).sum::<usize>();
            if key_bytes > MAX_KEY_BYTES {
                return Err(self.invalid(format!("more than {MAX_KEY_BYTES} bytes of keys")));
            }
            keys.extend(found);
            if next == b"0" {
                return Ok(keys);
            }
            cursor = next;
        }
    }

    /// Returns the values of these keys with their lengths; empty values are left out.
    fn stored_values<'t>(
        &self,
        keys: &[(u64, Vec<u8>)],
        budget: &dyn Fn() -> RetryBudget<'t>,
    ) -> Result<Vec<StoredValue>> {
        let mut values = Vec::with_capacity(keys.len());
        for batch in keys.chunks(SCAN_COUNT) {
            let mut lengths = Pipeline::with_capacity(batch.len());
            for (_, key) in batch {
                lengths.cmd("STRLEN").arg(key);
            }
            let max_bytes = REPLY_OVERHEAD * batch.len() as u64;
            let lens: Vec<i64> = self.send(&lengths, max_bytes, &budget())?;
            for ((start, key), len) in batch.iter().zip(lens) {
                let len = u64::try_from(len).unwrap_or(0);
                if start.checked_add(len).is_none() {
                    return Err(self.invalid(format!("{len} bytes of a value at {start}")));
                }
                // The value of a tensor without data shares its position with the next one.
                if len > 0 {
                    values.push(StoredValue { start: *start, len, key: key.clone() });
                }
            }
        }
        Ok(values)
    }

    /// Returns the parts of values that hold the bytes from `start` to `end` of the file. Stops
    /// after about as much as one batch should hold.
    fn value_ranges(&self, start: u64, end: u64) -> Result<Vec<ValueRange<'_>>> {
        let stop = end.min(start.saturating_add(self.batch_len()));
        let first = self.values.partition_point(|value| value.start <= start).saturating_sub(1);
        let values = self.values.get(first..).unwrap_or(&[]);
        let next_starts = values.iter().skip(1).map(|next| next.start).chain([u64::MAX]);
        let (mut pieces, mut at) = (Vec::new(), start);
        for (value, next_start) in values.iter().zip(next_starts) {
            let end = (value.start + value.len).min(next_start).min(stop);
            while value.start <= at && at < end && pieces.len() < BATCH_COMMANDS {
                let len = (end - at).min(COMMAND_LEN);
                pieces.push(ValueRange { value, start: at, len });
                at += len;
            }
            if at == stop || pieces.len() == BATCH_COMMANDS {
                return Ok(pieces);
            }
        }
        let what = format!(
            "no key of the database holds byte {at} of the file: a key was removed, or the file is \
             incomplete"
        );
        Err(Error::failed("reading", &self.facts.uri, ErrorKind::UnexpectedEof, what))
    }
}

/// Removes the keys of files whose own prefix begins with this one, such as `model:v2` for `model`.
/// The key of the first byte of each file is its prefix and `:header:0`.
fn without_nested_files(mut keys: Vec<Vec<u8>>, prefix: &str) -> Vec<Vec<u8>> {
    let own_len = prefix.len() + 1;
    let nested_prefix = |key: &Vec<u8>| {
        let nested = key.strip_suffix(FIRST_KEY)?;
        (nested.len() >= own_len).then(|| [nested, b":"].concat())
    };
    let nested: BTreeSet<Vec<u8>> = keys.iter().filter_map(nested_prefix).collect();
    let is_nested = |key: &[u8]| {
        // A name and a position follow the prefix of a file, with a colon between them.
        let last = key.iter().rposition(|&byte| byte == b':').unwrap_or(0);
        let mut ends = (own_len..last).filter(|&at| key.get(at) == Some(&b':'));
        ends.any(|at| key.get(..=at).is_some_and(|start| nested.contains(start)))
    };
    if !nested.is_empty() {
        keys.retain(|key| !is_nested(key));
    }
    keys
}

/// Part of a value.
struct ValueRange<'s> {
    value: &'s StoredValue,
    /// Position in the file.
    start: u64,
    len: u64,
}

/// The pattern of all keys with a prefix; its own special characters mean themselves.
fn pattern(prefix: &str) -> String {
    let escaped = prefix.chars().flat_map(|letter| {
        let is_special = matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^' | '-');
        is_special.then_some('\\').into_iter().chain([letter])
    });
    escaped.chain([':', '*']).collect()
}

/// The number after the last colon.
fn position(key: &[u8]) -> Option<u64> {
    let digits = key.rsplit(|&byte| byte == b':').next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

impl ReadAt for RedisSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_readers: self.options.max_connections,
            initial_readers: self.options.connections.unwrap_or(CONNECTIONS),
            max_auto_readers: self.options.connections.unwrap_or(CONNECTIONS),
            request_len: REQUEST_LEN,
            merge_gap: 0,
            // The reply of the server, and the values parsed from it.
            reader_memory: CONNECTION + 2 * self.batch_len(),
        }
    }

    fn read_at(&self, offset: u64, into: &mut Buffers<'_>, cancel: &dyn Cancel) -> Result<usize> {
        let len = self.facts.len.unwrap_or(0);
        let end = offset.saturating_add(into.remaining() as u64).min(len);
        if end <= offset {
            return Ok(0);
        }
        let pieces = self.value_ranges(offset, end)?;
        let mut commands = Pipeline::with_capacity(pieces.len());
        for &ValueRange { value, start, len } in &pieces {
            if len == value.len {
                commands.cmd("GET").arg(&value.key);
            } else {
                let first = start - value.start;
                commands.cmd("GETRANGE").arg(&value.key).arg(first).arg(first + len - 1);
            }
        }
        let max_bytes = pieces.iter().map(|piece| piece.len + REPLY_OVERHEAD).sum();
        let budget = RetryBudget::new("reading", &self.facts.uri, &self.options, cancel);
        budget.position.set(offset);
        let replies: Vec<Vec<u8>> = self.send(&commands, max_bytes, &budget)?;
        let mut done = 0;
        for (piece, bytes) in pieces.iter().zip(replies) {
            if bytes.len() as u64 != piece.len {
                return Err(self.invalid(format!(
                    "the value of `{}` changed while it was read: expected {} bytes from {} on, \
                     found {}",
                    Escaped(&String::from_utf8_lossy(&piece.value.key)),
                    piece.len,
                    piece.start - piece.value.start,
                    bytes.len()
                )));
            }
            done += into.fill_from(&bytes);
        }
        into.arrived(done as u64);
        budget.received(done as u64);
        if let Some(pause) = budget.pace(done as u64) {
            cancel::sleep(pause, cancel)?;
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_longer_prefix_belong_to_another_file() {
        let keys = |texts: &[&str]| texts.iter().map(|key| key.as_bytes().to_vec()).collect();
        let own: Vec<Vec<u8>> = keys(&["a:header:0", "a:t:90", "a::90"]);
        for other in ["a:", "a:b", "a::"] {
            let nested = [format!("{other}:header:0"), format!("{other}:t:90")];
            let all = own.iter().cloned().chain(nested.map(String::into_bytes)).collect();
            assert_eq!(without_nested_files(all, "a"), own, "{other}");
        }
        let nested: Vec<Vec<u8>> = keys(&["a::header:0", "a::t:90"]);
        assert_eq!(without_nested_files(nested.clone(), "a"), Vec::<Vec<u8>>::new());
        assert_eq!(without_nested_files(nested.clone(), "a:"), nested);
    }

    #[test]
    fn keys_end_with_the_position_of_their_value() {
        assert_eq!(pattern("a*b"), "a\\*b:*");
        assert_eq!(position(b"p:a:b:12"), Some(12));
        assert_eq!(position(b"p:header:x"), None);
        assert_eq!(position(b"p:-1"), None);
    }
}
