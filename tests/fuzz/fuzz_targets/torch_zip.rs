#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tensorizer_fuzz::targets::torch_zip::run(bytes));
