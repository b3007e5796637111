//! Checks of the names of files that are written.

use std::path::Path;

use super::path_hint::misspelled;
use crate::error::{Error, Result};
use crate::io::local::FileSink;

/// Endings that promise another format than `.tensors`.
const OTHER_FORMATS: [&str; 7] = ["safetensors", "safetensor", "ckpt", "gguf", "npz", "h5", "onnx"];
/// Endings of files of `torch.save`. The serializer of tensorizer 2 wrote to such names too.
const OF_TORCH: [&str; 3] = ["pt", "pth", "bin"];

/// Begins a local file that will be `path` once it is published.
///
/// # Errors
///
/// The path is a misspelled address, and those of [`FileSink::create`].
pub fn create_file(path: &Path) -> Result<FileSink> {
    check_target(path)?;
    FileSink::create(path)
}

/// Refuses to write to a misspelled address, for which folders would be made.
pub fn check_target(path: &Path) -> Result<()> {
    let path = path.display().to_string();
    match misspelled(&path) {
        None => Ok(()),
        Some(hint) => Err(Error::InvalidArgument(format!(
            "cannot write `{path}`: {hint}; if a local folder of that name is meant, give its \
             absolute path"
        ))),
    }
}

/// Refuses a `.tensors` file under a name, a path or an address, that promises another format.
/// `allows_torch` is for callers that tensorizer 2 had: names of `torch.save` are no error there.
pub fn check_tensors_name(uri: &str, allows_torch: bool) -> Result<()> {
    // The query of an address is no part of its name.
    let name = if uri.contains("://") { uri.split('?').next().unwrap_or(uri) } else { uri };
    let Some((_, ending)) = name.rsplit_once('.') else { return Ok(()) };
    let is_of = |formats: &[&str]| formats.iter().any(|other| ending.eq_ignore_ascii_case(other));
    if !is_of(&OTHER_FORMATS) && (allows_torch || !is_of(&OF_TORCH)) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name} would be a .tensors file, but .{ending} is the ending of another format, whose \
         programs could not read it: end it with .tensors; or with .safetensors, which \
         tensorizer.save and `tensorizer cp` write"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelled_addresses_are_not_written() {
        for (path, part) in [
            ("s3:/bucket/key", "s3://bucket/key"),
            ("S3:/bucket/key", "S3://bucket/key"),
            ("gs:/b/k", "gs://b/k"),
            ("az:/c/k", "az://c/k"),
            ("abfss:/c@a/k", "abfss://c@a/k"),
            ("hf:/org/repo", "hf://org/repo"),
            ("http:/host/k", "http://host/k"),
            ("redis:/h/k", "redis://h/k"),
            ("file:/tmp/x", "file:///tmp/x"),
            ("gcs:/b/k", "gcs://b/k"),
            ("~/x", "`~` is not expanded"),
            ("~", "`~` is not expanded"),
        ] {
            let error = check_target(Path::new(path)).unwrap_err();
            assert!(
                matches!(&error, Error::InvalidArgument(what) if what.contains(part)),
                "{error}"
            );
        }
        for path in ["/s3:/b", "./s3:/b", "a/s3:/b", "x:/y", "~x", "a~/b", "s3", "run-1: a/b"] {
            assert!(check_target(Path::new(path)).is_ok(), "{path}");
        }
    }

    #[test]
    fn names_of_other_formats_are_refused() {
        for name in [
            "m.safetensors",
            "m.SafeTensors",
            "m.safetensor",
            "s3://b/m.gguf?versionId=1",
            "/a/m.npz",
            "m.ckpt",
            "m.H5",
            "m.onnx",
            "m.tensors.pt",
            "m.PTH",
            "m.bin",
        ] {
            let error = check_tensors_name(name, false).unwrap_err().to_string();
            assert!(error.contains("another format"), "{error}");
        }
        for name in ["m", "m.tensors", "m.pt.tensors", "bin", "m.gguf/x", "m.binary", "", "."] {
            assert!(check_tensors_name(name, false).is_ok(), "{name}");
        }
        for (name, is_torchs) in [("m.PTH", true), ("m.bin", true), ("m.npz", false)] {
            assert_eq!(check_tensors_name(name, true).is_ok(), is_torchs, "{name}");
        }
    }
}
