//! libFuzzer's end of the target `conversation`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| portolan_fuzz::conversation::run(input));
