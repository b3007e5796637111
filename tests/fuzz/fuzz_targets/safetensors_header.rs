//! Headers of safetensors, as text of any kind, read by the library of that name as well.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorizer_fuzz::safetensors::{compare, pack};

fuzz_target!(|bytes: &[u8]| {
    let Some((&len, json)) = bytes.split_first() else { return };
    compare(&pack(json, &vec![1; len.into()]));
});
