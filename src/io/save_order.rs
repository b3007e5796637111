//! The order of saves to one path or address in this process: the one that began last stays,
//! whichever ends last.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::cancel::{Cancel, lock_mutex};
use crate::error::Result;
use crate::sys::process::PerProcess;
use crate::sys::sync::unpoisoned;

/// The target of a save, the same for all spellings of a path: a name in a folder, which has these
/// device and inode numbers, where the empty name stands for the file that has them; or, without
/// numbers, the address of an object.
pub type SaveTarget = (Option<(u64, u64)>, OsString);

/// The number of the save that was published last.
type LastPublished = Mutex<u64>;

/// The targets of the saves under way.
static TARGETS: PerProcess<Mutex<HashMap<SaveTarget, Weak<LastPublished>>>> = PerProcess::new();
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// The turn of one save among those to the same target.
pub struct SaveTurn {
    number: u64,
    last_published: Arc<LastPublished>,
}

impl SaveTurn {
    /// Begins a save: it is later than all others that have begun.
    pub fn begin(target: SaveTarget) -> Self {
        let mut targets = unpoisoned(TARGETS.get().lock());
        targets.retain(|_, last_published| last_published.strong_count() > 0);
        let known = targets.get(&target).and_then(Weak::upgrade);
        let last_published = known.unwrap_or_else(|| {
            let new = Arc::new(Mutex::new(0));
            targets.insert(target, Arc::downgrade(&new));
            new
        });
        SaveTurn { number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed), last_published }
    }

    /// True if no other save to the same target is under way.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.last_published) == 1
    }

    /// Publishes, unless a later save has done so: then it returns None. Waits only while another
    /// save to the same target is about to be published.
    pub fn publish<T>(
        &self,
        cancel: &dyn Cancel,
        publish: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        let mut last_published = lock_mutex(&self.last_published, cancel)?;
        if *last_published > self.number {
            return Ok(None);
        }
        let published = publish()?;
        *last_published = self.number;
        Ok(Some(published))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::Never;
    use crate::error::Error;

    fn begin(name: &str) -> SaveTurn {
        SaveTurn::begin((Some((1, 2)), name.into()))
    }

    fn publish(turn: &SaveTurn) -> Option<()> {
        turn.publish(&Never, || Ok(())).unwrap()
    }

    #[test]
    fn a_save_is_overtaken_only_by_later_ones_that_were_published() {
        let (first, second, third) = (begin("order"), begin("order"), begin("order"));
        let other = begin("another");
        assert_eq!(publish(&first), Some(()));
        assert!(third.publish(&Never, || Err::<(), _>(Error::Cancelled)).is_err());
        assert_eq!(publish(&second), Some(()));
        assert_eq!(publish(&third), Some(()));
        drop(third);
        assert_eq!(publish(&second), None);
        assert_eq!(publish(&other), Some(()));
        assert!(other.is_alone() && !first.is_alone());
        assert_eq!(publish(&begin("order")), Some(()));
    }
}
