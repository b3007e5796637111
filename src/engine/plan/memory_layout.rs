//! The memory layout of a load: the blocks of memory, and the location of each tensor in them.
//!
//! Small tensors that are adjacent in the file share a block that is an image of their range of the
//! file, headers included. So one range is read and one is copied to a device, instead of three for
//! each tensor. A small tensor never keeps a large block alive for itself: shared blocks have at
//! most 64 MiB, and contain no large tensors.

use super::Extent;
use crate::mem::{ALIGNMENT, DISK_BLOCK};

/// Tensors of fewer bytes share blocks.
pub const SMALL: u64 = 1 << 20;
/// Maximum bytes of a shared block.
pub const BLOCK_LEN: u64 = 64 << 20;
/// Maximum gap between two tensors of an image. A longer one would cost more memory than it is
/// worth.
const MAX_GAP: u64 = 4 << 10;
/// The longest header within an image.
const MAX_HEADER: u64 = 64 << 10;

/// The location of a tensor's data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockLocation {
    /// Index of the block.
    pub block: usize,
    /// Position in the block.
    pub offset: u64,
}

/// A block of memory for tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLayout {
    /// Number of bytes.
    pub len: u64,
    /// The range of a file that it is an image of, if it is one.
    pub image: Option<FileRange>,
}

/// The range of a file that a block is an image of. It extends to the end of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRange {
    /// Index of the file.
    pub file: usize,
    /// The position of its first byte.
    pub start: u64,
    /// Position of that byte in the block, so that data are aligned as in the file.
    pub skip: u64,
}

impl BlockLayout {
    /// Returns the position in the block of some bytes of a file, if it is an image of them.
    pub fn find(&self, file: usize, position: u64, len: u64) -> Option<u64> {
        let span = self.image.filter(|span| span.file == file)?;
        let offset = position.checked_sub(span.start)?.checked_add(span.skip)?;
        (offset.checked_add(len)? <= self.len).then_some(offset)
    }
}

/// The memory of tensors that share no block with small ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LargeTensors {
    /// In one block of host memory, which returns the memory of each tensor to the system when that
    /// tensor is freed. The tensors, and long images, have the same offset within a disk block as
    /// in the file.
    OneBlock,
    /// In one block each.
    OwnBlocks,
}

/// The memory layout of all tensors of a load.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MemoryLayout {
    /// The blocks.
    pub blocks: Vec<BlockLayout>,
    /// The location of each tensor.
    pub locations: Vec<BlockLocation>,
    large_block: Option<usize>,
    small_block: Option<usize>,
}

impl MemoryLayout {
    /// Plans a layout for tensors, each given as its extent and its bytes in memory, in rising
    /// order of files and positions. None if sizes exceed 64 bits, or if the layout itself does not
    /// fit into memory.
    pub fn new(tensors: &[(Extent, u64)], large: LargeTensors) -> Option<Self> {
        let mut layout = MemoryLayout::default();
        let mut rest = tensors;
        let mut read = (0, 0);
        while !rest.is_empty() {
            let (now, later) = rest.split_at_checked(image_len(rest, read))?;
            for (extent, _) in now {
                read = read.max((extent.file, extent.end()));
            }
            match now {
                [(_, len)] if *len < SMALL => layout.add_small(*len)?,
                [(extent, len)] => layout.add_large(extent, *len, large)?,
                image => layout.add_image(image, large)?,
            }
            rest = later;
        }
        Some(layout)
    }

    /// Plans one block for each tensor, given the tensors' lengths.
    pub fn one_block_each(lens: impl Iterator<Item = u64>) -> Option<Self> {
        let mut layout = MemoryLayout::default();
        for len in lens {
            layout.add_own_block(len);
        }
        Some(layout)
    }

    fn add_own_block(&mut self, len: u64) -> usize {
        let block = self.blocks.len();
        self.blocks.push(BlockLayout { len, image: None });
        self.locations.push(BlockLocation { block, offset: 0 });
        block
    }

    fn add_large(&mut self, extent: &Extent, len: u64, large: LargeTensors) -> Option<()> {
        if large == LargeTensors::OwnBlocks {
            self.add_own_block(len);
            return Some(());
        }
        let block = *self.large_block.get_or_insert(self.blocks.len());
        if block == self.blocks.len() {
            self.blocks.push(BlockLayout { len: 0, image: None });
        }
        self.append(block, len, |aligned| like_file(aligned, extent.data_offset))
    }

    fn add_small(&mut self, len: u64) -> Option<()> {
        let used = |block| self.blocks.get(block).map_or(u64::MAX, |block: &BlockLayout| block.len);
        let fits = |block: &usize| used(*block).saturating_add(len) <= BLOCK_LEN - ALIGNMENT as u64;
        match self.small_block.filter(fits) {
            Some(block) => return self.append(block, len, Some),
            None => self.small_block = Some(self.add_own_block(len)),
        }
        Some(())
    }

    /// Appends a tensor to a block, where `place` says from a position on that is aligned like
    /// torch's own allocations.
    fn append(&mut self, block: usize, len: u64, place: impl Fn(u64) -> Option<u64>) -> Option<()> {
        let end = &mut self.blocks.get_mut(block)?.len;
        let offset = place(end.checked_next_multiple_of(ALIGNMENT as u64)?)?;
        *end = offset.checked_add(len)?;
        self.locations.push(BlockLocation { block, offset });
        Some(())
    }

    fn add_image(&mut self, tensors: &[(Extent, u64)], large: LargeTensors) -> Option<()> {
        let ((first, _), (last, _)) = tensors.first().zip(tensors.last())?;
        let start = first.header_offset;
        let blocks = large == LargeTensors::OneBlock && last.end().checked_sub(start)? >= SMALL;
        let unit = if blocks { DISK_BLOCK } else { ALIGNMENT };
        let skip = start % unit as u64;
        let block = self.blocks.len();
        let len = last.end().checked_sub(start)?.checked_add(skip)?;
        self.blocks
            .push(BlockLayout { len, image: Some(FileRange { file: first.file, start, skip }) });
        let offset = |extent: &Extent| extent.data_offset.saturating_sub(start) + skip;
        let locations =
            tensors.iter().map(|(extent, _)| BlockLocation { block, offset: offset(extent) });
        self.locations.extend(locations);
        Some(())
    }
}

/// Returns the first position at or after the aligned `position` that has the same offset within a
/// disk block as the file position `offset`. Direct reads can then go straight there. Returns
/// `position` itself if no such position is aligned.
fn like_file(position: u64, offset: u64) -> Option<u64> {
    let block = DISK_BLOCK as u64;
    if !offset.is_multiple_of(ALIGNMENT as u64) {
        return Some(position);
    }
    position.checked_add((offset % block + block - position % block) % block)
}

/// Returns how many of the first tensors fit into one image; at least one. `read`: the end, as file
/// and position, of the extents before them.
fn image_len(tensors: &[(Extent, u64)], read: (usize, u64)) -> usize {
    let Some((first, _)) = tensors.first() else { return 0 };
    if (first.file, first.header_offset) < read {
        return 1;
    }
    let mut end = first.header_offset;
    let base = end - end % ALIGNMENT as u64;
    let fits = |(extent, len): &&(Extent, u64)| {
        // Extents that overlap are read one by one.
        let near = extent.header_offset.checked_sub(end).is_some_and(|gap| gap <= MAX_GAP);
        let header_len = extent.data_offset.saturating_sub(extent.header_offset);
        end = extent.end();
        near && extent.file == first.file
            && *len < SMALL
            // A tensor without data in the file needs memory of its own.
            && extent.data_len == *len
            && extent.data_offset.is_multiple_of(ALIGNMENT as u64)
            && header_len <= MAX_HEADER
            && extent.end().saturating_sub(base) <= BLOCK_LEN
    };
    tensors.iter().take_while(fits).count().max(1)
}
