//! The devices that tests run on.

use std::cell::RefCell;
use std::ffi::{CStr, CString};

use video_vae::capi::*;

use super::{api, sized};

thread_local! {
    /// The device that handles of this test are opened on.
    pub(super) static DEVICE: RefCell<CString> = RefCell::new(c"cpu".to_owned());
}

/// The devices of this machine, by the ids that `vvae_create` takes. With VVAE_REQUIRE_CUDA, a missing GPU is a
/// failure. VVAE_REQUIRE_VULKAN adds the first Vulkan device, which may be one that is not listed, as it is the CPU.
pub fn devices() -> Vec<String> {
    // SAFETY: takes nothing.
    let count = unsafe { (api().vvae_device_count)() };
    let names = (0..count).map(|index| {
        let mut info = sized::<vvae_device_desc>();
        // SAFETY: `struct_size` is right.
        assert_eq!(unsafe { (api().vvae_device_info)(index, &mut info) }, VVAE_OK);
        // SAFETY: the text ends with a NUL.
        unsafe { CStr::from_ptr(info.id.as_ptr()) }.to_str().expect("UTF-8").to_owned()
    });
    let mut names: Vec<String> = names.collect();
    if std::env::var_os("VVAE_REQUIRE_VULKAN").is_some() && !names.iter().any(|name| name == "vulkan:0") {
        names.push("vulkan:0".to_owned());
    }
    let gpu = names.iter().any(|name| name.starts_with("cuda"));
    assert!(gpu || std::env::var_os("VVAE_REQUIRE_CUDA").is_none(), "no CUDA device, but VVAE_REQUIRE_CUDA is set");
    names
}

/// Runs a test once per device. [`Vae::open`] uses that device. With VVAE_REQUIRE_VULKAN it is that one alone.
pub fn on_every_device(test: impl Fn(&str)) {
    let alone = std::env::var_os("VVAE_REQUIRE_VULKAN").is_some();
    for device in devices().into_iter().filter(|device| !alone || device.starts_with("vulkan")) {
        DEVICE.set(CString::new(device.as_str()).expect("no NUL"));
        test(&device);
    }
    DEVICE.set(c"cpu".to_owned());
}
