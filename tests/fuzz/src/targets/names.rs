//! Names, paths, their tree, and strings of types.
use tensorizer::format::dtype::DType;
use tensorizer::format::name::{Component, Name};
use tensorizer::format::name_tree::NameTree;

/// Tries an input.
pub fn run(bytes: &[u8]) {
    if let Ok(dtype) = DType::parse(bytes) {
        assert_eq!(DType::parse(dtype.stored().as_bytes()), Ok(dtype));
    }
    let mut tree = NameTree::default();
    let mut paths: Vec<Vec<Component>> = Vec::new();
    for stored in bytes.split(|&byte| byte == b'\n') {
        let Ok(name) = Name::parse(stored) else { continue };
        let path = name.components();
        // A path that is encoded again is the same path, and its name is valid.
        match Name::from_path(&path) {
            Ok(again) => {
                assert!(again == name && again.components() == path);
                assert_eq!(Name::parse(again.stored().as_bytes()), Ok(again));
            }
            Err(what) => assert!(what.contains("too long"), "{what}"),
        }
        let fits = paths.iter().all(|other| are_of_one_tree(other, &path));
        assert_eq!(tree.insert(&name, paths.len()).is_ok(), fits, "{paths:?} and {path:?}");
        if fits {
            assert_eq!(tree.find(name.stored()), Some(paths.len()));
            paths.push(path);
        }
    }
}

/// Neither goes through the other, and where they part both have keys or both have indices.
fn are_of_one_tree(one: &[Component], other: &[Component]) -> bool {
    match one.iter().zip(other).find(|(a, b)| a != b) {
        None => false,
        Some((a, b)) => matches!(a, Component::Key(_)) == matches!(b, Component::Key(_)),
    }
}
