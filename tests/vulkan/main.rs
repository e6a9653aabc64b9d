//! A short test of the first Vulkan device: a clip of each family, its bits however the work is cut, and a trace. Other tests
//! run on every device, in the files of the parent folder.

#[path = "../common/mod.rs"]
mod common;

use std::path::Path;

use common::safetensors::{Folder, Tensor, read};
use common::trace::{lanes, names, planned};
use common::{Buffer, Random, Vae, golden, small};

/// A handle on the device; `None` if there is none and none is required.
fn open(weights: &Path) -> Option<Vae> {
    match Vae::open_on(c"vulkan:0", weights) {
        Ok(vae) => Some(vae),
        Err(why) => {
            assert!(std::env::var_os("VVAE_REQUIRE_VULKAN").is_none(), "{}", why.text);
            println!("skipped: {}", why.text);
            None
        }
    }
}

fn buffer(tensor: &Tensor) -> Buffer {
    let mut shape: Vec<i64> = tensor.shape.iter().map(|d| *d as i64).collect();
    if shape.len() == 4 {
        // An image is a clip of one frame.
        shape.insert(2, 1);
    }
    Buffer::from_f32(shape.try_into().unwrap(), &tensor.values)
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |value: f64| value * value;
    let difference: f64 = found.iter().zip(expected).map(|(f, e)| square(f64::from(f - e))).sum();
    (difference / expected.iter().map(|e| square(f64::from(*e))).sum::<f64>()).sqrt()
}

#[test]
fn a_clip_of_every_family_matches_its_golden() {
    let cases = [
        ("small", "small-clip5"),
        ("families/sdxl", "families/sdxl-a"),
        ("families/flux2", "families/flux2-a"),
        ("families/wan21", "families/wan21-clip9"),
        ("families/wan22", "families/wan22-clip9"),
        ("families/qwen21", "families/qwen21-a"),
    ];
    for (weights, case) in cases {
        let Some(vae) = open(&golden(&format!("{weights}.safetensors"))) else { return };
        let tensors = read(&golden(&format!("{case}.safetensors")));
        let mut mean = Buffer::poisoned(buffer(&tensors["encode_mean"]).shape);
        vae.encode(&buffer(&tensors["encode_video"]), &mut mean).unwrap();
        let error = relative_error(mean.f32(), &tensors["encode_mean"].values);
        assert!(error <= 3e-3, "{case}: the mean has an error of {error:.1e}");
        let mut video = Buffer::poisoned(buffer(&tensors["decode_video"]).shape);
        vae.decode(&buffer(&tensors["decode_latent"]), &mut video).unwrap();
        // diffusers clamps the video of this family.
        let clamps = weights == "families/qwen21";
        let video: Vec<f32> = video.f32().iter().map(|v| if clamps { v.clamp(-1.0, 1.0) } else { *v }).collect();
        let error = relative_error(&video, &tensors["decode_video"].values);
        assert!(error <= 3e-3, "{case}: the video has an error of {error:.1e}");
    }
}

#[test]
fn slices_and_limits_change_no_bit() {
    let Some(vae) = open(&small()) else { return };
    let latent = Buffer::random(&mut Random(11), [1, 16, 5, 3, 5]);
    let run = || {
        let mut video = Buffer::poisoned([1, 3, 17, 24, 40]);
        vae.decode(&latent, &mut video).unwrap();
        video.bytes().to_vec()
    };
    let (expected, whole) = (run(), vae.plan("decode", latent.shape).unwrap().0.device_bytes);
    for (slice, chunk) in [("1", "1"), ("2", "3")] {
        vae.configure("slice_frames", slice).unwrap();
        vae.configure("chunk_frames", chunk).unwrap();
        assert!(run() == expected, "slices of {slice}, chunks of {chunk}");
    }
    vae.configure("slice_frames", "auto").unwrap();
    vae.configure("chunk_frames", "auto").unwrap();
    let mut offloaded = 0;
    for percent in [80, 60, 45] {
        vae.configure("memory_limit", &(whole * percent / 100).to_string()).unwrap();
        let Ok((plan, text)) = vae.plan("decode", latent.shape) else { break };
        if plan.exact == 1 {
            assert!(run() == expected, "{percent} %:\n{text}");
            offloaded += plan.host_bytes;
        }
    }
    assert!(offloaded > 0, "no plan used host memory");
}

#[test]
fn a_trace_has_the_operations_of_the_plan_and_changes_no_bit() {
    let Some(vae) = open(&small()) else { return };
    let (folder, latent) = (Folder::new("vulkan-trace"), Buffer::random(&mut Random(5), [1, 16, 2, 4, 6]));
    let [mut expected, mut found] = [(); 2].map(|()| Buffer::poisoned([1, 3, 5, 32, 48]));
    vae.decode(&latent, &mut expected).unwrap();
    let path = folder.0.join("trace.json");
    vae.configure("trace", path.to_str().unwrap()).unwrap();
    vae.decode(&latent, &mut found).unwrap();
    vae.configure("trace", "").unwrap();
    assert!(found.bytes() == expected.bytes(), "a trace changes the bits");
    let lanes = lanes(&path);
    let operations = lanes.iter().find(|lane| lane.name == "operations").expect("a lane of operations");
    let (found, seconds) = names(&operations.events);
    assert!(seconds > 0.0);
    let steps = planned(&vae, "decode", latent.shape);
    let mut steps = steps.iter();
    let mut last = "";
    for name in found {
        assert!(name == last || steps.any(|step| step == name), "{name} is not in its place");
        last = name;
    }
    assert!(lanes.len() > 1, "copies have lanes of their own");
}
