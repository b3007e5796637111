//! Files of `torch.save`, of today and of before torch 1.6, with a few wrong fields: their records
//! are bytes of the file, and none overlap; deflated ones load or are an error.
use crate::input::Input;
use crate::{legacy, load_all, open, zip};
use tensorizer::Verify;
use tensorizer::format::catalog::Format;

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let bytes = match input.below(4) {
        3 => input.rest().to_vec(),
        2 => legacy::file(&mut input),
        _ => zip::file(&mut input),
    };
    let Ok(file) = open(&bytes) else { return };
    if file.format() != Format::Torch {
        return;
    }
    if file.entries().iter().any(|entry| entry.data_offset >= bytes.len() as u64) {
        let _ = load_all(&file, Verify::Nothing);
        return;
    }
    let mut end = 0;
    for entry in file.entries() {
        assert!(entry.data_offset >= end && entry.end() <= bytes.len() as u64);
        end = entry.end();
    }
    let loaded = load_all(&file, Verify::Nothing).unwrap().unwrap();
    for tensor in &loaded {
        let entry = tensor.entry();
        assert_eq!(tensor.bytes(), &bytes[entry.data_offset as usize..entry.end() as usize]);
    }
}
