//! libFuzzer's end of the target `frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| portolan_fuzz::frame::run(input));
