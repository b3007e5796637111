//! Memory that is short at any moment of a save or a load: an error that says so, never the end of
//! the process, and no file in the place of an old one.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tensorizer::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use tensorizer::io::local::FileSink;
use tensorizer::{
    Error, LoadOptions, Never, SaveOptions, SaveTensor, TensorFile, Verify, Writer, load,
};

/// Smaller allocations are not refused: lists of some bytes for each tensor are plain.
const LARGE: usize = 128 << 10;
const TENSORS: usize = 200;
/// No allocation is to be refused.
const NONE: u64 = u64::MAX;

/// Refuses one of the large allocations of this process.
struct Refusing;

static UNTIL_REFUSED: AtomicU64 = AtomicU64::new(NONE);
/// The value that `begin_to_refuse` sets it to.
static TO_BE_REFUSED: AtomicU64 = AtomicU64::new(NONE);

/// From here on, allocations are the library's and not those of this test.
fn begin_to_refuse() {
    UNTIL_REFUSED.store(TO_BE_REFUSED.load(Ordering::SeqCst), Ordering::SeqCst);
}

impl Refusing {
    fn refuses(size: usize) -> bool {
        let refuse =
            |remaining: u64| (remaining < NONE && size > LARGE).then(|| remaining.wrapping_sub(1));
        UNTIL_REFUSED.fetch_update(Ordering::SeqCst, Ordering::SeqCst, refuse) == Ok(0)
    }
}

// SAFETY: the system's allocator; null says that there is no memory.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if Self::refuses(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as for the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if Self::refuses(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as for the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() && Self::refuses(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: as for the caller.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as for the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Names and bytes; most are small, some are hashed and encrypted in pieces.
fn tensors() -> Vec<(String, Vec<u8>)> {
    let small = (0..TENSORS).map(|number| (format!("small.{number}"), vec![7; number % 5]));
    small
        .chain([("large".to_owned(), vec![1; 5 << 20]), ("b".to_owned(), vec![2; 1 << 20])])
        .collect()
}

fn to_save(tensors: &[(String, Vec<u8>)]) -> Vec<SaveTensor<'_>> {
    let mut listed = Vec::new();
    for (name, data) in tensors {
        listed.push(SaveTensor::new(name, &[data.len() as u64], data.as_slice()).unwrap());
    }
    listed
}

fn secret() -> Key {
    Key::new(&[5; 32]).unwrap()
}

fn encrypted() -> SaveOptions {
    let encryption = EncryptionOptions { key: secret(), derivation: None, manifest: true };
    SaveOptions { encryption: Some(Arc::new(encryption)), ..SaveOptions::default() }
}

/// Saves to a path in some calls.
fn write(path: &Path, options: SaveOptions, calls: usize, safetensors: bool) -> Result<(), Error> {
    let tensors = tensors();
    let lists: Vec<_> = tensors.chunks(tensors.len().div_ceil(calls)).map(to_save).collect();
    begin_to_refuse();
    let mut writer = Writer::new(Box::new(FileSink::create(path)?), 0, options)?;
    for list in lists {
        if safetensors {
            writer.write_safetensors(list, &Never)
        } else {
            writer.write(list, &Never)
        }?;
    }
    writer.finish(&Never)
}

/// Does some work as often as it makes large allocations, each time with another one refused. It
/// must end with an error about memory, or in spite of that. Returns how often it was an error.
fn with_each_refused(what: &str, work: &dyn Fn() -> Result<(), Error>) -> usize {
    let mut refused = 0;
    for number in 0.. {
        TO_BE_REFUSED.store(number, Ordering::SeqCst);
        let outcome = work();
        let remaining = UNTIL_REFUSED.swap(NONE, Ordering::SeqCst);
        TO_BE_REFUSED.store(NONE, Ordering::SeqCst);
        if remaining < NONE {
            outcome.unwrap();
            break;
        }
        match outcome {
            Ok(()) => {}
            Err(Error::OutOfMemory { .. }) => refused += 1,
            Err(other) => panic!("{what}, allocation {number}: {other:?}"),
        }
    }
    println!("{what}: {refused} refused");
    refused
}

type Options = fn() -> SaveOptions;

/// Runs in a child process: a refused allocation that cannot fail with an error would end it.
#[test]
#[ignore = "begun by the next one"]
fn refused_allocations_are_errors_in_a_child_process() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| -> PathBuf { folder.path().join(name) };
    let saves: [(&str, Options, usize, bool); 4] = [
        ("plain.tensors", SaveOptions::default, 1, false),
        ("calls.tensors", SaveOptions::default, 3, false),
        ("encrypted.tensors", encrypted, 1, false),
        ("plain.safetensors", SaveOptions::default, 1, true),
    ];
    for (name, options, calls, safetensors) in saves {
        let path = at(name);
        std::fs::write(&path, "old").unwrap();
        let refused = with_each_refused(&format!("saving {name}"), &|| {
            let outcome = write(&path, options(), calls, safetensors);
            let replaced = std::fs::metadata(&path).unwrap().len() > 3;
            assert_eq!(replaced, outcome.is_ok());
            std::fs::write(&path, "old").unwrap();
            outcome
        });
        // Bytes that are not hashed are written without a copy.
        assert_eq!(refused > 0, !safetensors, "saving {name}");
        write(&path, options(), calls, safetensors).unwrap();
    }
    let shards = at("model.safetensors.index.json");
    let weights =
        tensors().into_iter().map(|(name, _)| format!("\"{name}\":\"plain.safetensors\""));
    let weights = weights.collect::<Vec<_>>().join(",");
    std::fs::write(shards, format!("{{\"weight_map\":{{{weights}}}}}")).unwrap();
    for (name, verify, map) in [
        ("plain.tensors", Verify::Nothing, false),
        ("plain.tensors", Verify::All, false),
        ("plain.tensors", Verify::Nothing, true),
        ("plain.safetensors", Verify::Nothing, false),
        ("model.safetensors.index.json", Verify::Nothing, false),
        ("encrypted.tensors", Verify::All, false),
    ] {
        // The memory of tensors is mapped, and a header of safetensors is short.
        let least = usize::from(!name.contains("safetensors"));
        let options = LoadOptions { verify, map, ..LoadOptions::default() };
        let all: Vec<usize> = (0..tensors().len()).collect();
        let what = format!("loading {name}, {verify:?}, mapped: {map}");
        let refused = with_each_refused(&what, &|| {
            begin_to_refuse();
            let mut file = TensorFile::open(&at(name))?;
            if name.starts_with("encrypted") {
                let options = DecryptionOptions::new(Secret::Key(secret()));
                file = file.decrypt(Arc::new(options), &Never)?;
            }
            load(&file, &all, &options, &Never).map(drop)
        });
        assert!(refused >= least, "{what}");
    }
}

#[test]
fn refused_allocations_are_errors() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = "short_memory::refused_allocations_are_errors_in_a_child_process";
    let outcome = child.args(["--exact", name, "--ignored", "--nocapture"]).output().unwrap();
    let output = String::from_utf8_lossy(&outcome.stdout);
    let errors = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{output}\n{errors}");
    assert!(output.contains("1 passed"), "{output}\n{errors}");
}
