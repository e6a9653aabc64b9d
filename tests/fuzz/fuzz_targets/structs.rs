#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| video_vae_fuzz::run("structs", data));
