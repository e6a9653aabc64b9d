//! Discovery: nodes, ports, parameters and devices are described, and described values are accepted.

mod common;

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char};

use common::{Vae, api, error_text, outcome, sized, small};
use video_vae::capi::*;

/// A static string of the library.
fn text(text: *const c_char) -> &'static str {
    assert!(!text.is_null());
    // SAFETY: the library's strings are static and end with a NUL.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap()
}

fn node(index: u32) -> vvae_node_desc {
    let mut info = sized();
    // SAFETY: `struct_size` is right.
    outcome(std::ptr::null_mut(), unsafe { (api().vvae_node_info)(index, &mut info) }).unwrap();
    info
}

fn params(node: u32) -> Vec<vvae_param_desc> {
    // SAFETY: takes numbers only.
    let count = unsafe { (api().vvae_param_count)(node) };
    let info = |i| {
        let mut info = sized();
        // SAFETY: `struct_size` is right.
        outcome(std::ptr::null_mut(), unsafe { (api().vvae_param_info)(node, i, &mut info) }).unwrap();
        info
    };
    (0..count).map(info).collect()
}

fn choices(node: u32, param: u32) -> Vec<&'static str> {
    // SAFETY: takes numbers only.
    let count = unsafe { (api().vvae_choice_count)(node, param) };
    // SAFETY: takes numbers only.
    (0..count).map(|i| text(unsafe { (api().vvae_choice)(node, param, i) })).collect()
}

#[test]
fn versions_match_the_package() {
    // SAFETY: takes nothing.
    assert_eq!(unsafe { (api().vvae_abi_version)() }, VVAE_ABI_VERSION);
    // SAFETY: takes nothing.
    assert_eq!(text(unsafe { (api().vvae_version)() }), env!("CARGO_PKG_VERSION"));
}

#[test]
fn nodes_have_matching_ports() {
    // SAFETY: takes nothing.
    assert_eq!(unsafe { (api().vvae_node_count)() }, 2);
    let mut ports = BTreeSet::new();
    for n in 0..2 {
        let desc = node(n);
        assert!(!text(desc.label).is_empty() && !text(desc.help).is_empty());
        // SAFETY: takes numbers only.
        for p in 0..unsafe { (api().vvae_port_count)(n) } {
            let mut port = sized::<vvae_port_desc>();
            // SAFETY: `struct_size` is right.
            assert_eq!(unsafe { (api().vvae_port_info)(n, p, &mut port) }, VVAE_OK);
            // SAFETY: the library's array has `dtype_count` elements.
            let dtypes = unsafe { std::slice::from_raw_parts(port.dtypes, port.dtype_count as usize) };
            assert!(dtypes.contains(&VVAE_DTYPE_F32));
            assert_eq!(dtypes.contains(&VVAE_DTYPE_U8), text(port.kind) == "video");
            assert!(!text(port.help).is_empty());
            ports.insert((text(desc.id), text(port.name), text(port.kind), port.direction, port.optional));
        }
    }
    let expected = [
        ("encode", "video", "video", VVAE_PORT_INPUT, 0),
        ("encode", "latent", "latent", VVAE_PORT_OUTPUT, 0),
        ("encode", "logvar", "latent", VVAE_PORT_OUTPUT, 1),
        ("decode", "latent", "latent", VVAE_PORT_INPUT, 0),
        ("decode", "video", "video", VVAE_PORT_OUTPUT, 0),
    ];
    assert_eq!(ports, BTreeSet::from(expected));
}

#[test]
fn described_values_are_accepted() {
    let v = Vae::open(&small()).unwrap();
    for n in 0..2 {
        for (p, param) in params(n).iter().enumerate() {
            let key = text(param.key);
            assert!(!key.is_empty() && !text(param.help).is_empty() && text(param.unit).is_ascii(), "{key:?}");
            let take =
                |value: &str| v.configure(key, value).unwrap_or_else(|why| panic!("{key}={value}: {}", why.text));
            let choices = choices(n, p as u32);
            assert_eq!(choices.len(), param.choice_count as usize);
            assert_eq!(choices.is_empty(), param.kind != VVAE_PARAM_CHOICE, "{key}");
            // The test's processor may lack instruction sets, and lacks a precision and a format of caches. A library
            // without CUDA plans for no card.
            let is_refused = ["instruction_set", "precision", "cache"].contains(&key)
                || key == "device_like" && cfg!(not(feature = "cuda"));
            if !is_refused {
                choices.iter().for_each(|choice| assert_eq!(take(choice), VVAE_OK));
            }
            if param.flags & VVAE_PARAM_HAS_AUTO != 0 {
                take("auto");
            }
            if param.flags & VVAE_PARAM_HAS_RANGE != 0 && param.kind != VVAE_PARAM_FLOAT {
                assert!(param.min < param.max && param.step > 0.0, "{key}");
                take(&format!("{}", param.min));
                take(&format!("{}", param.min + param.step));
                // u64::MAX is not exact as a double.
                take(&if param.max > 1e19 { u64::MAX.to_string() } else { param.max.to_string() });
                v.configure(key, &format!("{}", param.max * 2.0)).unwrap_err().says(VVAE_ERROR_ARGUMENT, &[key]);
                v.configure(key, "-1").unwrap_err().says(VVAE_ERROR_ARGUMENT, &[key, "\"-1\""]);
            }
            if param.kind == VVAE_PARAM_FLOAT {
                take(&format!("{}", param.min * 2.0));
                take(&format!("{}", param.max));
            }
            if param.kind == VVAE_PARAM_BOOL {
                ["true", "false", "1", "0"].iter().for_each(|word| assert_eq!(take(word), VVAE_OK));
            }
            take(text(param.default_value));
        }
    }
}

#[test]
fn cpu_accepts_fp32_and_bf16_with_exact_caches() {
    let v = Vae::open(&small()).unwrap();
    let refused = v.configure("precision", "fp16").unwrap_err();
    refused.says(VVAE_ERROR_ARGUMENT, &["precision", "fp16", "fp32 or bf16"]);
    for precision in ["bf16", "fp32", "auto"] {
        v.configure("precision", precision).unwrap();
    }
    v.configure("cache", "u8").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["cache", "u8"]);
    v.configure("cache", "exact").unwrap();
    // Where the processor lacks AMX, that is what the error says.
    v.configure("instruction_set", "amx").unwrap_err();
}

#[test]
fn parameters_have_their_documented_names() {
    let keys = |n| {
        let keys: BTreeSet<_> = params(n).iter().map(|p| text(p.key)).collect();
        assert_eq!(keys.len(), params(n).len(), "no two share a key");
        keys
    };
    let [encode, decode] = [keys(0), keys(1)];
    for key in ["memory_limit", "threads", "pixel_range", "scaling_factor", "slice_frames", "chunk_frames", "precision"]
    {
        assert!(encode.contains(key) && decode.contains(key), "{key}");
    }
    for key in ["posterior", "seed", "encode_tiled", "encode_tile_size", "encode_tile_overlap"] {
        assert!(encode.contains(key) && !decode.contains(key), "{key}");
    }
    for key in ["decode_tiled", "decode_tile_size", "decode_tile_overlap"] {
        assert!(!encode.contains(key) && decode.contains(key), "{key}");
    }
}

#[test]
fn unknown_numbers_are_refused() {
    // SAFETY: takes numbers only.
    unsafe {
        assert_eq!((api().vvae_port_count)(2), 0);
        assert_eq!((api().vvae_param_count)(u32::MAX), 0);
        assert_eq!((api().vvae_choice_count)(0, u32::MAX), 0);
        assert!((api().vvae_choice)(0, 0, 0).is_null(), "memory_limit has no choices");
        assert!((api().vvae_choice)(9, 0, 0).is_null());
    }
    let null = std::ptr::null_mut();
    // SAFETY: `struct_size` is right, or the pointer is null.
    unsafe {
        assert_eq!((api().vvae_node_info)(7, &mut sized()), VVAE_ERROR_ARGUMENT);
        assert!(error_text(null).contains("node: there is no number 7"), "{}", error_text(null));
        assert_eq!((api().vvae_port_info)(0, 3, &mut sized()), VVAE_ERROR_ARGUMENT);
        assert_eq!((api().vvae_param_info)(1, 99, &mut sized()), VVAE_ERROR_ARGUMENT);
        assert_eq!((api().vvae_device_info)(99, &mut sized()), VVAE_ERROR_ARGUMENT);
        assert_eq!((api().vvae_node_info)(0, std::ptr::null_mut()), VVAE_ERROR_ARGUMENT);
        assert!(error_text(null).contains("out is null"), "{}", error_text(null));
    }
}

#[test]
fn cpu_is_a_device() {
    // SAFETY: takes nothing.
    let count = unsafe { (api().vvae_device_count)() };
    let devices: Vec<vvae_device_desc> = (0..count)
        .map(|i| {
            let mut device = sized();
            // SAFETY: `struct_size` is right.
            assert_eq!(unsafe { (api().vvae_device_info)(i, &mut device) }, VVAE_OK);
            device
        })
        .collect();
    let cpu = devices.iter().find(|d| d.device_type == VVAE_DEVICE_CPU).unwrap();
    // SAFETY: the library ends its arrays with a NUL.
    let (id, name) = unsafe { (CStr::from_ptr(cpu.id.as_ptr()), CStr::from_ptr(cpu.name.as_ptr())) };
    assert_eq!(id, c"cpu");
    assert!(!name.is_empty());
    assert!(cpu.memory_total >= cpu.memory_free && cpu.memory_free > 0);
    assert_eq!((cpu.uuid[0], cpu.compute_major, cpu.compute_minor), (0, 0, 0));
    for gpu in devices.iter().filter(|d| d.device_type == VVAE_DEVICE_CUDA) {
        // SAFETY: as above.
        let uuid = unsafe { CStr::from_ptr(gpu.uuid.as_ptr()) }.to_str().unwrap();
        let parts: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(parts, [3, 8, 4, 4, 4, 12], "{uuid}");
        assert!(gpu.compute_major >= 8, "{}.{}", gpu.compute_major, gpu.compute_minor);
    }
}

/// An older host has a shorter struct. Nothing beyond it is written.
#[test]
fn device_info_fits_the_struct_of_an_older_host() {
    let mut device = sized::<vvae_device_desc>();
    let first_version = std::mem::offset_of!(vvae_device_desc, uuid);
    assert_eq!(first_version, 176);
    device.struct_size = first_version as u32;
    (device.uuid, device.compute_major) = ([0x55; 48], 0x5555);
    // SAFETY: `struct_size` is right.
    assert_eq!(unsafe { (api().vvae_device_info)(0, &mut device) }, VVAE_OK);
    assert!(device.memory_total > 0);
    assert_eq!((device.uuid, device.compute_major), ([0x55; 48], 0x5555));
}
