//! Whole safetensors files with a few wrong fields, read by the library of that name as well.
use crate::input::Input;
use crate::safetensors::{compare, file};

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let made = !input.once_in(4);
    compare(&if made { file(&mut input) } else { input.rest().to_vec() });
}
