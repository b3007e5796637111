//! Whole safetensors files with a few wrong fields, read by the library of that name as well.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorizer_fuzz::input::Input;
use tensorizer_fuzz::safetensors::{compare, file};

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let made = !input.once_in(4);
    compare(&if made { file(&mut input) } else { input.rest().to_vec() });
});
