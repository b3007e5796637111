//! The names of a file together: they form a tree, in which no path is the beginning of another and
//! the keys of a level are all strings or all indices.

use std::collections::HashMap;

use super::name::{Component, Name};

/// Adds names one by one and refuses those that do not form a tree with the earlier ones.
#[derive(Default)]
pub struct NameTree {
    flat: HashMap<Box<str>, usize>,
    structured: HashMap<Box<str>, usize>,
    root: Level,
}

#[derive(Default)]
struct Level {
    children: HashMap<Component, Level>,
}

impl NameTree {
    /// Adds the name with the number `index`, or says what it conflicts with.
    pub fn insert(&mut self, name: &Name, index: usize) -> Result<(), String> {
        let conflict = || format!("Conflicting tensor paths: {name} conflicts with another name");
        match name.path() {
            None => {
                let key = Component::Key(name.stored().as_bytes().into());
                let taken = !self.root.children.is_empty()
                    && (self.root.children.contains_key(&key) || self.root.holds_indices());
                if taken || self.flat.insert(name.stored().into(), index).is_some() {
                    return Err(conflict());
                }
            }
            Some(path) => {
                if let Some(first) = path.first() {
                    let mixed = match first {
                        Component::Index(_) => !self.flat.is_empty(),
                        Component::Key(key) => {
                            std::str::from_utf8(key).is_ok_and(|key| self.flat.contains_key(key))
                        }
                    };
                    if mixed {
                        return Err(conflict());
                    }
                }
                let mut level = &mut self.root;
                let mut fresh = false;
                for (depth, component) in path.iter().enumerate() {
                    let leaf_above = depth > 0 && !fresh && level.children.is_empty();
                    let kinds_differ = !level.children.is_empty()
                        && level.holds_indices() != matches!(component, Component::Index(_));
                    if leaf_above || kinds_differ {
                        return Err(conflict());
                    }
                    fresh = !level.children.contains_key(component);
                    level = level.children.entry(component.clone()).or_default();
                }
                if !fresh {
                    return Err(conflict());
                }
                self.structured.insert(name.stored().into(), index);
            }
        }
        Ok(())
    }

    /// The number of a name, by the form in which it is stored.
    pub fn find(&self, stored: &str) -> Option<usize> {
        self.flat.get(stored).or_else(|| self.structured.get(stored)).copied()
    }
}

impl Level {
    fn holds_indices(&self) -> bool {
        self.children.keys().next().is_some_and(|c| matches!(c, Component::Index(_)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn trees() {
        let build = |names: &[&str]| {
            let mut tree = NameTree::default();
            names
                .iter()
                .enumerate()
                .try_for_each(|(i, n)| tree.insert(&Name::parse(n.as_bytes()).unwrap(), i))
        };
        assert!(build(&["a", "b", "a.b"]).is_ok());
        assert!(build(&["a", "\u{1e}[\"b\",0]", "\u{1e}[\"b\",1]"]).is_ok());
        assert!(build(&["\u{1e}[0]", "\u{1e}[1,\"x\"]"]).is_ok());
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
        ] {
            assert!(build(bad).is_err(), "{bad:?}");
        }
    }
}
