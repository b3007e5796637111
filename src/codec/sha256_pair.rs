//! The compression function of SHA-256 on two streams at once, with the SHA instructions of x86-64.
//! One of the few modules with `unsafe` code.
//!
//! The rounds are those of FIPS 180-4, section 6.2.2, four per step: `sha256rnds2` does two, and
//! `sha256msg1`/`sha256msg2` extend the message. Steps of the two streams alternate, so that the
//! unit works on one while the other waits for its result.
#![cfg_attr(target_arch = "x86_64", allow(unsafe_code))]

/// Compresses the same number of blocks into each state. Returns false, and does nothing, on
/// processors without these instructions.
#[cfg(target_arch = "x86_64")]
pub fn compress(states: [&mut [u32; 8]; 2], blocks: [&[[u8; 64]]; 2]) -> bool {
    let able = is_x86_feature_detected!("sha")
        && is_x86_feature_detected!("sse4.1")
        && is_x86_feature_detected!("ssse3");
    if able {
        // SAFETY: the instructions that the function needs were just detected.
        unsafe { x86::compress(states, blocks) };
    }
    able
}

/// Does nothing: this architecture does not have the instructions.
#[cfg(not(target_arch = "x86_64"))]
pub fn compress(_states: [&mut [u32; 8]; 2], _blocks: [&[[u8; 64]]; 2]) -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// The round constants of FIPS 180-4, section 4.2.2, four per row.
    #[rustfmt::skip]
    static ROUND_CONSTANTS: [[u32; 4]; 16] = [
        [0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5], [0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5],
        [0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3], [0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174],
        [0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc], [0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da],
        [0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7], [0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967],
        [0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13], [0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85],
        [0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3], [0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070],
        [0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5], [0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3],
        [0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208], [0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2],
    ];

    /// A state in the order of the instructions: words A B E F and C D G H.
    type StateHalves = (__m128i, __m128i);

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    pub fn compress(states: [&mut [u32; 8]; 2], blocks: [&[[u8; 64]]; 2]) {
        let [state_a, state_b] = states;
        let (mut a, mut b) = (unpack(state_a), unpack(state_b));
        for (block_a, block_b) in blocks[0].iter().zip(blocks[1]) {
            let (before_a, before_b) = (a, b);
            let (mut words_a, mut words_b) = (message(block_a), message(block_b));
            for (step, constants) in ROUND_CONSTANTS.iter().enumerate() {
                let k = load(constants);
                if step >= 4 {
                    words_a = extend(words_a);
                    words_b = extend(words_b);
                }
                // An extension puts the current four words last; before the first extension they
                // are at `step`.
                let (now_a, now_b) = if step < 3 {
                    (pick(&words_a, step), pick(&words_b, step))
                } else {
                    (words_a[3], words_b[3])
                };
                a = rounds(a, _mm_add_epi32(now_a, k));
                b = rounds(b, _mm_add_epi32(now_b, k));
            }
            a = (_mm_add_epi32(a.0, before_a.0), _mm_add_epi32(a.1, before_a.1));
            b = (_mm_add_epi32(b.0, before_b.0), _mm_add_epi32(b.1, before_b.1));
        }
        *state_a = pack(a);
        *state_b = pack(b);
    }

    #[inline]
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn rounds((abef, cdgh): StateHalves, message: __m128i) -> StateHalves {
        let cdgh = _mm_sha256rnds2_epu32(cdgh, abef, message);
        let abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(message, 0x0e));
        (abef, cdgh)
    }

    /// Drops the oldest four of sixteen words and appends the next four.
    #[inline]
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn extend([w0, w1, w2, w3]: [__m128i; 4]) -> [__m128i; 4] {
        let sum = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));
        [w1, w2, w3, _mm_sha256msg2_epu32(sum, w3)]
    }

    #[inline]
    #[target_feature(enable = "sse4.1")]
    fn pick(words: &[__m128i; 4], step: usize) -> __m128i {
        match step {
            0 => words[0],
            1 => words[1],
            _ => words[2],
        }
    }

    #[inline]
    #[target_feature(enable = "sse4.1")]
    fn load(words: &[u32; 4]) -> __m128i {
        // SAFETY: reads the sixteen bytes of the array; the instruction needs no alignment.
        unsafe { _mm_loadu_si128(words.as_ptr().cast()) }
    }

    /// The sixteen big-endian words of a block.
    #[inline]
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn message(block: &[u8; 64]) -> [__m128i; 4] {
        let swap = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
        let quarter = |at: usize| {
            // SAFETY: `at` is 0 to 3, so the sixteen bytes lie in the block; no alignment is
            // needed.
            let words = unsafe { _mm_loadu_si128(block.as_ptr().cast::<__m128i>().add(at)) };
            _mm_shuffle_epi8(words, swap)
        };
        [quarter(0), quarter(1), quarter(2), quarter(3)]
    }

    #[inline]
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn unpack(state: &[u32; 8]) -> StateHalves {
        let [a, b, c, d, e, f, g, h] = *state;
        let cdab = load(&[b, a, d, c]);
        let efgh = load(&[h, g, f, e]);
        (_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0))
    }

    #[inline]
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn pack((abef, cdgh): StateHalves) -> [u32; 8] {
        let (mut low, mut high) = ([0u32; 4], [0u32; 4]);
        // SAFETY: each writes the sixteen bytes of its array; no alignment is needed.
        unsafe {
            _mm_storeu_si128(low.as_mut_ptr().cast(), abef);
            _mm_storeu_si128(high.as_mut_ptr().cast(), cdgh);
        }
        let ([f, e, b, a], [h, g, d, c]) = (low, high);
        [a, b, c, d, e, f, g, h]
    }
}
