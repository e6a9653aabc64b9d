//! Where memory is short, tiles are told about, or refused where the host wants none.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;

use crate::common::{Buffer, Failure, Vae, create_info, small};
use video_vae::capi::*;

const LATENT: [i64; 5] = [1, 16, 2, 16, 20];
const VIDEO: [i64; 5] = [1, 3, 5, 128, 160];

type Log = Mutex<Vec<(i32, String)>>;

unsafe extern "C" fn keep(log: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: every test passes a log that outlives its handle, and a message is a text.
    let (log, message) = unsafe { (&*log.cast::<Log>(), CStr::from_ptr(message)) };
    log.lock().unwrap().push((level, message.to_str().unwrap().to_owned()));
}

fn open(log: &Log) -> Vae {
    let weights = CString::new(small().to_str().unwrap()).unwrap();
    let log_user = std::ptr::from_ref(log).cast_mut().cast();
    Vae::create(&vvae_create_info { log: Some(keep), log_user, ..create_info(&weights) }).unwrap()
}

fn warnings(log: &Log) -> Vec<String> {
    let all = std::mem::take(&mut *log.lock().unwrap());
    all.into_iter().filter(|(level, _)| *level >= VVAE_LOG_WARNING).map(|(_, text)| text).collect()
}

fn decode(vae: &Vae) -> Result<i32, Failure> {
    vae.decode(&Buffer::new(VVAE_DTYPE_F32, LATENT), &mut Buffer::new(VVAE_DTYPE_F32, VIDEO))
}

/// Lowers the limit until a plan has tiles.
fn make_tight(vae: &Vae) {
    vae.configure("memory_limit", "auto").unwrap();
    vae.configure("decode_tile_overlap", "32").unwrap();
    loop {
        let plan = vae.plan("decode", LATENT).unwrap().0;
        if plan.exact == 0 {
            return;
        }
        vae.configure("memory_limit", &(plan.device_bytes - 1).to_string()).unwrap();
    }
}

/// The number of bytes that an error names.
fn bytes(failure: &Failure) -> u64 {
    let words: Vec<&str> = failure.text.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let at = words.iter().position(|word| *word == "bytes").unwrap();
    words[at - 1].parse().unwrap()
}

#[test]
fn never_fails_where_auto_takes_tiles() {
    let log = Log::default();
    let vae = open(&log);
    make_tight(&vae);
    decode(&vae).unwrap();
    vae.configure("tiles", "never").unwrap();
    let refused = decode(&vae).unwrap_err();
    refused.says(VVAE_ERROR_MEMORY, &["memory_limit", "tiles", "smallest exact plan"]);
    assert_eq!(vae.plan("decode", LATENT).unwrap_err(), refused);
    // What it names is enough, and a byte less is not.
    vae.configure("memory_limit", &(bytes(&refused) - 1).to_string()).unwrap();
    assert_eq!(bytes(&decode(&vae).unwrap_err()), bytes(&refused));
    vae.configure("memory_limit", &bytes(&refused).to_string()).unwrap();
    assert_eq!(vae.plan("decode", LATENT).unwrap().0.exact, 1);
    decode(&vae).unwrap();
}

#[test]
fn never_is_for_streams_too() {
    let log = Log::default();
    let vae = open(&log);
    for (key, value) in [("decode_tile_size", "64"), ("decode_tile_overlap", "16"), ("decode_tiled", "true")] {
        vae.configure(key, value).unwrap();
    }
    drop(vae.stream("decode", LATENT).unwrap());
    assert!(warnings(&log).concat().contains("tiles"), "a stream tells as it is opened");
    vae.configure("decode_tiled", "false").unwrap();
    vae.configure("tiles", "never").unwrap();
    vae.configure("memory_limit", "1MiB").unwrap();
    vae.stream("decode", LATENT).err().unwrap().says(VVAE_ERROR_MEMORY, &["memory_limit", "set tiles to auto"]);
}

#[test]
fn tiles_are_not_asked_for_and_forbidden() {
    let log = Log::default();
    let vae = open(&log);
    vae.configure("tiles", "never").unwrap();
    vae.configure("encode_tiled", "true").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["encode_tiled", "tiles=never"]);
    vae.configure("tiles", "auto").unwrap();
    vae.configure("decode_tiled", "true").unwrap();
    vae.configure("tiles", "never").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["tiles", "decode_tiled=true"]);
    vae.configure("tiles", "sometimes").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["tiles", "one of auto, never"]);
}

#[test]
fn a_tiled_run_warns_and_an_exact_one_does_not() {
    let log = Log::default();
    let vae = open(&log);
    decode(&vae).unwrap();
    assert_eq!(warnings(&log), [""; 0]);
    make_tight(&vae);
    decode(&vae).unwrap();
    let said = warnings(&log);
    assert!(said.len() == 1 && ["tiles", "not exact", "memory_limit"].iter().all(|w| said[0].contains(w)), "{said:?}");
    vae.configure("memory_limit", "auto").unwrap();
    vae.configure("decode_tile_size", "64").unwrap();
    vae.configure("decode_tiled", "true").unwrap();
    decode(&vae).unwrap();
    let said = warnings(&log);
    assert!(said.len() == 1 && said[0].contains("decode_tiled asks"), "{said:?}");
}
