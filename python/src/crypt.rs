//! `tensorizer._C.Encryption` and `.Decryption`: opaque objects that hold keys.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorizer::crypt::{self, DecryptionOptions, EncryptionOptions, Key, Secret};
use tensorizer::error::Error;
use tensorizer::format::tensors::crypt_info::KeyDerivation;

use crate::calls::signals;
use crate::errors::Outcome;
use crate::gil;

/// Options of encryption, with the key.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Encryption(pub Arc<EncryptionOptions>);

#[pymethods]
impl Encryption {
    /// Takes a key, and the parameters with which it was derived: `(opslimit, memlimit, salt)`.
    #[staticmethod]
    #[pyo3(signature = (bytes, manifest, derivation=None))]
    fn from_key(
        bytes: &[u8],
        manifest: bool,
        derivation: Option<(u64, u64, [u8; 16])>,
    ) -> Outcome<Self> {
        let derivation =
            derivation.map(|(opslimit, memlimit, salt)| KeyDerivation { opslimit, memlimit, salt });
        let key = Key::new(bytes)?;
        Ok(Encryption(Arc::new(EncryptionOptions { key, derivation, manifest })))
    }

    #[staticmethod]
    fn random(manifest: bool) -> Outcome<Self> {
        let bytes = zeroize::Zeroizing::new(crypt::random::<32>()?);
        Self::from_key(&*bytes, manifest, None)
    }

    /// Derives a key by Argon2id, with a random salt unless one is given.
    #[staticmethod]
    #[pyo3(signature = (source, opslimit, memlimit, salt, manifest))]
    fn derive(
        py: Python<'_>,
        source: &[u8],
        opslimit: u64,
        memlimit: u64,
        salt: Option<[u8; 16]>,
        manifest: bool,
    ) -> Outcome<Self> {
        let salt = salt.map_or_else(crypt::random, Ok)?;
        let derivation = KeyDerivation { opslimit, memlimit, salt };
        let derived =
            gil::without(py, || EncryptionOptions::from_passphrase(source, derivation, &signals))?;
        Ok(Encryption(Arc::new(EncryptionOptions { manifest, ..derived })))
    }

    /// The bytes of the key.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.key.bytes())
    }

    /// The parameters with which the key was derived, if it was: `(opslimit, memlimit, salt)`.
    #[getter]
    fn derivation<'py>(&self, py: Python<'py>) -> Option<(u64, u64, Bound<'py, PyBytes>)> {
        let derivation = self.0.derivation.as_ref()?;
        let salt = PyBytes::new(py, &derivation.salt);
        Some((derivation.opslimit, derivation.memlimit, salt))
    }

    #[getter]
    fn manifest(&self) -> bool {
        self.0.manifest
    }

    /// True if both encrypt in the same way.
    fn same(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

/// Options of decryption, with the key or the passphrase.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Decryption(pub Arc<DecryptionOptions>);

#[pymethods]
impl Decryption {
    /// Takes a key, or a passphrase from which keys are derived.
    #[new]
    #[pyo3(signature = (*, key, source, require_manifest, max_opslimit, max_memlimit))]
    fn new(
        key: Option<&[u8]>,
        source: Option<&[u8]>,
        require_manifest: bool,
        max_opslimit: Option<u64>,
        max_memlimit: Option<u64>,
    ) -> Outcome<Self> {
        let secret = match (key, source) {
            (Some(key), None) => Secret::Key(Key::new(key)?),
            (None, Some(source)) => Secret::Passphrase(source.to_vec().into()),
            _ => {
                let what = "expected either a key or a passphrase".to_owned();
                return Err(Error::InvalidArgument(what).into());
            }
        };
        let mut options = DecryptionOptions::new(secret);
        options.require_manifest = require_manifest;
        options.allow(max_opslimit, max_memlimit);
        Ok(Decryption(Arc::new(options)))
    }
}
