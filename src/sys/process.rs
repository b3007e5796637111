//! What a process that was forked off inherits, and must not undo a second time. One of the few
//! doors to `unsafe`.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

/// The process that made something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maker(u32);

impl Maker {
    /// This process.
    pub fn this() -> Self {
        Maker(std::process::id())
    }

    /// Whether this still is that process, and not one that was forked off it.
    pub fn is_here(self) -> bool {
        self == Self::this()
    }

    /// Refuses what only the maker may do.
    pub fn check(self, uri: &str) -> crate::error::Result<()> {
        if self.is_here() {
            return Ok(());
        }
        Err(crate::error::Error::Closed(format!(
            "`{uri}` was begun by process {}, which alone can write and finish it: this is \
             process {}, which was forked off",
            self.0,
            std::process::id()
        )))
    }
}

/// A value that is dropped by the process that made it, and in others left alone.
pub struct Inherited<T> {
    value: ManuallyDrop<T>,
    maker: Maker,
}

impl<T> Inherited<T> {
    /// Made here.
    pub fn new(value: T) -> Self {
        Inherited { value: ManuallyDrop::new(value), maker: Maker::this() }
    }

    /// Who made it.
    pub fn maker(&self) -> Maker {
        self.maker
    }
}

impl<T> Deref for Inherited<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Inherited<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Inherited<T> {
    fn drop(&mut self) {
        if self.maker.is_here() {
            // SAFETY: dropped nowhere else, and not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
