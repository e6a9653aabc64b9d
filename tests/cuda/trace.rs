//! The key `trace` on a GPU: operations and copies have the times of the GPU's clock.

use std::path::Path;
use std::time::Instant;

use crate::common::safetensors::Folder;
use crate::common::trace::{Lane, lanes, names, planned};
use crate::common::{Buffer, Vae, small};
use crate::driver::Gpu;
use crate::{latent, open, video};
use video_vae::capi::*;

/// Decodes with a trace. Returns its lanes and the seconds of the call.
fn traced(vae: &Vae, latent: &Buffer, out: &mut Buffer, path: &Path) -> (Vec<Lane>, f64) {
    vae.configure("trace", path.to_str().unwrap()).unwrap();
    let started = Instant::now();
    vae.decode(latent, out).unwrap();
    let wall = started.elapsed().as_secs_f64();
    vae.configure("trace", "").unwrap();
    (lanes(path), wall)
}

#[test]
fn a_trace_has_the_operations_and_copies_of_the_plan() {
    let Some(_gpu) = Gpu::open() else { return };
    let folder = Folder::new("cuda-trace");
    let vae = open(&small());
    let latent = latent(9, 50, 66);
    let [mut expected, mut found] = [0; 2].map(|_| video(&latent, VVAE_DTYPE_F32));
    vae.decode(&latent, &mut expected).unwrap();
    let whole = vae.plan("decode", latent.shape).unwrap().0.device_bytes;
    let mut copies = 0;
    for percent in [100, 60, 40] {
        vae.configure("memory_limit", &(whole * percent / 100).to_string()).unwrap();
        let (plan, text) = vae.plan("decode", latent.shape).unwrap();
        assert_eq!(plan.exact, 1, "{text}");
        vae.decode(&latent, &mut found).unwrap();
        let (lanes, wall) = traced(&vae, &latent, &mut found, &folder.0.join(format!("{percent}.json")));
        assert!(found.bytes() == expected.bytes(), "{percent} %: a trace changes the bits");
        let (operations, others): (Vec<Lane>, Vec<Lane>) =
            lanes.into_iter().partition(|lane| lane.name == "operations");
        let [operations] = &operations[..] else { panic!("{} lanes of operations", operations.len()) };
        let (names, seconds) = names(&operations.events);
        assert!(seconds > 0.1 * wall && seconds <= wall, "{seconds} s of operations in {wall} s");
        // An operation may be several launches, or none.
        let steps = planned(&vae, "decode", latent.shape);
        let mut steps = steps.iter();
        let mut last = "";
        for name in names {
            assert!(name == last || steps.any(|step| step == name), "{name} is not in its place");
            last = name;
        }
        copies += others.iter().map(|lane| crate::common::trace::names(&lane.events).0.len()).sum::<usize>();
    }
    assert!(copies > 0, "no plan copied anything");
}
