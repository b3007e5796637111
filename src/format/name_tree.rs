//! The names of a file as a tree: no path is a prefix of another, and the keys of one level are all
//! strings or all indices.
//!
//! The tree is never built. Names are sorted by the bytes of their canonical form, without its
//! closing bracket. All paths below a path then follow it directly: their next byte is `,`, and the
//! next byte of any other path that begins with the same bytes sorts after `,`. A new structured
//! name can therefore conflict only with its two neighbours. Plain names sort apart from these, and
//! are looked up.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;
use std::sync::Arc;

use super::name::{Component, MARK, Name, as_plain};
use super::path::encode_key;

/// The beginning of every path that is not a plain name.
const ROOT: &str = "\u{1e}[";

/// Adds names one by one, and refuses those that do not form a tree with the earlier ones.
#[derive(Default)]
pub struct NameTree {
    numbers: BTreeMap<CanonicalPath, usize>,
    /// The number of names that are plain.
    plain: usize,
}

impl NameTree {
    /// Adds a name with the number `index`. A name that conflicts with an earlier one is an error,
    /// and is not added.
    pub fn insert(&mut self, name: &Name, index: usize) -> Result<(), String> {
        let conflict = || format!("Conflicting tensor paths: {name} conflicts with another name");
        let path = CanonicalPath(name.canonical());
        let conflicts = if path.is_plain() {
            self.structured() > 0 && self.plain_conflicts(&path)
        } else {
            self.structured_conflicts(&path, name)
        };
        if conflicts {
            return Err(conflict());
        }
        let plain = path.is_plain();
        match self.numbers.entry(path) {
            Entry::Occupied(_) => return Err(conflict()),
            Entry::Vacant(slot) => slot.insert(index),
        };
        self.plain += usize::from(plain);
        Ok(())
    }

    /// Removes a name.
    pub fn remove(&mut self, name: &Name) {
        let path = CanonicalPath(name.canonical());
        if self.numbers.remove(path.bytes()).is_some() {
            self.plain -= usize::from(path.is_plain());
        }
    }

    /// The number of a name, given in any of its stored spellings.
    pub fn find(&self, stored: &str) -> Option<usize> {
        if !stored.starts_with(MARK) {
            return self.numbers.get(stored.as_bytes()).copied();
        }
        let name = Name::parse(stored.as_bytes()).ok()?;
        self.numbers.get(CanonicalPath(name.canonical()).bytes()).copied()
    }

    fn structured(&self) -> usize {
        self.numbers.len() - self.plain
    }

    /// True if a plain name conflicts with structured names: their top level has indices, or its
    /// own key has a subtree.
    fn plain_conflicts(&self, path: &CanonicalPath) -> bool {
        let first = self.from(ROOT.as_bytes()).filter(|path| !path.is_plain());
        if first.is_some_and(|path| path.get(ROOT.len()).is_some_and(u8::is_ascii_digit)) {
            return true;
        }
        let mut same = String::from(ROOT);
        encode_key(path.bytes(), &mut same);
        self.from(same.as_bytes()).is_some_and(|next| next.is_below(same.as_bytes()))
    }

    fn structured_conflicts(&self, path: &CanonicalPath, name: &Name) -> bool {
        if self.plain > 0 {
            match name.components().next() {
                Some(Component::Key(key)) => {
                    let same = as_plain(&key).map(str::as_bytes);
                    if same.is_some_and(|key| self.numbers.contains_key(key)) {
                        return true;
                    }
                }
                _ => return true,
            }
        }
        let path = path.bytes();
        let before = self.numbers.range::<[u8], _>((Bound::Unbounded, Bound::Excluded(path)));
        let before = before.map(|(path, _)| path).next_back();
        let mut neighbours = before.into_iter().chain(self.from(path));
        neighbours.any(|other| {
            other.is_below(path) || is_below(path, other.bytes()) || kinds_differ(path, other)
        })
    }

    /// The first path at or after these bytes.
    fn from(&self, bytes: &[u8]) -> Option<&CanonicalPath> {
        let range = self.numbers.range::<[u8], _>((Bound::Included(bytes), Bound::Unbounded));
        range.map(|(path, _)| path).next()
    }
}

/// A name in its canonical form, ordered by its bytes without the closing bracket.
struct CanonicalPath(Arc<str>);

impl CanonicalPath {
    fn is_plain(&self) -> bool {
        !self.0.starts_with(MARK)
    }

    fn bytes(&self) -> &[u8] {
        let len = self.0.len() - usize::from(!self.is_plain());
        self.0.as_bytes().split_at(len).0
    }

    fn get(&self, at: usize) -> Option<&u8> {
        self.bytes().get(at)
    }

    fn is_below(&self, other: &[u8]) -> bool {
        is_below(self.bytes(), other)
    }
}

/// True if a path is longer than another one, and begins with all of its steps.
fn is_below(path: &[u8], other: &[u8]) -> bool {
    path.strip_prefix(other).is_some_and(|rest| rest.first() == Some(&b','))
}

/// True if, at the first step that differs, one path has a key and the other an index.
fn kinds_differ(path: &[u8], other: &CanonicalPath) -> bool {
    let common = path.iter().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    let kinds = [path.get(common), other.get(common)].map(|next| match next {
        Some(b'"') => Some(false),
        Some(b'0'..=b'9') => Some(true),
        _ => None,
    });
    matches!(kinds, [Some(a), Some(b)] if a != b) && !ends_in_string(path.split_at(common).0)
}

fn ends_in_string(beginning: &[u8]) -> bool {
    let mut in_string = false;
    let mut bytes = beginning.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' => drop(bytes.next()),
            _ => {}
        }
    }
    in_string
}

impl Borrow<[u8]> for CanonicalPath {
    fn borrow(&self) -> &[u8] {
        self.bytes()
    }
}

impl Ord for CanonicalPath {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes().cmp(other.bytes())
    }
}

impl PartialOrd for CanonicalPath {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for CanonicalPath {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for CanonicalPath {}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn name(stored: &str) -> Name {
        Name::parse(stored.as_bytes()).unwrap()
    }

    #[test]
    fn names_must_form_a_tree() {
        let build = |names: &[&str]| {
            let mut tree = NameTree::default();
            names.iter().enumerate().try_for_each(|(i, n)| tree.insert(&name(n), i))
        };
        assert!(build(&["a", "b", "a.b"]).is_ok());
        assert!(build(&["a", "\u{1e}[\"b\",0]", "\u{1e}[\"b\",1]"]).is_ok());
        assert!(build(&["\u{1e}[0]", "\u{1e}[1,\"x\"]"]).is_ok());
        assert!(build(&["\u{1e}[1]", "\u{1e}[12]", "\u{1e}[1234,0]", "\u{1e}[123]"]).is_ok());
        assert!(build(&["\u{1e}[\"\",\"a,\"]", "\u{1e}[\"\",\"a,1\"]"]).is_ok());
        assert!(build(&["\u{1e}[\"\",\"\\\"\"]", "\u{1e}[\"\",\"\\\"1\"]"]).is_ok());
        for bad in [
            &["a", "a"][..],
            &["a", "\u{1e}[\"a\",0]"],
            &["\u{1e}[\"a\",0]", "a"],
            &["a", "\u{1e}[0]"],
            &["\u{1e}[0]", "a"],
            &["\u{1e}[0]", "\u{1e}[ 0 ]"],
            &["\u{1e}[0,1]", "\u{1e}[0]"],
            &["\u{1e}[0]", "\u{1e}[0,1]"],
            &["\u{1e}[0,1]", "\u{1e}[0,\"x\"]"],
            &["\u{1e}[\"a\"]", "a"],
            &["é", "\u{1e}[\"\\u00e9\",0]"],
            &["\u{1e}[\"\\u00E9\",0,0]", "é"],
            &["\u{1e}[\"/\",0]", "\u{1e}[\"\\/\",0,0]"],
        ] {
            assert!(build(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn refused_and_removed_names_do_not_stay_in_the_tree() {
        let mut tree = NameTree::default();
        tree.insert(&name("a"), 0).unwrap();
        tree.insert(&name("a"), 1).unwrap_err();
        tree.insert(&name("\u{1e}[0]"), 1).unwrap_err();
        tree.insert(&name("\u{1e}[\"b\", \"\\u0063\"]"), 1).unwrap();
        assert_eq!((tree.find("a"), tree.find("\u{1e}[\"b\",\"c\"]")), (Some(0), Some(1)));
        assert_eq!((tree.find("\u{1e}[\"a\"]"), tree.find("\u{1e}[")), (Some(0), None));
        tree.remove(&name("a"));
        tree.insert(&name("\u{1e}[0]"), 2).unwrap_err();
        tree.remove(&name("\u{1e}[\"b\",\"c\"]"));
        tree.insert(&name("\u{1e}[0]"), 2).unwrap();
        assert_eq!((tree.find("a"), tree.find("\u{1e}[ 0 ]")), (None, Some(2)));
    }

    /// The reference implementation: nested maps.
    #[derive(Default)]
    struct NestedMap(HashMap<Component, NestedMap>);

    fn fits(root: &NestedMap, path: &[Component]) -> bool {
        let mut level = root;
        for (depth, step) in path.iter().enumerate() {
            let index = |step: &Component| matches!(step, Component::Index(_));
            if level.0.is_empty() {
                return depth == 0;
            }
            if level.0.keys().any(|key| index(key) != index(step)) {
                return false;
            }
            match level.0.get(step) {
                Some(below) => level = below,
                None => return true,
            }
        }
        false
    }

    /// Few keys, in which digits, quotes and commas occur in all combinations.
    fn step() -> impl Strategy<Value = Component> {
        let key = prop_oneof![
            "[ab1,]{0,2}".prop_map(String::from),
            Just("\"".to_owned()),
            Just("\\".to_owned()),
            Just("a\"1".to_owned()),
            Just("\u{1e}[1".to_owned()),
            Just("é".to_owned()),
        ];
        prop_oneof![
            2 => key.prop_map(|key| Component::Key(key.as_bytes().into())),
            1 => prop_oneof![Just(0u64), Just(1), Just(10), Just(12)].prop_map(Component::Index),
        ]
    }

    /// Another spelling of the same path.
    fn respelled(name: &Name) -> Name {
        let stored = name.stored();
        match stored.strip_prefix("\u{1e}[") {
            Some(rest) => self::name(&format!("\u{1e}[ {}", rest.replace('a', "\\u0061"))),
            None => name.clone(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn tree_agrees_with_nested_maps(
            paths in prop::collection::vec(
                (prop::collection::vec(step(), 1..4), any::<bool>(), 0..8u8), 1..12)
        ) {
            let (mut tree, mut root) = (NameTree::default(), NestedMap::default());
            let mut inserted: Vec<(Name, usize)> = Vec::new();
            for (number, (path, respell, remove)) in paths.into_iter().enumerate() {
                let name = Name::from_path(path.clone()).unwrap();
                let name = if respell { respelled(&name) } else { name };
                prop_assert_eq!(name.components().collect::<Vec<_>>(), path.clone());
                let expected = fits(&root, &path);
                prop_assert_eq!(tree.insert(&name, number).is_ok(), expected, "{:?}", path);
                if expected && remove == 0 {
                    tree.remove(&name);
                } else if expected {
                    path.into_iter().fold(&mut root, |level, step| level.0.entry(step).or_default());
                    inserted.push((name, number));
                }
            }
            for (name, number) in &inserted {
                prop_assert_eq!(tree.find(name.stored()), Some(*number));
                prop_assert_eq!(tree.find(&name.canonical()), Some(*number));
            }
        }
    }
}
