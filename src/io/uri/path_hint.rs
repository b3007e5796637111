//! Guesses at the intended meaning of a path that does not exist, for messages.

use std::path::Path;

use super::scheme::SCHEMES;

/// Endings of files, which names of repositories do not have.
const FILES: [&str; 9] =
    ["tensors", "safetensors", "bin", "pt", "pth", "json", "index", "gguf", "ckpt"];

/// The end of a message about a path that does not exist; None without a guess.
pub fn path_hint(path: &str) -> Option<String> {
    let one_slash = path.split_once(":/").filter(|(scheme, rest)| {
        !rest.starts_with('/') && SCHEMES.iter().any(|(name, _)| name == scheme)
    });
    if let Some((scheme, rest)) = one_slash {
        return Some(format!(" (an address has two slashes: {scheme}://{rest})"));
    }
    let (owner, name) = path.split_once('/')?;
    let has_ending = name.rsplit_once('.').is_some_and(|(_, ending)| FILES.contains(&ending));
    let is_part = |text: &str, more: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c) || more.contains(c);
        !text.is_empty() && text.chars().all(fits)
    };
    (is_part(owner, "") && is_part(name, ".") && !has_ending && !Path::new(owner).is_dir())
        .then(|| format!(" (a repository of the Hugging Face hub would be hf://{path})"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_repositories_are_recognized() {
        for (path, part) in [
            ("s3:/bucket/x", "s3://bucket/x"),
            ("hf:/org/repo", "hf://org/repo"),
            ("Qwen/Qwen2-0.5B", "hf://Qwen/Qwen2-0.5B"),
        ] {
            assert!(path_hint(path).unwrap().contains(part), "{path}");
        }
    }

    #[test]
    fn ordinary_paths_get_no_hint() {
        for path in [
            "a",
            "/a/b",
            "./a/b",
            "a/b/c",
            "missing.tensors",
            "folder/model.safetensors",
            "x:/y",
            "",
        ] {
            assert_eq!(path_hint(path), None, "{path}");
        }
    }
}
