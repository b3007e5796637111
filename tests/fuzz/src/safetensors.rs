//! `.safetensors` files, and how the library of that name reads them.

use std::collections::HashSet;
use std::fmt::Formatter;

use ::safetensors::SafeTensors;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::json;
use tensorizer::{Tensor, Verify};

use crate::input::{Faults, Input, damage};
use crate::{check_slices, load_all, open};

const TYPES: [(&str, u64); 12] = [
    ("U8", 8),
    ("F32", 32),
    ("BF16", 16),
    ("C64", 64),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("BOOL", 8),
    ("I64", 64),
    ("F8_E8M0", 8),
    ("U16", 16),
    ("F6_E3M2", 6),
    ("F8_E4M3FNUZ", 8),
];
const NAMES: [&str; 8] = ["a", "b", "", "\u{1e}[0]", "__metadata__", "ü", "a.b", "\0"];

/// Length, header and data.
pub fn pack(json: &[u8], data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json, data].concat()
}

/// A file of up to four tensors.
pub fn file(input: &mut Input<'_>) -> Vec<u8> {
    let mut tensors = Vec::new();
    for _ in 0..input.below(5) {
        let &(dtype, bits) = input.one_of(&TYPES);
        let name = *input.one_of(&NAMES);
        let mut shape = Vec::new();
        for _ in 0..input.below(4) {
            shape.push(*input.one_of(&[8u64, 1, 2, 3, 0, 64]));
        }
        let bits = shape.iter().product::<u64>() * bits;
        tensors.push((name, dtype, shape, bits / 8));
    }
    let metadata = input.once_in(3);
    let pad = input.below(9);
    let mut faults = Faults::new(input);
    let mut members = Vec::new();
    if metadata {
        members.push(format!(r#""__metadata__":{}"#, json!({ "format": "pt" })));
    }
    let mut end = 0;
    for (name, dtype, shape, len) in &tensors {
        let shape: Vec<u64> = shape.iter().map(|&dim| faults.field(dim)).collect();
        let dtype = TYPES.get(faults.field(99) as usize).map_or(*dtype, |found| found.0);
        let offsets = [faults.field(end), faults.field(end + len)];
        let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        members.push(format!("{}:{info}", json!(name)));
        end += len;
    }
    if faults.field(0) != 0 && members.len() > 1 {
        members.swap(0, 1);
    }
    let text = format!("{{{}}}{:pad$}", members.join(","), "");
    let data: Vec<u8> = (0..end).map(|at| at as u8 & 1).collect();
    let mut bytes = pack(text.as_bytes(), &data);
    damage(&mut bytes, faults.input());
    bytes
}

/// Files that only we refuse: a part of our message, and the reason.
const STRICTER: [(&str, &str); 9] = [
    ("comes twice", "a key of the metadata twice"),
    ("duplicate field", "the metadata twice"),
    ("Conflicting tensor paths", "two tensors of one name"),
    ("at most 64 dimensions", "torch has no more"),
    ("is too large", "torch cannot compute the strides of such shapes"),
    ("expected a string", "dtypes as objects"),
    ("no format that tensorizer reads", "white space before the header"),
    ("needs a last dimension that is a multiple", "torch packs several values into one element"),
    ("name is too long", "more than 65,535 bytes of name"),
];

/// Reads a file both ways. The library accepts each file that we accept, with the same content.
pub fn compare(bytes: &[u8]) {
    let theirs = SafeTensors::deserialize(bytes);
    let file = match open(bytes) {
        Ok(file) => file,
        Err(error) => {
            let said = error.to_string();
            let known = theirs.is_err()
                || STRICTER.iter().any(|(part, _)| said.contains(part))
                || has_a_name_twice(bytes);
            assert!(known, "only we refuse it: {said}");
            return;
        }
    };
    if !bytes.starts_with(b"|TZR|") && !bytes.starts_with(b"PK\x03\x04") {
        compare_tensors(&file, bytes, &theirs.expect("we take it"));
    }
}

/// True if a header has two tensors of one name. The library takes the last one, and does not check
/// the other.
fn has_a_name_twice(bytes: &[u8]) -> bool {
    let Some((head, rest)) = bytes.split_first_chunk() else { return false };
    let Some(text) = rest.get(..u64::from_le_bytes(*head) as usize) else { return false };
    serde_json::from_slice(text).is_ok_and(|Twice(twice)| twice)
}

struct Twice(bool);

impl<'de> Deserialize<'de> for Twice {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_map(Names)
    }
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = Twice;

    fn expecting(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Twice, M::Error> {
        let (mut names, mut twice) = (HashSet::new(), false);
        while let Some((name, _)) = map.next_entry::<String, IgnoredAny>()? {
            twice |= !names.insert(name);
        }
        Ok(Twice(twice))
    }
}

fn compare_tensors(file: &tensorizer::TensorFile, bytes: &[u8], theirs: &SafeTensors<'_>) {
    assert_eq!(file.entries().len(), theirs.len());
    let loaded = load_all(file, Verify::Nothing).expect("no more bytes than in the file");
    let of_torch = file.entries().iter().all(|entry| entry.dtype.is_in_torch());
    let loaded = loaded.expect("what was opened");
    for tensor in &loaded {
        let name = tensor.name().key().expect("no path");
        let other = theirs.tensor(&name).expect("a tensor of both");
        assert_eq!(tensor.bytes(), other.data(), "{name}");
        let (called, values) = tensor.dtype().safetensors().expect("a type of both");
        assert_eq!(called, other.dtype().to_string());
        let mut shape: Vec<usize> = tensor.shape().iter().map(|&dim| dim as usize).collect();
        if values > 1 {
            *shape.last_mut().expect("several values in one element") *= values as usize;
        }
        assert_eq!(shape, other.shape());
    }
    check_read(&loaded, bytes);
    if of_torch {
        check_slices(file, &loaded);
    }
}

fn check_read(loaded: &[Tensor], bytes: &[u8]) {
    let all: usize = loaded.iter().map(|tensor| tensor.bytes().len()).sum();
    assert!(all <= bytes.len());
}
