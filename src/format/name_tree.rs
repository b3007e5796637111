//! The names of a file as a tree: no path is a prefix of another, and the keys of one level are all
//! strings or all indices.
//!
//! The tree is never built. Paths are sorted by their JSON without its closing bracket. All paths
//! below a path then follow it directly: their next byte is `,`, and the next byte of any other path
//! that begins with the same bytes sorts after `,`. A new path can therefore conflict only with its
//! two neighbours.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem::discriminant;
use std::ops::Bound;
use std::sync::Arc;

use super::name::{Component, MARK, Name, encode, parse_path};

/// Adds names one by one, and refuses those that do not form a tree with the earlier ones.
#[derive(Default)]
pub struct NameTree {
    /// The numbers of the names that are plain strings.
    plain: BTreeMap<Arc<str>, usize>,
    /// The numbers of the names that are sequences of keys, by their JSON without its closing bracket.
    paths: BTreeMap<Arc<str>, usize>,
}

impl NameTree {
    /// Adds a name with the number `index`. A name that conflicts with an earlier one is an error,
    /// and is not added.
    pub fn insert(&mut self, name: &Name, index: usize) -> Result<(), String> {
        let (conflicts, entry) = if is_plain(name) {
            (self.plain_conflicts(name)?, self.plain.entry(name.shared()))
        } else {
            (self.path_conflicts(name), self.paths.entry(sort_key(name.stored()).into()))
        };
        match entry {
            Entry::Vacant(slot) if !conflicts => {
                slot.insert(index);
                Ok(())
            }
            Entry::Vacant(_) => {
                Err(format!("Conflicting tensor paths: {name} conflicts with another name"))
            }
            Entry::Occupied(_) => {
                Err(format!("Conflicting tensor paths: the name {name} comes twice"))
            }
        }
    }

    /// Removes a name.
    pub fn remove(&mut self, name: &Name) {
        if is_plain(name) {
            self.plain.remove(name.stored());
        } else {
            self.paths.remove(sort_key(name.stored()));
        }
    }

    /// The number of a name, given in any of its stored spellings.
    pub fn find(&self, stored: &str) -> Option<usize> {
        let parsed = stored.starts_with(MARK).then(|| Name::parse(stored.as_bytes()));
        let stored = match &parsed {
            Some(name) => name.as_ref().ok()?.stored(),
            None => stored,
        };
        self.plain.get(stored).or_else(|| self.paths.get(sort_key(stored))).copied()
    }

    fn plain_conflicts(&self, name: &Name) -> Result<bool, String> {
        if self.paths.is_empty() {
            return Ok(false);
        }
        let path = name.components();
        Ok(self.neighbour_conflicts(sort_key(&encode(&path)?), &path))
    }

    fn path_conflicts(&self, name: &Name) -> bool {
        let path = name.components();
        let is_below_plain = match path.first() {
            Some(Component::Key(key)) => self.plain.contains_key(&**key),
            _ => !self.plain.is_empty(),
        };
        is_below_plain || self.neighbour_conflicts(sort_key(name.stored()), &path)
    }

    fn neighbour_conflicts(&self, key: &str, path: &[Component]) -> bool {
        let before = self.paths.range::<str, _>((Bound::Unbounded, Bound::Excluded(key)));
        let after = self.paths.range::<str, _>((Bound::Included(key), Bound::Unbounded));
        before.rev().take(1).chain(after.take(1)).any(|(other, _)| {
            let other = parse_path(&format!("{}]", other.trim_start_matches(MARK)));
            other.is_ok_and(|other| conflict(path, &other))
        })
    }
}

/// True if one path goes through the other, or if where they part one has a key and the other an
/// index.
fn conflict(one: &[Component], other: &[Component]) -> bool {
    let parting = one.iter().zip(other).find(|(one, other)| one != other);
    parting.is_none_or(|(one, other)| discriminant(one) != discriminant(other))
}

fn is_plain(name: &Name) -> bool {
    !name.stored().starts_with(MARK)
}

fn sort_key(path: &str) -> &str {
    path.strip_suffix(']').unwrap_or(path)
}

#[cfg(test)]
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
            2 => key.prop_map(|key| Component::Key(key.into())),
            1 => prop_oneof![Just(0u64), Just(1), Just(10), Just(12)].prop_map(Component::Index),
        ]
    }

    /// Another spelling of the same path.
    fn respelled(name: &Name) -> String {
        let stored = name.stored();
        match stored.strip_prefix("\u{1e}[") {
            Some(rest) => format!("\u{1e}[ {}", rest.replace('a', "\\u0061")),
            None => stored.to_owned(),
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
                let name = Name::from_path(&path).unwrap();
                let name = if respell { self::name(&respelled(&name)) } else { name };
                prop_assert_eq!(name.components(), path.clone());
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
                prop_assert_eq!(tree.find(&respelled(name)), Some(*number));
            }
        }
    }
}
