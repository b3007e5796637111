//! Memory and threads near a NUMA node. `unsafe` is allowed in this file: it makes system calls.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;

use super::checked;

/// `MPOL_PREFERRED` of `linux/mempolicy.h`: use this node while it has memory, then others.
const MPOL_PREFERRED: libc::c_long = 1;
/// Bits of a word of a mask of nodes.
const WORD: usize = libc::c_ulong::BITS as usize;
/// Words of a mask of nodes: 1,024 are as many as a kernel can have.
const WORDS: usize = 1024 / WORD;
/// CPUs that a `cpu_set_t` can name.
const MOST_CPUS: usize = libc::CPU_SETSIZE as usize;

/// Asks for the pages of some memory to come from a NUMA node while it has any. Existing pages
/// stay.
///
/// # Errors
/// There is no such node, or the kernel has no support for NUMA.
pub fn prefer_node(memory: &mut [u8], node: usize) -> io::Result<()> {
    let mut mask: [libc::c_ulong; WORDS] = [0; WORDS];
    *mask.get_mut(node / WORD).ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % WORD);
    let page = super::page_size();
    let first = memory.as_ptr().addr();
    let start = first.next_multiple_of(page);
    let end = (first + memory.len()) / page * page;
    if start >= end {
        return Ok(());
    }
    // SAFETY: whole pages of memory that is borrowed exclusively, whose contents stay; the kernel
    // reads as many bits of the mask as it has.
    let code = unsafe {
        let (len, nodes) = (end - start, WORDS * WORD);
        libc::syscall(libc::SYS_mbind, start, len, MPOL_PREFERRED, mask.as_ptr(), nodes, 0)
    };
    checked(code).map(drop)
}

/// The preferred node of the pages at an address, if there is one.
#[cfg(test)]
pub fn preferred_node(memory: &[u8]) -> io::Result<Option<usize>> {
    /// `MPOL_F_ADDR`: the policy of an address, not of the thread.
    const OF_ADDRESS: libc::c_long = 2;
    let (mut mode, mut mask): (libc::c_int, [libc::c_ulong; WORDS]) = (0, [0; WORDS]);
    // SAFETY: writes to the two variables; the address is only looked up.
    let code = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            mask.as_mut_ptr(),
            WORDS * WORD,
            memory.as_ptr(),
            OF_ADDRESS,
        )
    };
    checked(code)?;
    let has =
        |node: &usize| mask.get(node / WORD).is_some_and(|word| word >> (node % WORD) & 1 == 1);
    let mut nodes = (0..WORDS * WORD).filter(has);
    Ok(nodes.next().filter(|_| libc::c_long::from(mode) == MPOL_PREFERRED))
}

/// The numbers of the CPUs on which this thread may run.
///
/// # Errors
/// The machine has more than 1,024 CPUs.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: all bits zero are an empty set, which the kernel fills.
    let (code, set) = unsafe {
        let code = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr());
        (code, set.assume_init())
    };
    checked(code)?;
    // SAFETY: each number is less than the number of bits in a set.
    Ok((0..MOST_CPUS).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Restricts this thread to some CPUs.
///
/// # Errors
/// It may run on none of them.
pub fn bind_thread_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: all bits zero are an empty set; each number is less than the number of its bits.
    let code = unsafe {
        for &cpu in cpus.iter().filter(|&&cpu| cpu < MOST_CPUS) {
            libc::CPU_SET(cpu, set.assume_init_mut());
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set.as_ptr())
    };
    checked(code).map(drop)
}

#[cfg(all(test, not(miri), not(feature = "models")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_allocated_on_the_preferred_node() {
        let mut map = memmap2::MmapMut::map_anon(1 << 20).unwrap();
        // Kernels without NUMA, and sandboxes, lack these calls.
        if let Ok(before) = preferred_node(&map) {
            assert_eq!(before, None);
            prefer_node(&mut map, 0).unwrap();
            assert_eq!(preferred_node(&map).unwrap(), Some(0));
        }
        assert!(prefer_node(&mut map, 5000).is_err());
        assert!(prefer_node(map.get_mut(1..9).unwrap(), 0).is_ok(), "not one whole page");
    }

    #[test]
    fn a_bound_thread_runs_on_its_cpus_only() {
        let bind_to_last_cpu = || {
            let before = allowed_cpus().unwrap();
            let last = before.last().copied().unwrap();
            bind_thread_to(&[last]).unwrap();
            assert_eq!(allowed_cpus().unwrap(), [last]);
            assert!(bind_thread_to(&[]).is_err());
        };
        std::thread::scope(|scope| scope.spawn(bind_to_last_cpu).join().unwrap());
    }
}
