//! The caller's options for encryption and decryption, and the keys that are derived from them.

use std::collections::HashMap;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::sodium::KEY_LEN;
use super::{Key, sodium};
use crate::cancel::{self, Cancel, ProcessLock, run_detached};
use crate::error::{Error, Result};
use crate::fallible::out_of_memory;
use crate::format::tensors::crypt_info::KeyDerivation;
use crate::sys::fork_safe_mutex::ForkSafeMutex;
use crate::sys::sync::unpoisoned;
use crate::sys::to_usize;

/// Minimum number of passes of Argon2id, as in libsodium.
pub const MIN_OPSLIMIT: u64 = 1;
/// Maximum number of passes of Argon2id, as in libsodium.
pub const MAX_OPSLIMIT: u64 = u32::MAX as u64;
/// Minimum memory of Argon2id in bytes, as in libsodium.
pub const MIN_MEMLIMIT: u64 = 8192;
/// Maximum memory of Argon2id in bytes, as in libsodium.
pub const MAX_MEMLIMIT: u64 = 4_398_046_510_080;
/// Limits of the key derivations that a file may require, unless the caller allows more. They are
/// above libsodium's `SENSITIVE`, which is 4 passes over 1 GiB.
const USUAL_OPSLIMIT: u64 = 16;
const USUAL_MEMLIMIT: u64 = 2 << 30;
/// Limit of passes times bytes for all keys of a file together: two derivations at `SENSITIVE`.
const USUAL_WORK: u128 = 8 << 30;
/// Maximum number of derived keys that one file may require.
const MAX_KEYS: usize = 64;

/// Options for encryption. Keys are compared in constant time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptionOptions {
    /// The key.
    pub key: Key,
    /// The derivation of the key, so that readers can repeat it; None for a key that was given
    /// directly.
    pub derivation: Option<KeyDerivation>,
    /// True to also authenticate names, shapes, order and tags; see [`super::Manifest`].
    pub manifest: bool,
}

/// The secret that decrypts a file.
pub enum Secret {
    /// A key.
    Key(Key),
    /// A passphrase, from which keys are derived.
    Passphrase(Zeroizing<Vec<u8>>),
}

/// Options for decryption. They cache the keys that were derived.
pub struct DecryptionOptions {
    secret: Secret,
    max_opslimit: u64,
    max_memlimit: u64,
    max_work: u128,
    /// True to refuse a file without a manifest, whose names, shapes, order and tags are not
    /// authenticated.
    pub require_manifest: bool,
    derived: ForkSafeMutex<Vec<(KeyDerivation, Key)>>,
    /// Held while a key is derived, so that each key is derived once.
    deriving: ProcessLock,
    /// The number and the work of the derivations that each file has required so far, by its path or
    /// address.
    derivation_costs: ForkSafeMutex<HashMap<String, (usize, u128)>>,
}

impl DecryptionOptions {
    /// Creates options with the default limits.
    pub fn new(secret: Secret) -> Self {
        DecryptionOptions {
            secret,
            max_opslimit: USUAL_OPSLIMIT,
            max_memlimit: USUAL_MEMLIMIT,
            max_work: USUAL_WORK,
            require_manifest: false,
            derived: ForkSafeMutex::default(),
            deriving: ProcessLock::new(),
            derivation_costs: ForkSafeMutex::default(),
        }
    }

    /// Sets the maximum passes, and the maximum memory in bytes, that a derivation of a file may
    /// take; None for the default. All keys of a file together may then cost as much as one
    /// derivation at both limits.
    pub fn allow(&mut self, opslimit: Option<u64>, memlimit: Option<u64>) {
        if opslimit.is_some() || memlimit.is_some() {
            self.max_opslimit = opslimit.unwrap_or(self.max_opslimit);
            self.max_memlimit = memlimit.unwrap_or(self.max_memlimit);
            self.max_work = u128::from(self.max_opslimit) * u128::from(self.max_memlimit);
        }
    }

    /// Resets the count of a file that is opened: derivations of an earlier file with this name do
    /// not count.
    pub fn reset_derivations(&self, uri: &str) {
        self.derivation_costs.lock().remove(uri);
    }

    /// True if keys can only be derived: the secret is a passphrase.
    pub fn needs_derivation(&self) -> bool {
        matches!(self.secret, Secret::Passphrase(_))
    }

    /// Refuses a derivation that costs more than the format or the caller allows.
    fn check_limits(&self, derivation: &KeyDerivation, uri: &str) -> Result<()> {
        let limits = [
            ("opslimit", derivation.opslimit, MIN_OPSLIMIT, MAX_OPSLIMIT, self.max_opslimit),
            ("memlimit", derivation.memlimit, MIN_MEMLIMIT, MAX_MEMLIMIT, self.max_memlimit),
        ];
        for (name, found, min, max, allowed) in limits {
            if !(min..=max).contains(&found) {
                return Err(Error::Crypt(format!(
                    "`{uri}`: the {name} of its key derivation must be {min} to {max}, \
                     found {found}"
                )));
            }
            if found > allowed {
                return Err(Error::Crypt(format!(
                    "`{uri}`: the {name} of its key derivation is {found}, and at most {allowed} \
                     is allowed: raise max_{name} if you trust the file"
                )));
            }
        }
        Ok(())
    }

    /// Returns the key of a tensor whose header states this derivation.
    pub fn key(
        &self,
        derivation: Option<&KeyDerivation>,
        uri: &str,
        cancel: &dyn Cancel,
    ) -> Result<Key> {
        let (source, derivation) = match (&self.secret, derivation) {
            (Secret::Key(key), _) => return Ok(key.clone()),
            (Secret::Passphrase(_), None) => {
                return Err(Error::Crypt(format!(
                    "`{uri}` was encrypted with a key and not with a passphrase: \
                     use DecryptionParams.from_key"
                )));
            }
            (Secret::Passphrase(source), Some(derivation)) => (source, derivation),
        };
        let _lock = cancel::lock_mutex(self.deriving.get(), cancel)?;
        let cached =
            |(derived, key): &(KeyDerivation, Key)| (derived == derivation).then(|| key.clone());
        if let Some(key) = self.derived.lock().iter().find_map(cached) {
            return Ok(key);
        }
        self.check_limits(derivation, uri)?;
        let (keys, work) = self.derivation_costs.lock().get(uri).copied().unwrap_or((0, 0));
        let work = work + u128::from(derivation.opslimit) * u128::from(derivation.memlimit);
        if keys >= MAX_KEYS {
            return Err(Error::Crypt(format!(
                "`{uri}` needs more than {MAX_KEYS} derived keys, which is refused"
            )));
        }
        if work > self.max_work {
            return Err(Error::Crypt(format!(
                "`{uri}`: deriving its {} keys would process {work} bytes of memory, and at most \
                 {} are allowed: raise max_opslimit or max_memlimit if you trust the file",
                keys + 1,
                self.max_work
            )));
        }
        let key = derive(source, derivation, cancel)?;
        self.derivation_costs.lock().insert(uri.to_owned(), (keys + 1, work));
        self.derived.lock().push((derivation.clone(), key.clone()));
        Ok(key)
    }
}

/// Lets one derivation run at a time: each takes as much memory as its file asks for.
static DERIVING: ProcessLock = ProcessLock::new();

/// Derives a key from a passphrase. A running derivation cannot be stopped. If the call is
/// cancelled, its thread runs to the end, and the next derivation waits for it.
pub fn derive(source: &[u8], derivation: &KeyDerivation, cancel: &dyn Cancel) -> Result<Key> {
    let memlimit = to_usize(derivation.memlimit);
    let (source, KeyDerivation { opslimit, salt, .. }) =
        (Zeroizing::new(source.to_vec()), derivation.clone());
    let caller = Arc::new(());
    let caller_alive = Arc::downgrade(&caller);
    let derived = run_detached(cancel, move || {
        let _lock = unpoisoned(DERIVING.get().lock());
        caller_alive.upgrade()?;
        let mut out = Zeroizing::new([0; KEY_LEN]);
        sodium::derive(&mut out, &source, &salt, opslimit, memlimit).then_some(out)
    })?;
    let none = || out_of_memory(derivation.memlimit, "the derivation of a key");
    Key::new(&*derived.ok_or_else(none)?)
}

impl EncryptionOptions {
    /// Derives the key from a passphrase.
    pub fn from_passphrase(
        source: &[u8],
        derivation: KeyDerivation,
        cancel: &dyn Cancel,
    ) -> Result<Self> {
        let key = derive(source, &derivation, cancel)?;
        Ok(EncryptionOptions { key, derivation: Some(derivation), manifest: false })
    }
}

impl std::fmt::Debug for DecryptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DecryptionOptions(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::Never;

    #[test]
    fn work_of_all_key_derivations_of_a_file_is_limited() {
        let mut options = DecryptionOptions::new(Secret::Passphrase(b"words".to_vec().into()));
        options.allow(Some(3), Some(1 << 20));
        let ask = |salt: u8, passes: u64, uri: &str| {
            let derivation =
                KeyDerivation { opslimit: passes, memlimit: 1 << 20, salt: [salt; 16] };
            options.key(Some(&derivation), uri, &Never)
        };
        options.reset_derivations("file");
        ask(1, 2, "file").unwrap();
        // This key was derived before, so it costs nothing.
        ask(1, 2, "file").unwrap();
        let refused = ask(2, 2, "file").unwrap_err().to_string();
        assert!(refused.contains("2 keys would process 4194304 bytes"), "{refused}");
        // A refused derivation does not count.
        ask(3, 1, "file").unwrap();
        assert!(ask(4, 1, "file").is_err());
        ask(4, 1, "another").unwrap();
        options.reset_derivations("file");
        ask(5, 3, "file").unwrap();
    }

    #[test]
    fn number_of_derived_keys_per_file_is_limited() {
        let mut options = DecryptionOptions::new(Secret::Passphrase(b"words".to_vec().into()));
        options.allow(Some(1 << 20), Some(1 << 30));
        let ask = |salt: u8| {
            let derivation = KeyDerivation { opslimit: 1, memlimit: 8192, salt: [salt; 16] };
            options.key(Some(&derivation), "file", &Never)
        };
        for salt in 0..64 {
            ask(salt).unwrap();
        }
        assert!(ask(64).unwrap_err().to_string().contains("more than 64 derived keys"));
    }

    #[test]
    fn cancelled_derivation_returns_at_once() {
        let derivation = KeyDerivation { opslimit: 30, memlimit: 64 << 20, salt: [1; 16] };
        let given_up = derive(b"words", &derivation, &|| Err(Error::Cancelled));
        assert!(matches!(given_up, Err(Error::Cancelled)));
    }
}
