//! What a caller says about encryption, and the keys that follow from it.

use std::sync::{Mutex, PoisonError};

use zeroize::Zeroizing;

use super::key::KEY_LEN;
use super::{Key, sodium};
use crate::error::{Error, Result};
use crate::format::crypt_info::KeyDerivation;

/// libsodium's limits of Argon2id.
pub const MIN_OPSLIMIT: u64 = 1;
/// See [`MIN_OPSLIMIT`].
pub const MAX_OPSLIMIT: u64 = u32::MAX as u64;
/// In bytes.
pub const MIN_MEMLIMIT: u64 = 8192;
/// In bytes.
pub const MAX_MEMLIMIT: u64 = 4_398_046_510_080;
/// What a file may ask for unless the caller allows more: above libsodium's `SENSITIVE`, which is
/// 4 passes over 1 GiB.
const USUAL_OPSLIMIT: u64 = 16;
const USUAL_MEMLIMIT: u64 = 2 << 30;

/// How to encrypt.
#[derive(Debug, Clone)]
pub struct EncryptionOptions {
    /// The key.
    pub key: Key,
    /// How it was derived, so that readers can do the same; None for a key of its own.
    pub derivation: Option<KeyDerivation>,
    /// Whether to seal names, shapes, order and tags as well; see [`super::Manifest`].
    pub manifest: bool,
}

/// What decrypts a file.
pub enum Secret {
    /// A key.
    Key(Key),
    /// What keys are derived from.
    Passphrase(Zeroizing<Vec<u8>>),
}

/// How to decrypt. Derived keys are kept as long as this is.
pub struct DecryptionOptions {
    secret: Secret,
    /// The most passes that a file may ask for.
    pub max_opslimit: u64,
    /// The most memory that a file may ask for, in bytes.
    pub max_memlimit: u64,
    /// Refuse a file whose names, shapes, order and tags are not sealed.
    pub require_manifest: bool,
    derived: Mutex<Vec<(KeyDerivation, Key)>>,
}

impl DecryptionOptions {
    /// With the usual limits.
    pub fn new(secret: Secret) -> Self {
        DecryptionOptions {
            secret,
            max_opslimit: USUAL_OPSLIMIT,
            max_memlimit: USUAL_MEMLIMIT,
            require_manifest: false,
            derived: Mutex::default(),
        }
    }

    /// Whether there is no key without a derivation.
    pub fn needs_derivation(&self) -> bool {
        matches!(self.secret, Secret::Passphrase(_))
    }

    /// The key of a tensor whose header names this derivation.
    pub fn key(&self, derivation: Option<&KeyDerivation>, uri: &str) -> Result<Key> {
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
        // Held while deriving, so that the memory for it is taken once.
        let mut derived = self.derived.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, key)) = derived.iter().find(|(known, _)| known == derivation) {
            return Ok(key.clone());
        }
        let limits = [
            ("opslimit", derivation.opslimit, MIN_OPSLIMIT, MAX_OPSLIMIT, self.max_opslimit),
            ("memlimit", derivation.memlimit, MIN_MEMLIMIT, MAX_MEMLIMIT, self.max_memlimit),
        ];
        for (name, found, least, most, allowed) in limits {
            if !(least..=most).contains(&found) {
                return Err(Error::Crypt(format!(
                    "`{uri}`: the {name} of its key derivation must be {least} to {most}, \
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
        // A file that names many salts would have us derive as many keys.
        const MAX_KEYS: usize = 64;
        if derived.len() >= MAX_KEYS {
            return Err(Error::Crypt(format!("`{uri}` asks for more than {MAX_KEYS} keys")));
        }
        let key = derive(source, derivation)?;
        derived.push((derivation.clone(), key.clone()));
        Ok(key)
    }
}

/// Derives a key from a passphrase.
pub fn derive(source: &[u8], derivation: &KeyDerivation) -> Result<Key> {
    let out_of_memory = || Error::OutOfMemory {
        bytes: derivation.memlimit,
        what: "the derivation of a key".to_owned(),
        error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
    };
    let memlimit = usize::try_from(derivation.memlimit).map_err(|_| out_of_memory())?;
    let mut out = Zeroizing::new([0; KEY_LEN]);
    if !sodium::derive(&mut out, source, &derivation.salt, derivation.opslimit, memlimit) {
        return Err(out_of_memory());
    }
    Key::new(&*out).ok_or_else(|| Error::Bug("a derived key of another length".to_owned()))
}

impl EncryptionOptions {
    /// With a key that is derived from a passphrase.
    pub fn from_passphrase(source: &[u8], derivation: KeyDerivation) -> Result<Self> {
        let key = derive(source, &derivation)?;
        Ok(EncryptionOptions { key, derivation: Some(derivation), manifest: false })
    }
}

impl std::fmt::Debug for DecryptionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DecryptionOptions(..)")
    }
}
