//! libFuzzer's end of the target `client_memory`, which lives in the engine.
#![no_main]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| portoland::engine::fuzz::client_memory(input));
#[cfg(not(fuzzing))]
compile_error!("build it with `cargo xtask fuzz client_memory`");
