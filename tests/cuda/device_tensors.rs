//! Device tensors are read and written in place.

use crate::common::{run_info, small};
use crate::driver::Gpu;
use crate::strided_tensor::{DTYPES, FLOATS, ORDERS, Order, StridedTensor};
use crate::{latent, on_device, open, video};
use video_vae::capi::*;

const VIDEO: [i64; 5] = [2, 3, 5, 24, 16];
const LATENT: [i64; 5] = [2, 16, 2, 3, 2];

/// Compares the whole memory of an output, written through host memory and in place. Gaps must stay untouched.
fn both_ways(gpu: &Gpu, node: &str, mut input: StridedTensor, output: impl Fn() -> StridedTensor, what: &str) {
    let vae = open(&small());
    let mut by_host = output();
    vae.run(node, &input.on_host(), &by_host.on_host(), &run_info()).unwrap();
    let untouched = output();
    assert!(by_host.bytes() != untouched.bytes(), "{what}: nothing was written");
    let (from, to) = (gpu.copy_of(input.bytes()), gpu.copy_of(untouched.bytes()));
    vae.run(node, &input.on_device(&from), &untouched.on_device(&to), &run_info()).unwrap();
    assert!(to.read() == by_host.bytes(), "{what}: in place differs from through host memory");
    assert!(from.read() == input.bytes(), "{what}: the input was written to");
}

#[test]
fn device_tensors_of_every_type_and_layout_are_used_in_place() {
    let Some(gpu) = Gpu::open() else { return };
    for order in ORDERS {
        for dtype in DTYPES {
            let what = format!("{order:?} {dtype:#x}");
            both_ways(
                &gpu,
                "encode",
                StridedTensor::random(dtype, VIDEO, order),
                || StridedTensor::poisoned(VVAE_DTYPE_F32, LATENT, Order::Compact),
                &format!("encode from {what}"),
            );
            both_ways(
                &gpu,
                "decode",
                StridedTensor::random(VVAE_DTYPE_F32, LATENT, Order::Compact),
                || StridedTensor::poisoned(dtype, VIDEO, order),
                &format!("decode to {what}"),
            );
        }
        for dtype in FLOATS {
            let what = format!("{order:?} {dtype:#x}");
            both_ways(
                &gpu,
                "encode",
                StridedTensor::random(VVAE_DTYPE_U8, VIDEO, Order::Interleaved),
                || StridedTensor::poisoned(dtype, LATENT, order),
                &format!("encode to {what}"),
            );
            both_ways(
                &gpu,
                "decode",
                StridedTensor::random(dtype, LATENT, order),
                || StridedTensor::poisoned(VVAE_DTYPE_U8, VIDEO, Order::Interleaved),
                &format!("decode from {what}"),
            );
        }
    }
}

#[test]
fn device_and_host_tensors_mix() {
    let Some(gpu) = Gpu::open() else { return };
    let vae = open(&small());
    let latent = latent(3, 4, 5);
    let mut expected = video(&latent, VVAE_DTYPE_F32);
    vae.decode(&latent, &mut expected).unwrap();
    let (from, to) = (gpu.copy_of(latent.bytes()), gpu.memory(expected.bytes().len()));
    vae.run("decode", &latent.tensor(), &on_device(&expected, &to), &run_info()).unwrap();
    assert!(to.read() == expected.bytes(), "from host memory");
    let into = video(&latent, VVAE_DTYPE_F32);
    vae.run("decode", &on_device(&latent, &from), &into.tensor(), &run_info()).unwrap();
    assert!(into.bytes() == expected.bytes(), "to host memory");
}

#[test]
fn log_variance_may_be_a_device_tensor() {
    let Some(gpu) = Gpu::open() else { return };
    let vae = open(&small());
    let mut input = StridedTensor::random(VVAE_DTYPE_F32, VIDEO, Order::Interleaved);
    let outputs = || [0, 1].map(|_| StridedTensor::poisoned(VVAE_DTYPE_F32, LATENT, Order::Padded));
    let [mut mean, mut logvar] = outputs();
    let beside = logvar.on_host();
    let info = vvae_run_info { logvar: &beside, ..run_info() };
    vae.run("encode", &input.on_host(), &mean.on_host(), &info).unwrap();
    let (from, [a, b]) = (gpu.copy_of(input.bytes()), outputs().map(|tensor| gpu.copy_of(tensor.bytes())));
    let beside = logvar.on_device(&b);
    let info = vvae_run_info { logvar: &beside, ..run_info() };
    vae.run("encode", &input.on_device(&from), &mean.on_device(&a), &info).unwrap();
    assert!(a.read() == mean.bytes() && b.read() == logvar.bytes());
    assert!(mean.bytes() != logvar.bytes());
}

#[test]
fn tensor_on_another_device_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let vae = open(&small());
    let latent = latent(1, 2, 2);
    let (from, out) = (gpu.copy_of(latent.bytes()), video(&latent, VVAE_DTYPE_F32));
    let elsewhere = vvae_tensor { device_id: 7, ..on_device(&latent, &from) };
    let refused = vae.run("decode", &elsewhere, &out.tensor(), &run_info()).unwrap_err();
    refused.says(VVAE_ERROR_TENSOR, &["latent", "cuda:7", "cuda:0"]);
}
