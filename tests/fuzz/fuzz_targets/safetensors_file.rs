#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tensorizer_fuzz::targets::safetensors_file::run(bytes));
