//! Guesses at the intended meaning of a path that does not exist, for messages.

use std::path::Path;

use super::scheme::SCHEMES;

/// Endings of files, which names of repositories do not have.
const FILES: [&str; 9] =
    ["tensors", "safetensors", "bin", "pt", "pth", "json", "index", "gguf", "ckpt"];

/// The end of a message about a path that does not exist; None without a guess.
pub fn path_hint(path: &str) -> Option<String> {
    if let Some(hint) = misspelled(path) {
        return Some(format!(" ({hint})"));
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

/// Describes the mistake in a path that is a misspelled address or begins with `~/`; None for others.
/// An absolute path is never one.
pub fn misspelled(path: &str) -> Option<String> {
    if path == "~" || path.starts_with("~/") {
        return Some("`~` is not expanded: use os.path.expanduser".to_owned());
    }
    let (scheme, rest) = path.split_once(":/").filter(|(_, rest)| !rest.starts_with('/'))?;
    let is_scheme = |name: &str| scheme.eq_ignore_ascii_case(name);
    let slashes = if is_scheme("file") { "///" } else { "//" };
    let is_known = is_scheme("file") || SCHEMES.iter().any(|(name, _)| is_scheme(name));
    // A word of one letter is a drive of Windows.
    let is_word = scheme.len() > 1
        && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let is_folder = || Path::new(&format!("{scheme}:")).is_dir();
    (is_known || (is_word && !is_folder()))
        .then(|| format!("an address has two slashes: {scheme}:{slashes}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_repositories_are_recognized() {
        for (path, part) in [
            ("s3:/bucket/x", "s3://bucket/x"),
            ("hf:/org/repo", "hf://org/repo"),
            ("file:/a/b", "file:///a/b"),
            ("~/a", "`~` is not expanded"),
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
