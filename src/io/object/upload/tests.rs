//! Uploads to an object in memory, whose requests can fail.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::sync::Barrier;
use std::thread;

use super::*;
use crate::io::transport::simulated::options;
use crate::io::write_all_at;
use crate::memory_limit::PART_LEN;

/// The kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Put,
    Begin,
    Part,
    Complete,
}

/// An object in memory.
#[derive(Default)]
struct RamObject {
    name: String,
    /// Requests of this kind fail.
    failing: Option<Stage>,
    state: Mutex<RamState>,
    /// The first parts wait until so many are under way.
    meeting: Option<Barrier>,
}

#[derive(Default)]
struct RamState {
    object: Option<Vec<u8>>,
    parts: BTreeMap<u64, Vec<u8>>,
    puts: usize,
    aborted: usize,
    sent: usize,
    under_way: usize,
    most_under_way: usize,
}

impl RamObject {
    fn state(&self) -> MutexGuard<'_, RamState> {
        self.state.lock().unwrap()
    }

    fn check(&self, stage: Stage) -> Result<()> {
        if self.failing == Some(stage) {
            return Err(Error::Unsupported(format!("{stage:?} fails")));
        }
        Ok(())
    }

    /// The lengths of the parts that were sent, by number.
    fn part_lens(&self) -> Vec<(u64, u64)> {
        self.state().parts.iter().map(|(number, part)| (*number, part.len() as u64)).collect()
    }
}

impl UploadProtocol for RamObject {
    fn put(&self, bytes: &Bytes, _: &dyn Cancel) -> Result<()> {
        self.check(Stage::Put)?;
        self.state().puts += 1;
        self.state().object = Some(bytes.to_vec());
        Ok(())
    }

    fn begin(&self, _: &dyn Cancel) -> Result<Arc<str>> {
        self.check(Stage::Begin).map(|()| "upload".into())
    }

    fn part(&self, _: &str, number: u64, bytes: &Bytes, _: &dyn Cancel) -> Result<SentPart> {
        let first = {
            let mut state = self.state();
            state.sent += 1;
            state.under_way += 1;
            state.most_under_way = state.most_under_way.max(state.under_way);
            state.sent
        };
        if let Some(meeting) = self.meeting.as_ref().filter(|_| first <= 3) {
            meeting.wait();
        }
        self.state().under_way -= 1;
        self.check(Stage::Part)?;
        assert!(self.state().parts.insert(number, bytes.to_vec()).is_none());
        Ok(SentPart { number, tag: String::new(), checksum: None })
    }

    fn complete(&self, _: &str, parts: &[SentPart], len: u64, _: &dyn Cancel) -> Result<()> {
        self.check(Stage::Complete)?;
        let mut state = self.state();
        let object: Vec<&[u8]> = parts.iter().map(|part| &*state.parts[&part.number]).collect();
        let object = object.concat();
        assert_eq!(object.len() as u64, len);
        state.object = Some(object);
        Ok(())
    }

    fn abort(&self, _: &str, _: &dyn Cancel) -> Result<()> {
        self.state().aborted += 1;
        Ok(())
    }
}

fn sink(object: &Arc<RamObject>) -> UploadSink {
    let options = TransportOptions { stall: Duration::from_secs(1), ..options() };
    let names = (object.name.clone(), object.name.clone());
    let object: Arc<dyn UploadProtocol> = Arc::<RamObject>::clone(object);
    UploadSink::new(object, names, 5 << 30, &options).unwrap()
}

fn object(name: &str) -> RamObject {
    RamObject { name: format!("ram://{name}"), ..RamObject::default() }
}

fn bytes(len: u64) -> Vec<u8> {
    crate::tests::pattern(len as usize, 0)
}

/// Writes bytes after the head in pieces, on several threads, and the head last.
fn write(sink: &UploadSink, bytes: &[u8], head: usize, threads: usize) -> Result<()> {
    let pieces = Mutex::new((head..).step_by(3 << 20).zip(bytes[head..].chunks(3 << 20)));
    let one = || -> Result<()> {
        loop {
            let Some((at, piece)) = pieces.lock().unwrap().next() else { return Ok(()) };
            write_all_at(sink, at as u64, &mut [IoSlice::new(piece)], &Never)?;
            sink.finish_deferred_writes(&Never)?;
        }
    };
    thread::scope(|scope| {
        let writers: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        writers.into_iter().try_for_each(|writer| writer.join().unwrap())
    })?;
    write_all_at(sink, 0, &mut [IoSlice::new(&bytes[..head])], &Never)
}

fn reservation(head: u64, len: u64) -> Reservation {
    Reservation { head, len, parts: None }
}

#[test]
fn object_has_the_written_bytes() {
    for (len, puts) in [(1000, 1), (PART_LEN + 1000, 1), (5 * PART_LEN + 1000, 0)] {
        for announced in [0, len] {
            let object = Arc::new(object(&format!("bytes {len} {announced}")));
            let (mut sink, bytes) = (sink(&object), bytes(len));
            sink.reserve(&reservation(1000, announced)).unwrap();
            write(&sink, &bytes, 1000, 3).unwrap();
            let published = sink.publish(len, Ending::Finished, &Never).unwrap();
            assert_eq!(published, Published::InPlace);
            assert!(object.state().object.as_ref() == Some(&bytes));
            assert_eq!(object.state().puts, puts);
            // The head is the first part, and the other parts have numbers after those of heads.
            let lens = object.part_lens();
            let expected = [(1, PART_LEN), (1001, PART_LEN), (1005, 1000)];
            assert!(puts == 1 || expected.iter().all(|part| lens.contains(part)), "{lens:?}");
            let error = write(&sink, &bytes, 1000, 1).unwrap_err().to_string();
            assert!(error.contains("is closed: its upload is complete"), "{error}");
        }
    }
}

#[test]
fn index_that_outgrows_its_space_takes_more_parts_of_the_head() {
    for len in [PART_LEN + 5000, 4 * PART_LEN] {
        let object = Arc::new(object(&format!("growing {len}")));
        let (mut sink, body) = (sink(&object), bytes(len));
        sink.reserve(&reservation(1000, len)).unwrap();
        write(&sink, &body, 1000, 1).unwrap();
        let distance = sink.insert(1000, len, 3000, &Never).unwrap();
        assert_eq!(distance, PART_LEN);
        let head = bytes(1000 + distance);
        write_all_at(&sink, 0, &mut [IoSlice::new(&head)], &Never).unwrap();
        sink.publish(len + distance, Ending::Finished, &Never).unwrap();
        assert!(object.state().object.as_deref() == Some(&[&head, &body[1000..]].concat()[..]));
    }
}

#[test]
fn failures_publish_nothing_and_abort_what_was_begun() {
    for (stage, len, aborted) in [
        (Stage::Put, 1000, 0),
        (Stage::Begin, 4 * PART_LEN, 0),
        (Stage::Part, 4 * PART_LEN, 1),
        (Stage::Complete, 4 * PART_LEN, 1),
    ] {
        let object = RamObject { failing: Some(stage), ..object(&format!("{stage:?}")) };
        object.state().object = Some(b"old".to_vec());
        let object = Arc::new(object);
        let mut sink = sink(&object);
        let written = write(&sink, &bytes(len), 1000, 2)
            .and_then(|()| sink.publish(len, Ending::Finished, &Never));
        assert!(written.unwrap_err().to_string().contains("fails"), "{stage:?}");
        drop(sink);
        assert_eq!(object.state().aborted, aborted, "{stage:?}");
        assert_eq!(object.state().object.as_deref(), Some(&b"old"[..]), "{stage:?}");
    }
}

#[test]
fn unfinished_upload_is_aborted() {
    for ending in [None, Some(Ending::Unclosed)] {
        let object = Arc::new(object("unfinished"));
        let mut sink = sink(&object);
        write(&sink, &bytes(3 * PART_LEN), 1000, 1).unwrap();
        if let Some(ending) = ending {
            let published = sink.publish(3 * PART_LEN, ending, &Never).unwrap();
            assert_eq!(published, Published::Aborted);
        }
        drop(sink);
        // One at a time: each holds the lock to the end of its statement.
        assert_eq!(object.state().aborted, 1);
        assert!(object.state().object.is_none());
    }
}

#[test]
fn save_is_overtaken_by_a_later_one_that_was_complete_before() {
    let object = Arc::new(object("overtaken"));
    let (mut earlier, mut later) = (sink(&object), sink(&object));
    write(&earlier, &bytes(3 * PART_LEN), 1000, 1).unwrap();
    write(&later, &bytes(2000), 1000, 1).unwrap();
    assert_eq!(later.publish(2000, Ending::Finished, &Never).unwrap(), Published::InPlace);
    let published = earlier.publish(3 * PART_LEN, Ending::Finished, &Never).unwrap();
    assert_eq!(published, Published::Overtaken);
    assert!(object.state().object.as_ref() == Some(&bytes(2000)));
    assert_eq!(object.state().aborted, 1);
}

#[test]
fn so_many_parts_are_sent_at_once_as_there_is_memory_for() {
    let len = 9 * PART_LEN;
    for (parts, least, most) in [(None, 3, 16), (Some(4), 3, 4), (Some(1), 1, 1)] {
        let meeting = (least > 1).then(|| Barrier::new(least));
        let object = Arc::new(RamObject { meeting, ..object(&format!("at once {parts:?}")) });
        let mut sink = sink(&object);
        sink.reserve(&Reservation { parts, ..reservation(1000, len) }).unwrap();
        let writers = sink.facts().max_writers;
        assert!((least..=most).contains(&writers), "{writers}");
        write(&sink, &bytes(len), 1000, writers).unwrap();
        sink.publish(len, Ending::Finished, &Never).unwrap();
        assert!((least..=most).contains(&object.state().most_under_way), "{parts:?}");
        assert!(object.state().object.as_ref() == Some(&bytes(len)));
    }
}
