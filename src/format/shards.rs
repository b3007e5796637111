//! The index of a checkpoint in several files: `*.safetensors.index.json` or `*.bin.index.json`, as
//! Hugging Face's libraries write it. It states the file of each tensor.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::json::Scalar;
use super::safetensors::{self, StringMap};
use crate::error::{Malformed, Shortened};

/// Maximum bytes of an index that is read, as for a safetensors header.
pub const MAX_LEN: u64 = super::safetensors::MAX_HEADER_LEN;
/// File names that are looked for in the folder of a model, in this order: those of transformers
/// and of this package, of diffusers and PEFT, then those of half precision. Each costs a request
/// if the server has none of the files before it.
pub const MODEL_FILE_NAMES: [&str; 21] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model.tensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
    "adapter_model.bin",
    "model.fp16.safetensors",
    "model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.fp16.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.fp16.index.json",
    "pytorch_model.fp16.bin",
    "pytorch_model.bin.index.fp16.json",
    "diffusion_pytorch_model.fp16.bin",
    "diffusion_pytorch_model.bin.index.fp16.json",
];
/// The same names, shortened for messages.
pub const EXPECTED_MODEL_FILES: &str = "model.safetensors, model.tensors, pytorch_model.bin, \
    diffusion_pytorch_model.safetensors, adapter_model.safetensors, their indexes and fp16 variants";
/// Endings of file addresses; addresses of folders hardly ever have them.
pub const FILE_EXTENSIONS: [&str; 7] =
    [".tensors", ".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"];

/// The bytes with which some editors begin a text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A parsed index.
#[derive(Debug, PartialEq, Eq)]
pub struct ShardMap {
    /// The names of the files, without duplicates and in sorted order.
    pub files: Vec<String>,
    /// The file_index of the file of each tensor.
    pub tensors: BTreeMap<String, usize>,
    /// Names and values. Numbers and booleans are converted to text; other values are left out.
    pub metadata: Vec<(String, String)>,
}

/// True for the name of an index, also of a variant: `model.safetensors.index.fp16.json`, as
/// libraries name it, and `diffusion_pytorch_model.safetensors.fp16.index.json`, as diffusers did
/// before.
pub fn is_index_name(name: &str, format: &str) -> bool {
    let Some((_, rest)) = name.strip_suffix(".json").and_then(|stem| stem.rsplit_once(format))
    else {
        return false;
    };
    matches!(
        rest.split('.').collect::<Vec<_>>()[..],
        ["", "index"] | ["", "index", _] | ["", _, "index"]
    )
}

/// True if a file with these first bytes may be an index.
pub fn recognises(bytes: &[u8]) -> bool {
    // The length field of a safetensors file may look like the beginning of text.
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    text.trim_ascii_start().starts_with(b"{") && !safetensors::recognises(bytes)
}

/// Reads an index.
pub fn parse(json: &[u8]) -> Result<ShardMap, Malformed> {
    let malformed = |what: String| Malformed::new(0, format!("the index of shards: {what}"));
    let json = json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json);
    let text = std::str::from_utf8(json).map_err(|e| malformed(format!("it is not UTF-8: {e}")))?;
    let raw: RawShardMap = serde_json::from_str(text).map_err(|e| {
        let what = e.to_string();
        if what.starts_with("missing field") {
            let beginning: String =
                text.chars().filter(|one| !one.is_control()).take(100).collect();
            let what = format!(
                "JSON without `weight_map`, so no index of shards: {}",
                Shortened(&beginning)
            );
            return Malformed::new(0, what);
        }
        malformed(Shortened(&what).to_string())
    })?;
    let names: BTreeSet<&String> = raw.weight_map.0.values().collect();
    for name in &names {
        if let Some(what) = name_problem(name) {
            return Err(malformed(format!("the file name `{}` {what}", Shortened(name))));
        }
    }
    let files: Vec<String> = names.into_iter().cloned().collect();
    if files.is_empty() {
        return Err(malformed("it names no tensors".to_owned()));
    }
    let file_index = |name: String| files.binary_search(&name).unwrap_or(usize::MAX);
    let tensors = raw.weight_map.0.into_iter().map(|(tensor, file)| (tensor, file_index(file)));
    let tensors = tensors.collect();
    let metadata = raw.metadata.into_iter().flatten();
    let metadata = metadata.filter_map(|(name, Scalar(value))| Some((name, value?)));
    Ok(ShardMap { metadata: metadata.collect(), files, tensors })
}

/// Returns the defect of a shard's name; None if it is valid. Shards are in the folder of their
/// index, or below it.
fn name_problem(name: &str) -> Option<&'static str> {
    let mut steps = name.split('/');
    if name.is_empty() {
        Some("is empty")
    } else if name.starts_with('/') || name.contains(':') || name.contains('\\') {
        Some("begins with `/`, or has a `:` or `\\`: expected a path below the folder of the index")
    } else if steps.any(|step| matches!(step, "" | "." | "..")) {
        Some("has an empty, `.` or `..` component: expected a path below the folder of the index")
    } else if name.contains(|c: char| c.is_control() || "?#%".contains(c)) {
        Some("has a control character, or one of `?`, `#` and `%`, which shard names may not have")
    } else {
        None
    }
}

#[derive(Deserialize)]
struct RawShardMap {
    metadata: Option<BTreeMap<String, Scalar>>,
    weight_map: StringMap,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn file_names_outside_the_folder_are_refused() {
        for good in ["a.safetensors", "a/b.safetensors", "a b", "ümlaut", "..a", "a..", "...", "~"]
        {
            assert_eq!(name_problem(good), None, "{good}");
        }
        for bad in [
            "", ".", "..", "/a", "a/", "a//b", "./a", "../a", "a/../b", "a/..", "C:a", "a\\b",
            "s3://b/k", "a?b", "a#b", "%2e", "a\0", ".\t./a", ".\n./a", "a\x1b", "a\u{85}",
        ] {
            assert!(name_problem(bad).is_some(), "{bad:?}");
        }
    }

    #[test]
    fn index_names_are_recognised() {
        for name in [
            "model.safetensors.index.json",
            "model.safetensors.index.fp16.json",
            "diffusion_pytorch_model.safetensors.fp16.index.json",
            "a.safetensors.b.safetensors.index.json",
        ] {
            assert!(is_index_name(name, ".safetensors"), "{name}");
            assert!(!is_index_name(name, ".bin"), "{name}");
        }
        assert!(is_index_name("pytorch_model.bin.index.json", ".bin"));
        for name in [
            "model.safetensors",
            "model.safetensors.json",
            "index.json",
            "model.index.json",
            "model.safetensors.index.a.b.json",
            "model.safetensorsx.index.json",
            "",
        ] {
            assert!(!is_index_name(name, ".safetensors"), "{name}");
        }
    }

    #[test]
    fn safetensors_file_is_no_shard_index() {
        for len in [0x7b_u64, 0x0a7b, 0x7b20, 0x7b09, 0x7b_2020] {
            let mut bytes = len.to_le_bytes().to_vec();
            bytes.extend(br#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#);
            assert!(super::super::safetensors::recognises(&bytes));
            assert!(!recognises(&bytes), "{len:#x}");
        }
        for json in [r#"{"weight_map":{"a":"b"}}"#, " \n{\n  \"metadata\": {}", "\t{\"a\": 1}"] {
            assert!(recognises(json.as_bytes()), "{json}");
        }
    }

    proptest! {
        #[test]
        fn parsed_index_states_the_file_of_each_tensor(
            map in proptest::collection::btree_map(".{0,5}", "[a-c/.]{0,4}", 0..9),
        ) {
            let json = serde_json::json!({ "weight_map": map }).to_string();
            let good = !map.is_empty() && map.values().all(|file| name_problem(file).is_none());
            let found = parse(json.as_bytes());
            prop_assert_eq!(found.is_ok(), good);
            if let Ok(index) = found {
                prop_assert!(index.files.is_sorted_by(|a, b| a < b));
                prop_assert_eq!(index.tensors.len(), map.len());
                for (tensor, file) in &map {
                    prop_assert_eq!(index.files.get(index.tensors[tensor]), Some(file));
                }
            }
        }
    }
}
