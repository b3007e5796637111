//! Memory that is read into, initialised or not. One of the few doors to `unsafe`.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Buffers that are filled front to back. Nobody reads their bytes before they were written, and how
/// many were is counted here.
#[derive(Default)]
pub struct Buffers<'a> {
    /// Start and length of what is not filled yet.
    ranges: Vec<libc::iovec>,
    /// The first range that is not full.
    at: usize,
    left: usize,
    /// Grows by what was written, for whoever lent the memory.
    written: Option<&'a Cell<usize>>,
    lent: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

impl<'a> Buffers<'a> {
    /// One buffer.
    pub fn of(bytes: &'a mut [u8]) -> Self {
        let mut buffers = Buffers::default();
        let range = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        buffers.add(range);
        buffers
    }

    /// Adds a buffer behind the others; what is adjacent in memory becomes one.
    pub fn push(&mut self, bytes: &'a mut [MaybeUninit<u8>]) {
        self.add(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
    }

    fn add(&mut self, range: libc::iovec) {
        self.left += range.iov_len;
        match self.ranges.last_mut() {
            Some(last) if last.iov_base.addr() + last.iov_len == range.iov_base.addr() => {
                // Of one allocation or not, both are lent: the pointers of the first reach its own
                // bytes only, so that it is joined under the exposed provenance of both.
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
    pub fn left(&self) -> usize {
        self.left
    }

    /// Bytes that can be filled in one piece of memory.
    pub fn left_in_one(&self) -> usize {
        self.ranges.get(self.at).map_or(0, |range| range.iov_len)
    }

    /// Takes as many of the bytes as there is room for, and says how many.
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while let (Some(range), Some(rest)) = (self.ranges.get(self.at), bytes.get(done..)) {
            let len = range.iov_len.min(rest.len());
            if len == 0 {
                break;
            }
            // SAFETY: `len` bytes of both exist; the buffer's are lent exclusively, so that no others
            // overlap them.
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), range.iov_base.cast(), len) };
            self.advance_by(len);
            done += len;
        }
        done
    }

    /// Where the next bytes go, for system calls: at most so many ranges.
    pub fn ranges(&mut self, most: usize) -> &[libc::iovec] {
        let end = self.ranges.len().min(self.at.saturating_add(most));
        self.ranges.get(self.at..end).unwrap_or(&[])
    }

    /// Notes that somebody else has written the next bytes.
    ///
    /// # Safety
    /// So many bytes from the start of [`Buffers::ranges`] on have been written.
    pub unsafe fn advance(&mut self, len: usize) {
        self.advance_by(len);
    }

    fn advance_by(&mut self, mut len: usize) {
        let len_written = len.min(self.left);
        self.left -= len_written;
        if let Some(written) = self.written {
            written.set(written.get() + len_written);
        }
        while let Some(range) = self.ranges.get_mut(self.at) {
            if len < range.iov_len {
                range.iov_base = range.iov_base.wrapping_byte_add(len);
                range.iov_len -= len;
                return;
            }
            len -= range.iov_len;
            range.iov_len = 0;
            self.at += 1;
        }
    }
}

/// Memory that is lent to be filled.
pub enum Lent<'a, 's> {
    /// Its bytes are given back.
    Kept(&'a mut [MaybeUninit<u8>]),
    /// Its bytes are looked at by who lent it.
    Passing(&'s mut [u8]),
}

/// Has memory filled front to back, and gives back the bytes of what is kept. `fill` either fills all
/// of it or fails.
pub fn filled<'a, E>(
    mut memory: Vec<Lent<'a, '_>>,
    fill: impl FnOnce(&mut Buffers<'_>) -> Result<(), E>,
    short: impl FnOnce() -> E,
) -> Result<Vec<&'a mut [u8]>, E> {
    let written = Cell::new(0);
    let mut buffers = Buffers { written: Some(&written), ..Buffers::default() };
    for lent in &mut memory {
        match lent {
            Lent::Kept(bytes) => buffers.push(bytes),
            Lent::Passing(bytes) => buffers.push(to_fill(bytes)),
        }
    }
    let total = buffers.left();
    fill(&mut buffers)?;
    if written.get() != total {
        return Err(short());
    }
    let kept = memory.into_iter().filter_map(|lent| match lent {
        // SAFETY: all bytes were written, each once and in order: only `put` and `advance`, whose
        // caller promises it, raise the count, and nobody else has it.
        Lent::Kept(bytes) => Some(unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [u8]) }),
        Lent::Passing(_) => None,
    });
    Ok(kept.collect())
}

/// Memory as bytes, which are all zero.
pub fn zero_filled(memory: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    memory.fill(MaybeUninit::new(0));
    // SAFETY: initialised by the line above.
    unsafe { &mut *(std::ptr::from_mut(memory) as *mut [u8]) }
}

/// The same bytes, as memory to be written.
pub(crate) fn to_fill(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    // SAFETY: the same layout. It is for `Buffers` and `filled`, which write initialised bytes only.
    unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_filled_in_order_and_counted() {
        let mut memory = [MaybeUninit::uninit(); 10];
        let (one, two) = memory.split_at_mut(4);
        let (_, two) = two.split_at_mut(1);
        let put = |buffers: &mut Buffers<'_>| {
            assert_eq!((buffers.left(), buffers.left_in_one()), (9, 4));
            assert_eq!(buffers.put(b"ab"), 2);
            assert_eq!(buffers.ranges(8).len(), 2);
            assert_eq!(buffers.put(b"cdefghijk"), 7);
            Ok::<(), ()>(())
        };
        let bytes = filled(vec![Lent::Kept(one), Lent::Kept(two)], put, || ()).unwrap();
        assert_eq!(bytes, [&b"abcd"[..], b"efghi"]);
    }

    #[test]
    fn what_was_not_filled_is_not_given_out() {
        let mut memory = [MaybeUninit::uninit(); 4];
        let some = |buffers: &mut Buffers<'_>| {
            buffers.put(b"abc");
            Ok(())
        };
        assert_eq!(filled(vec![Lent::Kept(&mut memory)], some, || "short"), Err("short"));
    }

    #[test]
    fn adjacent_buffers_are_one() {
        let mut memory = *b"abcdef";
        let (one, two) = memory.split_at_mut(3);
        let mut buffers = Buffers::of(one);
        buffers.push(to_fill(two));
        assert_eq!(buffers.left_in_one(), 6);
        assert_eq!((buffers.put(b"ABCDEF"), buffers.left()), (6, 0));
        assert_eq!(memory, *b"ABCDEF");
    }
}
