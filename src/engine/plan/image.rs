//! Where in memory tensors go.
//!
//! Small neighbours share a block that is an image of their span of the file, headers included: one
//! range to read and one to copy to a device, instead of three for each tensor. Nothing large is ever
//! kept alive by something small: blocks end after 64 MiB, and large tensors are in none of them.

use super::Extent;
use crate::mem::{ALIGNMENT, DISK_BLOCK};

/// Tensors below this share blocks.
pub const SMALL: u64 = 1 << 20;
/// The most bytes of a shared block.
pub const BLOCK_LEN: u64 = 64 << 20;
/// Unwanted bytes between two tensors of an image; more would cost more memory than they are worth.
const MAX_GAP: u64 = 4 << 10;
/// The longest header within an image.
const MAX_HEADER: u64 = 64 << 10;

/// The place of a tensor's data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// Which block.
    pub block: usize,
    /// Position in it.
    pub offset: u64,
}

/// Memory for tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Bytes.
    pub len: u64,
    /// What it is an image of.
    pub image: Option<Span>,
}

/// A range of a file that a block is an image of, to the end of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Which file.
    pub file: usize,
    /// The position of its first byte.
    pub start: u64,
    /// Where in the block that byte lies, so that data are as aligned as in the file.
    pub skip: u64,
}

impl Block {
    /// Where in the block some bytes of a file lie, if it is an image of them.
    pub fn find(&self, file: usize, position: u64, len: u64) -> Option<u64> {
        let span = self.image.filter(|span| span.file == file)?;
        let offset = position.checked_sub(span.start)?.checked_add(span.skip)?;
        (offset.checked_add(len)? <= self.len).then_some(offset)
    }
}

/// Where tensors lie that share no block with small ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Large {
    /// In one block of host memory, which gives the memory of each back as it goes. Their bytes, and
    /// those of long images, lie in blocks of memory as they lie in blocks of the disk.
    Together,
    /// In a block each.
    Apart,
}

/// Memory for all tensors of a load.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The blocks.
    pub blocks: Vec<Block>,
    /// The place of each tensor.
    pub places: Vec<Place>,
    large: Option<usize>,
    small: Option<usize>,
}

impl Layout {
    /// A layout for tensors, each of one extent and with its bytes in memory, in rising order of
    /// files and positions. None where sizes do not fit into 64 bits, or
    /// the layout itself does not fit into memory.
    pub fn new(tensors: &[(Extent, u64)], large: Large) -> Option<Self> {
        let mut layout = Layout::default();
        layout.places.try_reserve_exact(tensors.len()).ok()?;
        let mut rest = tensors;
        let mut read = (0, 0);
        while !rest.is_empty() {
            let (now, later) = rest.split_at_checked(image_len(rest, read))?;
            for (extent, _) in now {
                read = read.max((extent.file, extent.end()));
            }
            match now {
                [(_, len)] if *len < SMALL => layout.small(*len)?,
                [(extent, len)] => layout.large(extent, *len, large)?,
                image => layout.image(image, large)?,
            }
            rest = later;
        }
        Some(layout)
    }

    /// A block for each tensor of so many bytes.
    pub fn apart(lens: impl Iterator<Item = u64>) -> Option<Self> {
        let mut layout = Layout::default();
        for len in lens {
            layout.places.try_reserve(1).ok()?;
            layout.alone(len)?;
        }
        Some(layout)
    }

    /// A layout in blocks that exist.
    pub fn of(blocks: Vec<Block>, places: Vec<Place>) -> Self {
        Layout { blocks, places, ..Layout::default() }
    }

    fn alone(&mut self, len: u64) -> Option<usize> {
        let block = self.blocks.len();
        self.blocks.try_reserve(1).ok()?;
        self.blocks.push(Block { len, image: None });
        self.places.push(Place { block, offset: 0 });
        Some(block)
    }

    fn large(&mut self, extent: &Extent, len: u64, large: Large) -> Option<()> {
        if large == Large::Apart {
            self.alone(len)?;
            return Some(());
        }
        let block = match self.large {
            Some(block) => block,
            None => {
                let block = self.blocks.len();
                self.blocks.try_reserve(1).ok()?;
                self.blocks.push(Block { len: 0, image: None });
                *self.large.insert(block)
            }
        };
        let end = &mut self.blocks.get_mut(block)?.len;
        let aligned = end.checked_next_multiple_of(ALIGNMENT as u64)?;
        let offset = like_file(aligned, extent.data_offset)?;
        *end = offset.checked_add(len)?;
        self.places.push(Place { block, offset });
        Some(())
    }

    fn small(&mut self, len: u64) -> Option<()> {
        let used = |block| self.blocks.get(block).map_or(u64::MAX, |block: &Block| block.len);
        let fits = |block: &usize| used(*block).saturating_add(len) <= BLOCK_LEN - ALIGNMENT as u64;
        match self.small.filter(fits) {
            Some(block) => self.behind(block, len)?,
            None => self.small = Some(self.alone(len)?),
        }
        Some(())
    }

    /// Behind what a block has, aligned like torch's own allocations.
    fn behind(&mut self, block: usize, len: u64) -> Option<()> {
        let end = &mut self.blocks.get_mut(block)?.len;
        let offset = end.checked_next_multiple_of(ALIGNMENT as u64)?;
        *end = offset.checked_add(len)?;
        self.places.push(Place { block, offset });
        Some(())
    }

    fn image(&mut self, tensors: &[(Extent, u64)], large: Large) -> Option<()> {
        let ((first, _), (last, _)) = tensors.first().zip(tensors.last())?;
        let start = first.header_offset;
        let blocks = large == Large::Together && last.end().checked_sub(start)? >= SMALL;
        let unit = if blocks { DISK_BLOCK } else { ALIGNMENT };
        let skip = start % unit as u64;
        let block = self.blocks.len();
        let len = last.end().checked_sub(start)?.checked_add(skip)?;
        self.blocks.try_reserve(1).ok()?;
        self.blocks.push(Block { len, image: Some(Span { file: first.file, start, skip }) });
        let offset = |extent: &Extent| extent.data_offset.saturating_sub(start) + skip;
        let places = tensors.iter().map(|(extent, _)| Place { block, offset: offset(extent) });
        self.places.extend(places);
        Some(())
    }
}

/// The first position from an aligned one on that lies in a block of memory as `offset` lies in a block
/// of its file, so that direct reads can go straight there; the same position where no such one is
/// aligned.
fn like_file(position: u64, offset: u64) -> Option<u64> {
    let block = DISK_BLOCK as u64;
    if !offset.is_multiple_of(ALIGNMENT as u64) {
        return Some(position);
    }
    position.checked_add((offset % block + block - position % block) % block)
}

/// How many of the first tensors can be in one image; at least one. What those before them have of
/// the file ends at `read`: a file and a position.
fn image_len(tensors: &[(Extent, u64)], read: (usize, u64)) -> usize {
    let Some((first, _)) = tensors.first() else { return 0 };
    if (first.file, first.header_offset) < read {
        return 1;
    }
    let mut end = first.header_offset;
    let base = end - end % ALIGNMENT as u64;
    let fits = |(extent, len): &&(Extent, u64)| {
        // Extents that share bytes are read one by one.
        let near = extent.header_offset.checked_sub(end).is_some_and(|gap| gap <= MAX_GAP);
        let header_len = extent.data_offset.saturating_sub(extent.header_offset);
        end = extent.end();
        near && extent.file == first.file
            && *len < SMALL
            // What has no data in the file needs memory of its own.
            && extent.data_len == *len
            && extent.data_offset.is_multiple_of(ALIGNMENT as u64)
            && header_len <= MAX_HEADER
            && extent.end().saturating_sub(base) <= BLOCK_LEN
    };
    tensors.iter().take_while(fits).count().max(1)
}
