//! Kernels of 9.0 that begin before the launch before has ended, with the same results.

use super::graphs::{LatentClip, open};
use super::*;
use crate::backend::cuda::driver::testing::{DEPENDENT, PLAIN};

#[test]
fn dependent_launches_change_no_bits() {
    let gpus = gpus();
    let Some(gpu) = gpus.first() else { return };
    let is_hopper = gpu.context().gpu.capability == KernelArch::HOPPER;
    for (model, precision) in [("medium", "fp16"), ("small", "bf16"), ("small", "fp32")] {
        let mut session = open(model, &[("precision", precision)]);
        // Too large for graphs.
        let mut clip = LatentClip::new(3, 96, 80);
        PLAIN.set(true);
        DEPENDENT.set(0);
        let plain = clip.decode(&mut *session);
        assert_eq!(DEPENDENT.get(), 0);
        PLAIN.set(false);
        for run in 0..4 {
            assert!(clip.decode(&mut *session) == plain, "{model} in {precision}, run {run}");
        }
        println!("{model} in {precision}: {} dependent launches", DEPENDENT.get());
        assert_eq!(DEPENDENT.get() > 40, is_hopper, "{}", DEPENDENT.get());
    }
}
