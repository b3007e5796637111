//! The index of a checkpoint in several files, `*.safetensors.index.json` or `*.bin.index.json`, as
//! Hugging Face's libraries write it: which file each tensor is in.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::safetensors::Strings;
use crate::error::{Malformed, Shown};

/// Bytes of the longest index that is read, as of a safetensors header.
pub const MAX_LEN: u64 = super::safetensors::MAX_HEADER_LEN;
/// What a folder of files is looked through for, in this order.
pub const IN_FOLDERS: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// What an index says.
#[derive(Debug, PartialEq, Eq)]
pub struct Index {
    /// The files, each once, in the order of their names.
    pub files: Vec<String>,
    /// For each tensor the number of its file.
    pub tensors: BTreeMap<String, usize>,
    /// Names and values; those of numbers as they are written.
    pub metadata: Vec<(String, String)>,
}

/// Whether a file that begins so may be one.
pub fn begins(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().starts_with(b"{")
}

/// Reads an index.
pub fn parse(json: &[u8]) -> Result<Index, Malformed> {
    let malformed = |what: String| Malformed::new(0, format!("the index of shards: {what}"));
    let raw: Raw =
        serde_json::from_slice(json).map_err(|e| malformed(Shown(&e.to_string()).to_string()))?;
    let names: BTreeSet<&String> = raw.weight_map.0.iter().map(|(_, file)| file).collect();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        if let Some(what) = what_is_wrong_with(name) {
            return Err(malformed(format!("the file name `{}` {what}", Shown(name))));
        }
        files.push(name.clone());
    }
    if files.is_empty() {
        return Err(malformed("it names no tensors".to_owned()));
    }
    let number = |name: String| files.binary_search(&name).unwrap_or(usize::MAX);
    let tensors = raw.weight_map.0.into_iter().map(|(tensor, file)| (tensor, number(file)));
    let tensors = tensors.collect();
    let metadata = raw.metadata.unwrap_or_default().into_iter().filter_map(|(name, value)| {
        let value = match value {
            Value::String(text) => text,
            Value::Number(_) | Value::Bool(_) => value.to_string(),
            _ => return None,
        };
        Some((name, value))
    });
    Ok(Index { metadata: metadata.collect(), files, tensors })
}

/// Shards lie beside their index, or below it.
fn what_is_wrong_with(name: &str) -> Option<&'static str> {
    let mut steps = name.split('/');
    if name.is_empty() {
        Some("is empty")
    } else if name.starts_with('/') || name.contains(':') || name.contains('\\') {
        Some("is not one of a file beside the index")
    } else if steps.any(|step| matches!(step, "" | "." | "..")) {
        Some("leads out of the folder of the index")
    } else if name.contains(['\0', '?', '#', '%']) {
        Some("has a character that names of shards may not have")
    } else {
        None
    }
}

#[derive(Deserialize)]
struct Raw {
    metadata: Option<serde_json::Map<String, Value>>,
    weight_map: Strings,
}
