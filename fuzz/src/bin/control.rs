//! libFuzzer's end of the target `control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| portolan_fuzz::control::run(input));
