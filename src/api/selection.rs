//! The tensors of one call, in the order of the file.

use super::file::TensorFile;
use crate::codec::hash::Verify;
use crate::engine::plan::Extent;
use crate::error::{Error, Result};
use crate::format::catalog::Entry;
use crate::io::WantedRead;

impl TensorFile {
    /// Returns the numbers of all tensors in the order of the files, and the place of each in it.
    #[doc(hidden)]
    pub fn order(&self) -> (Vec<usize>, Vec<usize>) {
        let position = |entry: &Entry| (entry.file, entry.header_offset, entry.data_len);
        let mut order: Vec<usize> = (0..self.entries().len()).collect();
        order.sort_by_key(|&number| self.entry(number).ok().map(position));
        let mut places: Vec<usize> = (0..order.len()).collect();
        places.sort_unstable_by_key(|&place| order.get(place));
        (order, places)
    }

    /// Announces that several calls will together read these tensors, as long as the result lives.
    #[doc(hidden)]
    pub fn announce(&self, numbers: &[usize]) -> Result<Vec<WantedRead>> {
        // Strided tensors are parts of records that are loaded as wholes.
        let plain = |number: &usize| self.entry(*number).is_ok_and(|entry| !entry.strided);
        let numbers: Vec<usize> = numbers.iter().copied().filter(plain).collect();
        Ok(Selection::new(self, &numbers)?.announce())
    }
}

/// The requested tensors, sorted by position. The engine numbers them in this order.
pub struct Selection<'f> {
    /// The file that has them.
    pub file: &'f TensorFile,
    /// Their entries in the index.
    pub entries: Vec<&'f Entry>,
    /// Their numbers in the file.
    pub numbers: Vec<usize>,
    /// The position of each in the caller's order.
    pub order: Vec<usize>,
}

impl<'f> Selection<'f> {
    /// Selects tensors by number; one that is given twice is an error.
    pub fn new(file: &'f TensorFile, numbers: &[usize]) -> Result<Self> {
        let in_order = numbers.is_sorted_by(|a, b| a < b);
        let mut seen = vec![false; if in_order { 0 } else { file.entries().len() }];
        let mut sorted = Vec::with_capacity(numbers.len());
        for (at, &number) in numbers.iter().enumerate() {
            let entry = file.entry(number)?;
            if seen.get_mut(number).is_some_and(|seen| std::mem::replace(seen, true)) {
                let name = &entry.name;
                return Err(Error::InvalidArgument(format!("tensor `{name}` is asked for twice")));
            }
            if entry.strided {
                let name = &entry.name;
                return Err(Error::Unsupported(format!(
                    "tensor `{name}` of `{}` is not contiguous in the file: load its storage",
                    file.uri()
                )));
            }
            sorted.push((entry, (number, at)));
        }
        // An empty tensor without a header has the position of the next one, and is sorted before
        // it.
        sorted.sort_unstable_by_key(|(entry, (_, at))| {
            (entry.file, entry.header_offset, entry.data_len, *at)
        });
        let entries = sorted.iter().map(|(entry, _)| *entry).collect();
        let (numbers, order) = sorted.into_iter().map(|(_, numbers)| numbers).unzip();
        Ok(Selection { file, entries, numbers, order })
    }

    /// Refuses to load from encrypted files without a key.
    pub fn check(&self) -> Result<()> {
        let locked = self.file.is_encrypted() && self.file.decryption().is_none();
        if let Some(entry) = self.file.entries().first().filter(|_| locked) {
            return Err(Error::Crypt(format!(
                "Tensor is encrypted, but decryption was not requested: `{}` in `{}`: pass the key \
                 of the file (`key=` of the operators)",
                entry.name,
                self.file.uri()
            )));
        }
        Ok(())
    }

    /// Tells the cache of each server's file how much of it a call reads, as long as the result
    /// lives.
    pub fn announce(&self) -> Vec<WantedRead> {
        let sources = self.file.sources();
        // The entries are in the order of the files.
        let of_files = self.entries.chunk_by(|one, next| one.file == next.file);
        let wanted = of_files.filter_map(|entries| {
            let source = sources.get(entries.first()?.file)?;
            let lens = entries.iter().map(|entry| match entry.whole {
                Some(_) => entry.loaded_len(),
                None => entry.end().saturating_sub(entry.header_offset),
            });
            source.facts().will_read(lens.fold(0, u64::saturating_add))
        });
        wanted.collect()
    }

    /// Returns the ranges of the tensors in their files.
    pub fn extents(&self) -> Vec<Extent> {
        let extents = self.entries.iter().map(|entry| Extent {
            file: entry.file,
            header_offset: entry.header_offset,
            data_offset: entry.data_offset,
            // The ranges of slices are planned separately.
            data_len: if entry.whole.is_some() { 0 } else { entry.data_len },
        });
        extents.collect()
    }

    /// True if any of them is a slice.
    pub fn is_sliced(&self) -> bool {
        self.entries.iter().any(|entry| entry.whole.is_some())
    }

    /// Returns the bytes of the largest tensor that is read as a whole because the hashes of slices
    /// of it are verified: its bytes wait for their hash.
    pub fn held(&self, verify: Verify) -> u64 {
        let verified = verify != Verify::Nothing;
        let sliced = self.entries.iter().filter(|entry| verified && entry.whole.is_some());
        sliced.map(|entry| entry.data_len).max().unwrap_or(0)
    }

    /// Reorders one value for each tensor from the order of the file to the caller's order.
    pub fn to_caller_order<T>(&self, sorted: Vec<T>) -> Vec<T> {
        let mut restored: Vec<(usize, T)> = self.order.iter().copied().zip(sorted).collect();
        restored.sort_unstable_by_key(|(at, _)| *at);
        restored.into_iter().map(|(_, thing)| thing).collect()
    }

    /// Reorders one value for each tensor from the caller's order to the order of the file.
    pub fn to_file_order<T>(&self, values: Vec<T>) -> Vec<T> {
        let mut values: Vec<Option<T>> = values.into_iter().map(Some).collect();
        self.order.iter().filter_map(|&at| values.get_mut(at)?.take()).collect()
    }
}
