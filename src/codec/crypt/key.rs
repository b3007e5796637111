//! A key: locked in memory if that is allowed, wiped when it is dropped, never shown.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::sodium::{self, KEY_LEN, Page};
use crate::error::{Error, Result};

/// A key of XSalsa20-Poly1305. Clones share the memory.
#[derive(Clone)]
pub struct Key(Arc<LockedPage>);

struct LockedPage(Box<Page>);

impl Key {
    /// A key of 32 bytes; an error for any other number.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != KEY_LEN {
            let what = format!("expected a key of {KEY_LEN} bytes, found {}", bytes.len());
            return Err(Error::InvalidArgument(what));
        }
        let mut page = Box::new(Page([0; KEY_LEN]));
        sodium::lock(&mut page);
        // Copied straight into the locked page, so that no other copy is left.
        page.0.copy_from_slice(bytes);
        Ok(Key(Arc::new(LockedPage(page))))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; KEY_LEN] {
        &self.0.0.0
    }

    /// Derives another key for a purpose. The derived key reveals nothing about this one.
    pub fn subkey(&self, purpose: &str) -> Result<Key> {
        let derived = Zeroizing::new(sodium::keyed_hash(purpose.as_bytes(), self.bytes()));
        Key::new(&*derived)
    }
}

impl Drop for LockedPage {
    fn drop(&mut self) {
        sodium::unlock_and_wipe(&mut self.0);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        sodium::same(self.bytes(), other.bytes())
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_and_not_shown() {
        let key = Key::new(&[7; 32]).unwrap();
        assert_eq!(key, Key::new(&[7; 32]).unwrap());
        assert_ne!(key, Key::new(&[8; 32]).unwrap());
        assert_eq!(format!("{key:?}"), "Key(..)");
        assert!(Key::new(&[7; 31]).is_err());
        assert_ne!(key.subkey("a").unwrap(), key.subkey("b").unwrap());
    }

    #[test]
    fn memory_is_wiped_before_it_is_freed() {
        let mut page = Page([9; KEY_LEN]);
        sodium::lock(&mut page);
        sodium::unlock_and_wipe(&mut page);
        assert_eq!(page.0, [0; KEY_LEN]);
    }

    /// The kernel's flags of the mapping that contains an address.
    fn flags_at(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut here = false;
        for line in maps.lines() {
            if let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-'))
                && let (Ok(from), Ok(to)) =
                    (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
            {
                here = (from..to).contains(&address);
            }
            if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| here) {
                return flags.to_owned();
            }
        }
        String::new()
    }

    #[test]
    fn keys_are_excluded_from_core_dumps() {
        let keys: Vec<Key> = (0..3).map(|byte| Key::new(&[byte; 32]).unwrap()).collect();
        let flags = |key: &Key| flags_at(key.bytes().as_ptr().addr());
        for key in &keys {
            assert!(flags(key).split(' ').any(|flag| flag == "dd"), "{}", flags(key));
        }
        let mut keys = keys.into_iter();
        // The other keys have pages of their own, which stay protected.
        drop(keys.next());
        assert!(keys.all(|key| flags(&key).split(' ').any(|flag| flag == "dd")));
    }
}
