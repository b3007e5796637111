//! Unlocks encrypted files: takes the key, and checks the manifest (the seal) if there is one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use super::file::TensorFile;
use super::headers::visit_headers;
use crate::cancel::Cancel;
use crate::codec::crypt::{DecryptionOptions, HeaderTag, Manifest};
use crate::error::{Error, Result};
use crate::sys::sync::unpoisoned;

impl TensorFile {
    /// Makes loads decrypt. Refuses a file that is not encrypted, and one without a manifest if
    /// that is required. A manifest that is there is checked, unless no tensor has data.
    pub fn decrypt(self, options: Arc<DecryptionOptions>, cancel: &dyn Cancel) -> Result<Self> {
        self.unlock(options, cancel)?;
        Ok(self)
    }

    /// Does the same for a file that is shared already.
    pub fn unlock(&self, options: Arc<DecryptionOptions>, cancel: &dyn Cancel) -> Result<()> {
        let Some(state) = self.tensors_state.as_ref().filter(|_| self.is_encrypted()) else {
            return Err(Error::Crypt(format!("`{}` is not encrypted", self.uri())));
        };
        options.reset_derivations(self.uri());
        self.check_manifest(&options, cancel)?;
        let second = |_| Error::InvalidArgument(format!("`{}` has a key already", self.uri()));
        state.decryption.set(options).map_err(second)
    }

    fn check_manifest(&self, options: &DecryptionOptions, cancel: &dyn Cancel) -> Result<()> {
        let Some((prologue, index)) = self.head_with_manifest() else {
            if options.require_manifest {
                return Err(Error::Crypt(format!(
                    "`{}` has no manifest, so that its names, shapes and order may have been changed",
                    self.uri()
                )));
            }
            return Ok(());
        };
        if !self.is_seekable() {
            return Err(Error::Unsupported(format!(
                "`{}` has a manifest, which is checked before any data are read, so that it cannot \
                 be read front to back only: use a file, or a server that supports range requests",
                self.uri()
            )));
        }
        let mut derivation = None;
        if options.needs_derivation() {
            let Some(number) = self.entries().iter().position(|entry| entry.data_len > 0) else {
                // No tensor has data, so no header states how the key is derived from the passphrase.
                return if options.require_manifest {
                    Err(Error::Crypt(format!(
                        "the manifest of `{}` cannot be checked with a passphrase: no tensor has \
                         data; give the key itself",
                        self.uri()
                    )))
                } else {
                    Ok(())
                };
            };
            let found = OnceLock::new();
            visit_headers(self, &[number], cancel, &|_, header| {
                found.get_or_init(|| header.crypt_info.as_ref()?.key_derivation.clone());
                Ok(())
            })?;
            derivation = found.into_inner().flatten();
        }
        let manifest = Manifest::new(&options.key(derivation.as_ref(), self.uri(), cancel)?)?;
        let numbers = (0..self.entries().len()).collect::<Vec<_>>();
        let digests = Mutex::new(BTreeMap::new());
        visit_headers(self, &numbers, cancel, &|number, header| {
            let digest = manifest.digest(header.raw);
            unpoisoned(digests.lock()).insert(number, digest);
            Ok(())
        })?;
        let digests: Vec<HeaderTag> = unpoisoned(digests.into_inner()).into_values().collect();
        if !manifest.verifies(prologue, index, &digests)? {
            return Err(self.manifest_mismatch());
        }
        self.set_verified_manifest(manifest, digests)
    }
}
