//! `vvae_configure` with any key and value, and `vvae_create` with any list of devices.

use std::ffi::{CStr, CString};
use std::sync::OnceLock;

use super::{Bytes, timed};
use crate::common::safetensors::Folder;
use crate::common::{Vae, api, create_info, tiny};
use video_vae::capi::*;

/// The keys, and two that are none.
fn keys() -> &'static [CString] {
    static KEYS: OnceLock<Vec<CString>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let mut keys = vec![c"".to_owned(), c"no_such_key".to_owned()];
        // SAFETY: indices are below the counts, and texts of parameters are valid for ever.
        unsafe {
            for node in 0..(api().vvae_node_count)() {
                for param in 0..(api().vvae_param_count)(node) {
                    let mut info = crate::common::sized::<vvae_param_desc>();
                    assert_eq!((api().vvae_param_info)(node, param, &mut info), VVAE_OK);
                    keys.push(CStr::from_ptr(info.key).to_owned());
                }
            }
        }
        keys.dedup();
        keys
    })
}

/// A handle with one device, and one with two.
fn handles() -> &'static [Vae; 2] {
    static HANDLES: OnceLock<[Vae; 2]> = OnceLock::new();
    HANDLES.get_or_init(|| [c"cpu", c"cpu,cpu"].map(|device| open(device).expect("the CPU")))
}

fn open(device: &CStr) -> Result<Vae, crate::common::Failure> {
    let path = CString::new(tiny().to_str().expect("UTF-8")).expect("no NUL");
    Vae::create(&vvae_create_info { device: device.as_ptr(), ..create_info(&path) })
}

pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let vae = &handles()[bytes.below(2) as usize];
    let choice = bytes.byte();
    let text = |bytes: &[u8]| CString::new(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).expect("no NUL");
    if choice == 255 {
        match timed("create", || open(&text(bytes.rest()))) {
            Ok(vae) => assert_eq!(vae.free(), VVAE_OK),
            Err(why) => assert!(why.status == VVAE_ERROR_DEVICE || why.status == VVAE_ERROR_ARGUMENT, "{why:?}"),
        }
        return;
    }
    let key = match choice {
        254 => text(&bytes.text()),
        _ => keys()[usize::from(choice) % keys().len()].clone(),
    };
    if key.as_c_str() == c"trace" {
        return trace(vae, bytes.rest());
    }
    let value = text(bytes.rest());
    // Hundreds of threads take as long to start as a thousand other inputs: one in 64 has them.
    if key.as_c_str() == c"threads" && is_many(&value) && data[0] >= 4 {
        return;
    }
    check(vae, &key, &value);
}

fn is_many(value: &CStr) -> bool {
    value.to_str().ok().and_then(|value| value.trim().parse::<u64>().ok()).is_some_and(|threads| threads > 8)
}

/// A trace is a file, so it gets a folder of its own.
fn trace(vae: &Vae, name: &[u8]) {
    let folder = Folder::new("fuzz-trace");
    let name: Vec<u8> = name.iter().copied().filter(|byte| !matches!(byte, 0 | b'/')).collect();
    let path = [folder.0.as_os_str().as_encoded_bytes(), b"/", &name].concat();
    check(vae, c"trace", &CString::new(path).expect("no NUL"));
    check(vae, c"trace", c"");
}

fn check(vae: &Vae, key: &CStr, value: &CStr) {
    // SAFETY: two C strings.
    let set = || unsafe { (api().vvae_configure)(vae.0, key.as_ptr(), value.as_ptr()) };
    let status = timed("configure", set);
    // A file that cannot be written has the status of files.
    let expected = [VVAE_OK, VVAE_ERROR_ARGUMENT, VVAE_ERROR_DEVICE, VVAE_ERROR_CHECKPOINT];
    assert!(expected.contains(&status), "{status}");
    assert!(status == VVAE_OK || !crate::common::error_text(vae.0).is_empty());
    assert_eq!(set(), status, "the same again");
}
