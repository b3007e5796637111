//! Files as `torch.save` wrote them before torch 1.6, without the library.

use crate::input::{Faults, Input, Out, damage};

/// Pickles that may stand where the object and the keys are: with text, counted bytes, lines and
/// marks.
const PICKLES: [&[u8]; 5] = [
    b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.",
    b"\x80\x02cmodule\nname\nq\x00(I12\nU\x02..tR.",
    b"\x80\x02]q\x00(X\x01\x00\x00\x000X\x01\x00\x00\x001e.",
    b"\x80\x04\x95\x04\x00\x00\x00\x00\x00\x00\x00\x8c\x01x.",
    b"\x80\x02T\x03\x00\x00\x00...\x8a\x02\x01\x02\x86.",
];

/// Five pickles, and up to three storages.
pub fn file(input: &mut Input<'_>) -> Vec<u8> {
    let three: Vec<&[u8]> = (0..3).map(|_| *input.one_of(&PICKLES)).collect();
    let storages: Vec<u8> = (0..input.below(4)).map(|_| input.u8()).collect();
    let mut faults = Faults::new(input);
    let mut out = Out { bytes: Vec::new(), faults: &mut faults };
    out.raw(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.");
    out.raw(b"\x80\x02M\xe9\x03.");
    for pickle in three {
        out.raw(pickle);
    }
    for len in storages {
        out.int(len.into(), 8);
        out.raw(&vec![len; len.into()]);
    }
    let mut bytes = out.bytes;
    damage(&mut bytes, faults.input());
    bytes
}
