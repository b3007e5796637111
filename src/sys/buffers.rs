//! Buffers that are read into, initialised or not. `unsafe` is allowed in this file: it writes to
//! uninitialised memory.
#![allow(unsafe_code)]

use std::io::IoSlice;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::filled::FilledRanges;
use crate::error;

/// Bytes of the smallest page.
const PAGE: usize = 4096;

/// Buffers that are filled front to back. Their bytes are not read before they are written, and the
/// written bytes are counted here.
#[derive(Default)]
pub struct Buffers<'a> {
    /// Start and length of each part that is not filled yet.
    ranges: Vec<libc::iovec>,
    /// The index of the first range that is not full.
    current: usize,
    remaining: usize,
    /// Counts the bytes written, for the code that lent the memory.
    written: Option<&'a AtomicUsize>,
    /// Is told how many bytes arrive. Without it, a long request would show its speed only at its
    /// end.
    observer: Option<&'a (dyn Fn(u64) + Sync)>,
    memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

impl<'a> Buffers<'a> {
    /// Wraps one buffer.
    pub fn from_slice(bytes: &'a mut [u8]) -> Self {
        let mut buffers = Buffers::default();
        buffers.push(as_uninit(bytes));
        buffers
    }

    /// Runs `body`, and tells `observer` how many bytes arrive while it fills the buffers.
    pub fn with_observer<T>(
        &mut self,
        observer: &(dyn Fn(u64) + Sync),
        body: impl FnOnce(&mut Buffers<'_>) -> T,
    ) -> T {
        let ranges = std::mem::take(&mut self.ranges);
        let mut observed = Buffers { ranges, observer: Some(observer), ..*self };
        let result = body(&mut observed);
        (self.ranges, self.current, self.remaining) =
            (observed.ranges, observed.current, observed.remaining);
        result
    }

    /// Writes to each page of the memory that is not filled yet, so that the kernel allocates it.
    pub fn prefault(&mut self) {
        for range in self.ranges.get(self.current..).unwrap_or(&[]) {
            let start: *mut u8 = range.iov_base.cast();
            // Its first byte, and then the first byte of each further page.
            let to_next_page = PAGE - start.addr() % PAGE;
            for at in std::iter::once(0).chain((to_next_page..range.iov_len).step_by(PAGE)) {
                if at >= range.iov_len {
                    break;
                }
                // SAFETY: within a range that was lent to be written to, and is not filled yet. The
                // compiler must not leave it out, so it is volatile.
                unsafe { start.wrapping_add(at).write_volatile(0) };
            }
        }
    }

    /// Tells the observer that bytes have arrived from the source.
    pub fn arrived(&self, bytes: u64) {
        if let Some(observer) = self.observer {
            observer(bytes);
        }
    }

    /// Appends a buffer. If it is adjacent in memory to the last one, both become one range.
    pub fn push(&mut self, bytes: &'a mut [MaybeUninit<u8>]) {
        self.add(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
    }

    fn add(&mut self, range: libc::iovec) {
        self.remaining += range.iov_len;
        match self.ranges.last_mut() {
            Some(last) if last.iov_base.addr() + last.iov_len == range.iov_base.addr() => {
                // Both are lent, whether or not they are of one allocation. The pointer of the
                // first may reach only its own bytes, so the joint pointer is made from the exposed
                // provenance of both.
                last.iov_base.expose_provenance();
                range.iov_base.expose_provenance();
                last.iov_base = std::ptr::with_exposed_provenance_mut(last.iov_base.addr());
                last.iov_len += range.iov_len;
            }
            _ if range.iov_len > 0 => self.ranges.push(range),
            _ => {}
        }
    }

    /// Bytes that are still to be filled.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Bytes of the current range that are still to be filled.
    pub fn remaining_in_range(&self) -> usize {
        self.ranges.get(self.current).map_or(0, |range| range.iov_len)
    }

    /// Copies as many of the bytes as there is room for, and returns their number.
    pub fn fill_from(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while let (Some(range), Some(rest)) = (self.ranges.get(self.current), bytes.get(done..)) {
            let len = range.iov_len.min(rest.len());
            if len == 0 {
                break;
            }
            // SAFETY: `len` bytes of both exist; the buffer's are lent exclusively, so the others
            // do not overlap them.
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), range.iov_base.cast(), len) };
            self.advance_by(len);
            done += len;
        }
        done
    }

    /// Has `fill` write all of `before`, then at most `len` bytes of these buffers, then some of
    /// `after`. Each time that bytes arrive, `arrived` is called with all bytes written so far. At
    /// the end, also after an error, it is called once more, with true. Returns how many of the
    /// `len` bytes were written.
    pub fn tee<E>(
        &mut self,
        len: usize,
        (before, after): (&mut [u8], &mut [u8]),
        arrived: impl Fn(&FilledPart<'_>, bool) + Sync,
        fill: impl FnOnce(&mut Buffers<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let first = before.len();
        let len = len.min(self.remaining);
        let written = self.lend(len, (before, after), arrived, fill)?;
        let filled = written.saturating_sub(first).min(len);
        self.advance_by(filled);
        Ok(filled)
    }

    /// Does the same, but these buffers stay unfilled: their memory is written again later. Returns
    /// how many bytes were written to all three.
    pub fn lend<E>(
        &mut self,
        len: usize,
        (before, after): (&mut [u8], &mut [u8]),
        arrived: impl Fn(&FilledPart<'_>, bool) + Sync,
        fill: impl FnOnce(&mut Buffers<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let written = AtomicUsize::new(0);
        let mut part = Buffers { written: Some(&written), ..Buffers::default() };
        part.push(as_uninit(before));
        let mut remaining = len;
        for range in self.ranges.get(self.current..).unwrap_or(&[]) {
            let iov_len = range.iov_len.min(remaining);
            remaining -= iov_len;
            part.add(libc::iovec { iov_len, ..*range });
        }
        part.push(as_uninit(after));
        let piece = |range: &libc::iovec| (range.iov_base.expose_provenance(), range.iov_len);
        let pieces = part.ranges.iter().map(piece).collect();
        let filled = FilledPart { pieces, written: &written };
        let outer = self.observer;
        let observer = |bytes: u64| {
            if let Some(outer) = outer {
                outer(bytes);
            }
            arrived(&filled, false);
        };
        let outcome = fill(&mut Buffers { observer: Some(&observer), ..part });
        arrived(&filled, true);
        outcome?;
        Ok(written.into_inner())
    }

    /// The destination of the next bytes, for system calls: at most `most` ranges.
    pub fn ranges(&mut self, most: usize) -> &[libc::iovec] {
        let end = self.ranges.len().min(self.current.saturating_add(most));
        self.ranges.get(self.current..end).unwrap_or(&[])
    }

    /// Records that other code, such as a system call, has written the next `len` bytes.
    ///
    /// # Safety
    /// The first `len` bytes of [`Buffers::ranges`] have been written.
    pub unsafe fn advance(&mut self, len: usize) {
        self.advance_by(len);
    }

    fn advance_by(&mut self, mut len: usize) {
        let len_written = len.min(self.remaining);
        self.remaining -= len_written;
        if let Some(written) = self.written {
            written.fetch_add(len_written, Ordering::Release);
        }
        while let Some(range) = self.ranges.get_mut(self.current) {
            if len < range.iov_len {
                range.iov_base = range.iov_base.wrapping_byte_add(len);
                range.iov_len -= len;
                return;
            }
            len -= range.iov_len;
            range.iov_len = 0;
            self.current += 1;
        }
    }
}

/// The bytes that [`Buffers::tee`] has filled so far.
pub struct FilledPart<'f> {
    /// Address and length of each range, as they were before anything was filled.
    pieces: Vec<(usize, usize)>,
    written: &'f AtomicUsize,
}

impl FilledPart<'_> {
    /// The number of bytes that are filled.
    pub fn count(&self) -> usize {
        self.written.load(Ordering::Acquire)
    }

    /// The filled bytes at these positions. Position 0 is the first byte that `tee` lends `fill`.
    pub fn bytes(&self, range: Range<usize>) -> Vec<IoSlice<'_>> {
        let end = range.end.min(self.count());
        let mut at = 0;
        let mut found = Vec::new();
        for &(address, len) in &self.pieces {
            let (from, to) = (range.start.clamp(at, at + len), end.clamp(at, at + len));
            if from < to {
                let start = std::ptr::with_exposed_provenance::<u8>(address + (from - at));
                // SAFETY: these bytes are lent exclusively until `tee` returns, and this does not
                // outlive that. They were written: only `fill_from` and `advance`, whose caller
                // promises it, raise the count, in the order of the pieces. No code writes to them
                // again.
                found.push(IoSlice::new(unsafe { std::slice::from_raw_parts(start, to - from) }));
            }
            at += len;
        }
        found
    }
}

/// Memory that is lent to be filled.
pub enum BufferToFill<'a, 's> {
    /// Its bytes are returned once they are filled.
    Returned(&'a mut [MaybeUninit<u8>]),
    /// The caller keeps access to the bytes, and reads them itself once they are filled.
    Inspected(&'s mut [u8]),
    /// The same for bytes that need not have values; the owner of the memory is told that they do.
    Lent(&'s mut [MaybeUninit<u8>], Option<&'s FilledRanges>),
}

/// Has `fill` fill memory front to back, and returns the bytes of each [`BufferToFill::Returned`].
/// `fill` either fills all of it or fails.
pub fn fill_all<'a>(
    mut memory: Vec<BufferToFill<'a, '_>>,
    fill: impl FnOnce(&mut Buffers<'_>) -> error::Result<()>,
) -> error::Result<Vec<&'a mut [u8]>> {
    let written = AtomicUsize::new(0);
    let mut buffers = Buffers { written: Some(&written), ..Buffers::default() };
    buffers.ranges.reserve(memory.len());
    for lent in &mut memory {
        match lent {
            BufferToFill::Returned(bytes) => buffers.push(bytes),
            BufferToFill::Inspected(bytes) => buffers.push(as_uninit(bytes)),
            BufferToFill::Lent(bytes, _) => buffers.push(bytes),
        }
    }
    let total = buffers.remaining();
    fill(&mut buffers)?;
    if written.into_inner() != total {
        return Err(error::Error::Bug("a batch was not filled".to_owned()));
    }
    let returned = memory.into_iter().filter_map(|lent| match lent {
        // SAFETY: all bytes were written, each once and in order: only `fill_from` and `advance`,
        // whose caller promises it, raise the count, to which no other code has access.
        BufferToFill::Returned(bytes) => Some(unsafe { written_bytes(bytes) }),
        BufferToFill::Lent(bytes, filled) => {
            // SAFETY: as above.
            let bytes = unsafe { written_bytes(bytes) };
            filled.into_iter().for_each(|filled| filled.add(bytes));
            None
        }
        BufferToFill::Inspected(_) => None,
    });
    Ok(returned.collect())
}

/// The same bytes, as bytes with values.
///
/// # Safety
/// All of them were written.
unsafe fn written_bytes(bytes: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [u8]) }
}

/// Fills bytes with zeros.
pub(crate) fn zero_fill(bytes: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    bytes.fill(MaybeUninit::new(0));
    // SAFETY: written just now.
    unsafe { written_bytes(bytes) }
}

/// The same bytes, as memory to be filled.
pub(crate) fn as_uninit(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    // SAFETY: the layout is the same. `Buffers` and `fill_all`, for which it is, write initialised
    // bytes only.
    unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_filled_in_order_and_counted() {
        let mut memory = [MaybeUninit::uninit(); 10];
        let (one, two) = memory.split_at_mut(4);
        let (_, two) = two.split_at_mut(1);
        let put = |buffers: &mut Buffers<'_>| {
            assert_eq!((buffers.remaining(), buffers.remaining_in_range()), (9, 4));
            assert_eq!(buffers.fill_from(b"ab"), 2);
            assert_eq!(buffers.ranges(8).len(), 2);
            assert_eq!(buffers.fill_from(b"cdefghijk"), 7);
            Ok(())
        };
        let bytes =
            fill_all(vec![BufferToFill::Returned(one), BufferToFill::Returned(two)], put).unwrap();
        assert_eq!(bytes, [&b"abcd"[..], b"efghi"]);
    }

    #[test]
    fn prefault_writes_to_every_page() {
        for (start, len) in [(0, 2 * PAGE), (1, PAGE), (4000, 4196), (PAGE - 1, 2), (5, 0)] {
            let mut memory = vec![1u8; 5 * PAGE];
            let to_page = memory.as_ptr().align_offset(PAGE);
            let range = to_page + start..to_page + start + len;
            Buffers::from_slice(&mut memory[range.clone()]).prefault();
            for page in (to_page..range.end).step_by(PAGE) {
                let in_page = page.max(range.start)..(page + PAGE).min(range.end);
                let written = memory[in_page.clone()].iter().filter(|byte| **byte == 0).count();
                assert_eq!(written, usize::from(!in_page.is_empty()), "{start} {len} {page}");
            }
            let outside = memory.iter().filter(|byte| **byte == 0).count();
            assert!(outside <= len / PAGE + 2);
        }
    }

    fn joined(pieces: &[IoSlice<'_>]) -> Vec<u8> {
        pieces.iter().flat_map(|piece| piece.to_vec()).collect()
    }

    #[test]
    fn tee_reports_the_bytes_filled_so_far() {
        let (mut one, mut two) = (*b"....", *b"......");
        let mut buffers = Buffers::from_slice(&mut one);
        buffers.push(as_uninit(&mut two));
        assert_eq!(buffers.fill_from(b"a"), 1);
        let (mut before, mut after) = ([0; 2], [0; 2]);
        let observed = std::sync::Mutex::new(Vec::new());
        let arrived = |filled: &FilledPart<'_>, _| {
            let from = |at: usize| joined(&filled.bytes(at..9));
            observed.lock().unwrap().push((filled.count(), from(1), from(5), from(8)));
        };
        let filled = buffers.tee(5, (&mut before, &mut after), arrived, |part| {
            assert_eq!(part.remaining(), 9);
            part.arrived(0);
            assert_eq!(part.fill_from(b"<<bcde"), 6);
            part.arrived(6);
            assert_eq!(part.fill_from(b"f>"), 2);
            Ok::<_, ()>(())
        });
        assert_eq!(filled, Ok(5));
        let of = |count, one: &[u8], five: &[u8]| (count, one.to_vec(), five.to_vec(), Vec::new());
        let last = || of(8, b"<bcdef>", b"ef>");
        let expected = [of(0, b"", b""), of(6, b"<bcde", b"e"), last()];
        assert_eq!(observed.into_inner().unwrap(), expected);
        assert_eq!(buffers.tee(9, (&mut [], &mut []), |_, _| {}, |_| Err(())), Err(()));
        assert_eq!((buffers.fill_from(b"ghijkl"), buffers.remaining()), (4, 0));
        assert_eq!((&one, &two), (b"abcd", b"efghij"));
    }

    #[test]
    fn partly_filled_memory_is_not_returned() {
        let mut memory = [MaybeUninit::uninit(); 4];
        let some = |buffers: &mut Buffers<'_>| {
            buffers.fill_from(b"abc");
            Ok(())
        };
        let short = fill_all(vec![BufferToFill::Returned(&mut memory)], some).unwrap_err();
        assert!(matches!(short, error::Error::Bug(_)));
    }

    #[test]
    fn adjacent_buffers_become_one_range() {
        let mut memory = *b"abcdef";
        let (one, two) = memory.split_at_mut(3);
        let mut buffers = Buffers::from_slice(one);
        buffers.push(as_uninit(two));
        assert_eq!(buffers.remaining_in_range(), 6);
        assert_eq!((buffers.fill_from(b"ABCDEF"), buffers.remaining()), (6, 0));
        assert_eq!(memory, *b"ABCDEF");
    }
}
