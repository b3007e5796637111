//! The wrapper around libsodium: each function proves that its own call is safe.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use libsodium_sys as ffi;

use crate::format::tensors::crypt_info::MAC_LEN;
use crate::sys;

/// Bytes of a key.
pub const KEY_LEN: usize = 32;

/// Initialises the library once, which makes it use the features of the processor. Without a source
/// of random numbers, initialisation would end the process, so it is skipped, and the library is
/// slower.
pub fn start() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        if sys::random(&mut [0; 16]).is_ok() {
            // SAFETY: takes nothing, and may be called from any thread.
            unsafe { ffi::sodium_init() };
        }
    });
}

/// Decrypts in place. False, with the bytes unchanged, if the tag does not match.
pub fn open(bytes: &mut [u8], mac: &[u8; MAC_LEN], nonce: &[u8; 24], key: &[u8; KEY_LEN]) -> bool {
    let pointer = bytes.as_mut_ptr();
    start();
    // SAFETY: `pointer` is valid for reading and writing `bytes.len()` bytes, and the function
    // allows input and output to be the same bytes; tag, nonce and key have the lengths that it
    // reads.
    let outcome = unsafe {
        ffi::crypto_secretbox_open_detached(
            pointer,
            pointer,
            mac.as_ptr(),
            bytes.len() as u64,
            nonce.as_ptr(),
            key.as_ptr(),
        )
    };
    outcome == 0
}

/// Encrypts in place and returns the tag.
pub fn seal(bytes: &mut [u8], nonce: &[u8; 24], key: &[u8; KEY_LEN]) -> [u8; MAC_LEN] {
    let mut mac = [0; MAC_LEN];
    let pointer = bytes.as_mut_ptr();
    start();
    // SAFETY: as in `open`; the function writes a tag of `MAC_LEN` bytes and always succeeds.
    unsafe {
        ffi::crypto_secretbox_detached(
            pointer,
            mac.as_mut_ptr(),
            pointer,
            bytes.len() as u64,
            nonce.as_ptr(),
            key.as_ptr(),
        );
    }
    mac
}

/// Derives a key by Argon2id 1.3. False if memory cannot be allocated, or a parameter is out of
/// range.
pub fn derive(
    out: &mut [u8; KEY_LEN],
    source: &[u8],
    salt: &[u8; 16],
    opslimit: u64,
    memlimit: usize,
) -> bool {
    let algorithm = i32::try_from(ffi::crypto_pwhash_ALG_ARGON2ID13).unwrap_or(2);
    start();
    // SAFETY: reads `source.len()` bytes and a salt of 16, writes `KEY_LEN` bytes.
    let outcome = unsafe {
        ffi::crypto_pwhash(
            out.as_mut_ptr(),
            KEY_LEN as u64,
            source.as_ptr().cast(),
            source.len() as u64,
            salt.as_ptr(),
            opslimit,
            memlimit,
            algorithm,
        )
    };
    outcome == 0
}

/// Computes the BLAKE2b of `data` under a key.
pub fn keyed_hash(data: &[u8], key: &[u8; KEY_LEN]) -> [u8; 32] {
    let mut out = [0; 32];
    start();
    // SAFETY: writes 32 bytes, reads `data.len()` and `KEY_LEN` bytes; both lengths are in the
    // function's ranges, so it cannot fail.
    unsafe {
        ffi::crypto_generichash(
            out.as_mut_ptr(),
            out.len(),
            data.as_ptr(),
            data.len() as u64,
            key.as_ptr(),
            KEY_LEN,
        );
    }
    out
}

/// Compares in constant time.
pub fn same(left: &[u8; 32], right: &[u8; 32]) -> bool {
    // SAFETY: reads 32 bytes of each.
    unsafe { ffi::sodium_memcmp(left.as_ptr().cast(), right.as_ptr().cast(), 32) == 0 }
}

/// A key in a page of its own: the system can lock, and exclude from core dumps, only whole pages.
#[cfg_attr(target_arch = "x86_64", repr(align(4096)))]
#[cfg_attr(not(target_arch = "x86_64"), repr(align(65536)))]
pub struct Page(pub [u8; KEY_LEN]);

/// Keeps a page out of swap space and core dumps, if that is allowed.
pub fn lock(page: &mut Page) {
    start();
    // SAFETY: the memory is valid for the size of its type; locking does not change it. A refusal
    // is no error: the limit of locked memory may be zero.
    unsafe { ffi::sodium_mlock(std::ptr::from_mut(page).cast(), size_of::<Page>()) };
}

/// Overwrites a page with zeros and unlocks it.
pub fn unlock_and_wipe(page: &mut Page) {
    // SAFETY: the memory is valid for writing the size of its type.
    unsafe { ffi::sodium_munlock(std::ptr::from_mut(page).cast(), size_of::<Page>()) };
    zeroize::Zeroize::zeroize(&mut page.0);
}
